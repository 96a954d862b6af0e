from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rmsnorm_fused import cli, rms_norm
from rmsnorm_fused.cli import app

runner = CliRunner()
README = Path(__file__).parents[1] / "README.md"


def test_info_names_every_back_end():
    answer = runner.invoke(app, ["info"])
    assert answer.exit_code == 0
    for name in ("pytorch", "triton", "cuda", "cpp"):
        assert name in answer.output
    assert "lowering under torch.compile on cpu-" in answer.output


def test_info_refuses_a_way_to_choose_that_there_is_not(monkeypatch):
    monkeypatch.setattr("lowering.choice._mode", "nope")
    answer = runner.invoke(app, ["info"])
    assert answer.exit_code == 2
    assert answer.stderr == "rmsnorm-fused: LOWERING: expected one of off, replay, got 'nope'\n"


def test_check_passes():
    answer = runner.invoke(app, ["check", "--shape", "33x100", "--dtype", "bfloat16", "--device", "cpu"])
    assert answer.exit_code == 0, answer.output
    assert "cpp" in answer.output
    assert "dweight" in answer.output


def test_check_fails_where_a_result_is_no_number(monkeypatch):
    monkeypatch.setattr(cli, "rms_norm", lambda *tensors, **options: rms_norm(*tensors, **options) * torch.nan)
    answer = runner.invoke(app, ["check", "--shape", "3x8", "--device", "cpu"])
    assert answer.exit_code == 1, answer.output


def test_bench_prints_a_row_for_each():
    answer = runner.invoke(app, ["bench", "--shape", "64x256", "--device", "cpu", "--seconds", "0.05"])
    assert answer.exit_code == 0, answer.output
    for name in ("eager formula", "F.rms_norm", "cpp"):
        assert name in answer.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "64"], "--shape: expected ROWSxCOLUMNS"),
        (["bench", "--dtype", "int8"], "--dtype: expected one of float32"),
        (["check", "--device", "tpu"], "--device takes auto, cpu or cuda"),
        (["check", "--shape", "9000000x900000", "--device", "cpu"], "--shape 9000000x900000: it needs "),
        (["bench", "--shape", "99999999999999999999x4", "--device", "cpu"], "take fewer rows or columns"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    answer = runner.invoke(app, arguments)
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_the_readmes_snippets_run():
    text = README.read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippets
    names: dict[str, object] = {
        "torch": torch,
        "x": torch.randn(4, 16, 256),
        "weight": torch.ones(256),
        "bias": torch.zeros(256),
    }
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)

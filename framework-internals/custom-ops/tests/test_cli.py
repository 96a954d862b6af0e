"""The command line and the documented snippets."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from custom_ops.builds import autograd_nodes
from custom_ops.cli import app
from custom_ops.roads.module import NAME

ROOT = Path(__file__).resolve().parents[1]
runner = CliRunner()


def test_info_names_build_and_torch() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.output
    assert re.search(r"library +(named library|wheel|compiled here|none)", result.output)
    assert "lowering under torch.compile on cpu-" in result.output
    assert "unless torch.use_deterministic_algorithms is on" in result.output


def test_bench_at_a_size_of_ones_own() -> None:
    result = runner.invoke(
        app,
        ["bench", "--op", "scale", "--count", "1000", "--dtype", "bfloat16", "--device", "cpu", "--seconds", "0.05"],
    )
    assert result.exit_code == 0, result.output
    assert "bfloat16" in result.output
    assert "scale" in result.output


def test_build_just_in_time_names_the_library() -> None:
    result = runner.invoke(app, ["build", "just-in-time"])
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.split("\n")[0]).suffix == ".so"


def test_build_autograd_names_the_library() -> None:
    result = runner.invoke(app, ["build", "autograd"])
    assert result.exit_code == 0, result.output
    assert Path(result.stdout.split("\n")[0]) == autograd_nodes.cached()


@pytest.mark.slow
def test_build_ahead_of_time_leaves_a_wheel_that_has_been_loaded(tmp_path: Path) -> None:
    result = runner.invoke(app, ["build", "ahead-of-time", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    wheel = Path(result.stdout.split("\n")[0])  # standard error has the progress of a slow build
    assert wheel.name.startswith(NAME)
    assert list(tmp_path.iterdir()) == [wheel]
    assert "pip install" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["build", "sideways"],
            "custom-ops: expected one of library, autograd, ahead-of-time, just-in-time, got 'sideways'",
        ),
        (["bench", "--dtype", "int8"], "custom-ops: --dtype: expected one of float32"),
        (["bench", "--op", "none"], "custom-ops: --op: expected one of vector_add, axpb, scale"),
        (["bench", "--device", "tpu"], "custom-ops: --device takes auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


PAGES = [ROOT / "README.md", ROOT.parents[1] / "docs" / "custom-ops.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_of_the_documentation_run(page: Path) -> None:
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, str(page), "exec"), {})

"""The main job end to end, on a shape that takes seconds, and the report of what a GPU would add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchkit import Quantity, Record
from benchkit.environment import Gpu, capture
from benchkit.report import render
from benchkit.results import Recorder
from benchkit.run import Run
from rmsnorm_fused import contestants, lens
from rmsnorm_fused.accuracy import expected
from rmsnorm_fused.report import figures, finding

TINY = {
    "dtype": "bfloat16", "headline": [64, 128], "widths": [32, 256], "elements": 8192, "batches": [1],
    "batch_columns": 64,
    "seconds": 0.01, "compiled_groups": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    root = Path(lens.__file__).parent
    recorder = Recorder(folder, lens="rmsnorm-fused", environment=capture("cpu", root=root), configuration=TINY)
    lens.collect(Run("cpu", TINY, recorder))
    recorder.finish()
    return recorder.results


def test_every_implementation_is_checked_and_timed(results):
    for which, error in (("forward", "error_y"), ("backward", "error_dweight")):
        for name in ("eager formula", "F.rms_norm", "cpp"):
            record = results.one(which, group="headline", implementation=name)
            assert record["time"].value > 0
            assert error in record.values
        own = results.one(which, group="headline", implementation="cpp")
        assert own["share_of_bound"].value <= 1
        copy = results.one(which, group="headline", implementation="copy")
        moved = {"forward": 2, "backward": 3}[which] * 64 * 128 * 2
        assert copy["bandwidth"].value == pytest.approx(moved / copy["time"].value)
    assert {absence.what for absence in results.absences} == {"`triton`", "`cuda`"}


def test_the_report_renders(results):
    text = render(results, lens.REPORT)
    assert finding(results) in text
    assert "64 × 128 bfloat16" in text
    assert {figure.name for figure in figures(results)} == {"headline", "widths-forward", "widths-backward"}
    for figure in figures(results):
        figure.draw()


def test_the_report_of_a_gpu_has_kernels_and_calls(results):
    gpu = Gpu("NVIDIA H200", "9.0", 132, 1 << 37, 60 << 20, "13.0")
    calls = tuple(
        Record("call", {"rows": 1, "columns": 64, "implementation": name}, {"time": Quantity(time, "s")})
        for name, time in (("eager formula", 1e-4), ("cpp", 1e-5))
    )
    there = replace(results, environment=replace(results.environment, gpu=gpu), records=(*results.records, *calls))
    text = render(there, lens.REPORT)
    assert "replayed from CUDA graphs" in text
    assert "| 1 × 64 | call from Python |" in text
    assert "the least is paid by cpp (10.0 µs a call), the most by eager formula (100 µs)" in text


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    functions, _ = contestants.usable("cpu")
    case = lens.Case("headline", 8, 16, ("forward", "backward"), False)
    wrong = {**functions, "cpp": lambda x, weight: functions["cpp"](x, weight) * 1.01}
    with pytest.raises(RuntimeError, match=r"cpp, 8 x 16 torch\.float32: error over its bound"):
        lens._errors(case, wrong, torch.float32, "cpu")


def test_the_bound_catches_a_second_rounding():
    x = torch.randn(64, 256).bfloat16()
    weight = torch.randn(256).bfloat16()
    reference = expected(x, weight, torch.ones_like(x), 1e-6)["y"]
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert reference.share_of_bound((normalised * weight.float()).bfloat16()) <= 1
    assert reference.share_of_bound(normalised.bfloat16() * weight) > 1.2

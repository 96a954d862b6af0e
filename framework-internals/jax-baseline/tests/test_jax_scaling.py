"""The long part of the main job, on forced CPU devices: what it keeps, and that it goes on with what is missing."""

from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchkit import UserError
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.report import write
from benchkit.results import Recorder
from benchkit.run import Run
from engines.measure import measure_engines
from jax_baseline.lens import build_lens, configure
from jax_baseline.timing import scaling
from jax_baseline.timing.records import ScalingRecord, Source

ROOT = Path(__file__).resolve().parents[1]
TWO_DEVICES = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"


def run_in(folder: Path) -> Run:
    configuration = configure("cpu", True)
    sweep = {**configuration["sweep"], "rounds": 2, "steps": 1}
    recorder = Recorder.going_on(
        folder,
        lens="jax-baseline",
        environment=capture("cpu", root=ROOT),
        configuration={**configuration, "sweep": sweep},
    )
    return Run("cpu", recorder.results.configuration, recorder)


def test_meshes_are_two_devices_and_all() -> None:
    assert scaling.meshes(2) == [(2, 1), (1, 2)]
    assert scaling.meshes(8) == [(2, 1), (1, 2), (8, 1), (1, 8)]


@pytest.mark.slow
def test_the_step_on_two_devices_beside_one_and_a_mesh_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def keep(*args: Any, **kwargs: Any) -> Any:
        measured.append(measure_engines(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr("engines.measure.measure_engines", keep)
    run = run_in(tmp_path)
    scaling.measure(run, ROOT, [(1, 2), (3, 1)], options=TWO_DEVICES)
    shared, failed = ScalingRecord.select(run.recorder.results)
    assert shared.figures
    tokens = 2 * run.configuration["sweep"]["batch_size"] * 128
    step = shared.figures.step.value
    assert shared.figures.rate.value * step == pytest.approx(tokens, rel=1e-9)
    one, mesh = (measured[0][name].timing.samples for name in ("one", "mesh"))
    assert shared.figures.efficiency.value == pytest.approx(median(map(truediv, one, mesh)), rel=1e-9)
    assert shared.collectives["all-gather"] > 0
    assert "needs 3 devices, there are 2" in failed.failed
    text = write(tmp_path, build_lens(ROOT).report).read_text()
    assert "\n## Several GPUs\n" in text
    assert "\n| 1 × 2 | " in text
    assert "\n3 × 1 failed: " in text


def test_what_is_measured_or_too_late_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    begun = []
    monkeypatch.setattr("engines.measure.measure_engines", lambda engines, *_, **__: begun.append(engines))
    run.add(ScalingRecord(2, 1, Source("", "", None, None), failed="why").record())
    scaling.measure(run, ROOT, [(2, 1)])
    with budget.within(0.0):
        scaling.measure(run, ROOT, [(1, 2)])
    assert not begun


def test_fewer_than_two_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected two or more, found 0"):
        scaling.sweep(replace(run_in(tmp_path), device="cpu"), ROOT)

"""The sweep over models and modes: it goes on where it stopped, ends in time, and a cell that fails is a row."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchkit import Quantity, UserError
from benchkit.environment import Gpu, capture
from benchkit.processes import budget
from benchkit.report import figures, render
from benchkit.report.drawing import draw_chart
from benchkit.results import Recorder, Results, load
from benchkit.run import Run, sweep_and_write
from compile_bench import Case, ChildFailure, Harness
from compile_bench.capture.trace import CompileTrace
from compile_bench.lens import build_lens, configure
from compile_bench.measure import steps
from compile_bench.measure.records import (
    Accuracy,
    Bench,
    EagerStart,
    ErrorPair,
    FailedCell,
    FirstSteps,
    Memory,
    Steady,
    StepProfile,
    SweepCall,
    Untuned,
)
from compile_bench.report.autotuning import autotuned
from compile_bench.report.queries import measured_cases
from compile_bench.report.sections import report
from compile_bench.sweep import cells, missing, sweep, units
from compile_bench.targets.case import MODES

ROOT = Path(__file__).parents[3]
FIRST = FirstSteps((1.0, 0.1, 0.1))

# A model that is well, and one whose every call is noted and takes longer than any test waits.
TARGETS = """
import time
from pathlib import Path
import torch

def well():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)

class Hangs(torch.nn.Module):
    def forward(self, x):
        with Path(__file__).with_name("hanging").open("a") as file:
            file.write("x")
        time.sleep(600)

def hangs():
    return Hangs(), (torch.ones(1),)
"""


def configuration(targets=("mlp",), modes=MODES, processes=1, **more):
    return {
        "device": "cpu",
        "groups": [list(targets)],
        "kinds": ["training", "inference"],
        "modes": list(modes),
        "processes": processes,
        "compile_threads": None,
        "limit_seconds": 60.0,
        "steady_seconds": 0.1,
        **more,
    }


def run_of(folder, **settings):
    """A run as ``run.py --sweep`` makes it."""
    found = {"sweep": configuration(**settings)}
    recorder = Recorder.going_on(
        folder, lens="compile-bench", environment=capture("cpu", root=ROOT), configuration=found
    )
    return Run("cpu", recorder.results.configuration, recorder)


def measured(self, case, *, eager, tuned=False, **options):
    """What ``Harness.bench`` returns, made up: modes differ by a quarter each, autotuning costs ten seconds."""
    step = 0.01 / (1 + 0.25 * MODES.index(case.mode))
    autotuning = 10.0 if case.mode.startswith("max-autotune") and not tuned else 0.0
    spread = Quantity(step, "s", 0.99 * step, 1.01 * step, 9, "p20-p80")
    speedup = Quantity(0.01 / step, "×", 0.0099 / step, 0.0101 / step, 9, "bootstrap 95%")
    even = Quantity(1.0, "×", 0.999, 1.001, 9, "bootstrap 95%")
    profile = StepProfile(0.9, 4, 7, 2, 1e-5)
    other = None
    if (plain := replace(case, device="cuda").untuned) is not None:
        slower = 0.01 / (1 + 0.25 * MODES.index(plain.mode))
        ratio = Quantity(slower / step, "×", 0.99 * slower / step, 1.01 * slower / step, 9, "bootstrap 95%")
        other = Untuned(plain.mode, Quantity(slower, "s", slower, slower, 9, "p20-p80"), ratio)
    eager_step = Quantity(0.01, "s", 0.0099, 0.0101, 9, "p20-p80")
    return Bench.of_case(
        case,
        CompileTrace(),
        eager=eager,
        cold=FirstSteps((3.0 + autotuning, 0.1, 0.1), phases={"Inductor": 2.0}),
        steady=Steady(eager_step, spread, speedup, "wall-clock", None, even, other),
        accuracy=Accuracy(ErrorPair("output", 1e-7, 1e-7, 4e-7), None, 1),
        memory=Memory(2048, 1024),
        eager_profile=profile,
        compiled_profile=profile,
        tuned=tuned,
    )


@pytest.fixture
def made_up(monkeypatch):
    """No process is started; what would be measured comes at once. A list of the eager cases that were asked for."""
    asked = []

    def eager(self, case, **options):
        asked.append((case.target, case.kind))
        return FIRST

    monkeypatch.setattr(Harness, "toolchain_seconds", lambda self: 0.0)
    monkeypatch.setattr(Harness, "eager", eager)
    monkeypatch.setattr(Harness, "bench", measured)
    return asked


def outcomes(results):
    """Cell -> why it failed, or nothing."""
    measured = {(each.target, each.kind, each.mode): "" for each in Bench.select(results)}
    return measured | {(each.target, each.kind, each.mode): each.why for each in FailedCell.select(results)}


def test_every_model_is_swept_in_both_kinds_and_all_modes():
    found = cells(configure("cuda", quick=False)["sweep"])
    assert len(found) == len(set(found)) == 13 * 2 * 4
    assert {case.device for case in found} == {"cuda"}


def test_groups_come_in_order_and_autotuning_first_but_in_the_last():
    wanted = configuration(groups=[["gpt", "bert"], ["mamba"]])
    found = units(wanted, cells(wanted))
    assert sorted(case.mode for unit in found for case in unit) == sorted(4 * [*MODES] + 2 * [*MODES])
    assert [(unit[0].target, len(unit)) for unit in found[:4]] == [("gpt", 2), ("bert", 2), ("gpt", 2), ("bert", 2)]
    assert [case.mode for case in found[0]] == ["max-autotune-no-cudagraphs", "max-autotune"]
    assert {unit[0].target for unit in found[-6:]} == {"mamba"}
    assert [len(unit) for unit in found[-6:]] == [1, 1, 1, 1, 2, 2]
    # What is left of a pair is a unit of its own.
    (left,) = units(wanted, [Case("gpt", train=False, mode="max-autotune")])
    assert left == (Case("gpt", train=False, mode="max-autotune"),)


def test_eager_steps_are_measured_once_a_model_and_kind(tmp_path, made_up):
    run = run_of(tmp_path, targets=["mlp", "bert"], processes=3)
    sweep(run, ROOT)
    assert len(made_up) == len(set(made_up)) == 4
    assert len(EagerStart.select(run.recorder.results)) == 4
    assert len(Bench.select(run.recorder.results)) == 2 * 2 * 4
    assert missing(run.recorder.results) == []


def test_a_sweep_that_is_killed_goes_on_with_what_is_missing(tmp_path, made_up):
    """Killed for real: no handler of ours runs."""
    code = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import test_compile_sweep as tests
from compile_bench import Harness

calls = []
def bench(self, case, **options):
    calls.append(case)
    if len(calls) == 4:
        while len(tests.outcomes(tests.load(Path(sys.argv[1], "sweep.json")))) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return tests.measured(self, case, **options)

Harness.toolchain_seconds = lambda self: 0.0
Harness.eager = lambda self, case, **options: tests.FIRST
Harness.bench = bench
tests.sweep(tests.run_of(Path(sys.argv[1])), tests.ROOT)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parent], env=environment)
    assert ended.returncode == -signal.SIGKILL
    before = load(tmp_path / "sweep.json")
    assert before.complete
    assert len(outcomes(before)) == 3
    run = run_of(tmp_path)
    assert len(missing(run.recorder.results)) == 5
    sweep(run, ROOT)
    after = load(tmp_path / "sweep.json")
    assert after == run.recorder.results
    assert after.records[: len(before.records)] == before.records
    assert len(Bench.select(after)) == len(outcomes(after)) == 8
    assert len(EagerStart.select(after)) == 2
    assert [call.number for call in SweepCall.select(after)] == [1, 2]
    records = len(after.records)
    sweep(run_of(tmp_path), ROOT)
    assert len(load(tmp_path / "sweep.json").records) == records  # nothing is missing, nothing is begun


def test_a_cell_that_fails_is_a_row_and_is_not_tried_again(tmp_path, made_up, monkeypatch):
    def bench(self, case, **options):
        if case.train and case.mode == "reduce-overhead":
            raise ChildFailure("mlp (compiled, reduce-overhead) ended with status -11: it wrote nothing")
        if not case.train and case.mode == "max-autotune-no-cudagraphs":
            raise ChildFailure("mlp (compiled) was ended after its time limit of 60 s")
        return measured(self, case, **options)

    monkeypatch.setattr(Harness, "bench", bench)
    run = run_of(tmp_path)
    sweep(run, ROOT)
    found = outcomes(run.recorder.results)
    assert len(found) == 8
    assert "status -11" in found["mlp", "training", "reduce-overhead"]
    # What autotunes the same kernels would fail the same way.
    assert found["mlp", "inference", "max-autotune"].startswith("not begun, since the mode that autotunes the same")
    assert sum(not why for why in found.values()) == 5
    assert missing(run.recorder.results) == []
    text = render(run.recorder.results, report)
    assert "- mlp training, reduce-overhead: mlp (compiled, reduce-overhead) ended with status -11" in text
    assert "| mlp training | 4 layers of 512, 64 × 512 | failed | – | – | – | – |" in text
    assert "3 failed (mlp in reduce-overhead, max-autotune, max-autotune-no-cudagraphs)" in text


def test_a_model_that_fails_eagerly_is_asked_once(tmp_path, made_up, monkeypatch):
    asked = []

    def eager(self, case, **options):
        asked.append(case)
        raise UserError("mlp: the eager step raised")

    monkeypatch.setattr(Harness, "eager", eager)
    run = run_of(tmp_path)
    sweep(run, ROOT)
    assert set(outcomes(run.recorder.results).values()) == {
        "mlp: the eager step raised",
        "not begun, since the mode that autotunes the same kernels failed: mlp: the eager step raised",
    }
    assert len(asked) == 2


def test_what_found_no_memory_is_measured_once_more_alone(tmp_path, made_up, monkeypatch):
    tried = []

    def bench(self, case, **options):
        tried.append(case)
        if tried.count(case) == 1:
            raise ChildFailure("a (compiled) ended with status 1: torch.OutOfMemoryError: CUDA out of memory.")
        return measured(self, case, **options)

    monkeypatch.setattr(Harness, "bench", bench)
    run = run_of(tmp_path, modes=MODES[:2], processes=2)
    sweep(run, ROOT)
    assert len(tried) == 8
    assert set(outcomes(run.recorder.results).values()) == {""}
    # Alone there is no other chance.
    tried.clear()
    run = run_of(tmp_path / "alone", modes=MODES[:1])
    sweep(run, ROOT)
    assert all("out of memory" in why for why in outcomes(run.recorder.results).values())


@pytest.mark.parametrize("where", ["bench", "new_cache"])
def test_a_mistake_of_ours_is_not_swallowed(tmp_path, made_up, monkeypatch, where):
    """Nor is what the disk refuses: nobody waits for the answer of a thread that has ended."""
    monkeypatch.setattr(Harness, where, lambda *given, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep(run_of(tmp_path), ROOT)


@pytest.fixture
def hangs(tmp_path, monkeypatch, made_up):
    """A target whose eager steps never end; they are asked for in a real process, those of all others are made up."""
    (tmp_path / "targets.py").write_text(TARGETS)
    name = f"{tmp_path / 'targets.py'}:hangs"

    def eager(self, case, *, timing_folder):
        return self.ask(steps.eager, case, timing_folder=timing_folder) if case.target == name else FIRST

    monkeypatch.setattr(Harness, "eager", eager)
    return name


def test_a_cell_that_hangs_is_ended_and_the_rest_is_measured(tmp_path, hangs):
    run = run_of(tmp_path / "out", targets=[hangs, "mlp"], modes=MODES[:1], processes=2, limit_seconds=1.0)
    sweep(run, ROOT)
    found = outcomes(run.recorder.results)
    for kind in ("training", "inference"):
        assert found["mlp", kind, "default"] == ""
        assert found[hangs, kind, "default"].endswith("was ended after its time limit of 1 s")


def test_it_ends_in_time_with_what_it_has(tmp_path, hangs, monkeypatch):
    """What hangs is ended when the time is over, and its cells are missing, not failed.

    The time is over when the eager steps of both kinds hang, however slow the machine is.
    """
    hanging = tmp_path / "hanging"
    hanging.touch()
    clock = SimpleNamespace(monotonic=lambda: 1e6 * (hanging.stat().st_size == 2), sleep=time.sleep)
    for module in ("benchkit.processes.budget", "benchkit.processes.runner", "benchkit.processes.fork_server"):
        monkeypatch.setattr(f"{module}.time", clock)
    monkeypatch.setattr("compile_bench.sweep.time", clock)
    run = run_of(tmp_path / "out", targets=[hangs, "mlp"], modes=MODES[:2], processes=4, limit_seconds=600.0)
    with budget.within(3.0):
        sweep(run, ROOT)
    assert {case.target for case in missing(run.recorder.results)} == {hangs}
    assert len(outcomes(run.recorder.results)) == 4
    assert f"- {hangs} training: default, reduce-overhead" in render(run.recorder.results, report)


def test_without_any_time_the_report_names_every_cell(tmp_path):
    run = run_of(tmp_path, modes=MODES[:2])
    with budget.within(0.0):
        sweep(run, ROOT)
    text = render(run.recorder.results, report)
    assert "0 cells on" in text
    for kind in ("training", "inference"):
        assert f"- mlp {kind}: default, reduce-overhead" in text


def on_gpu(results: Results) -> Results:
    gpu = Gpu("NVIDIA H200", "9.0", 132, 2**37, 2**26, "13.0")
    return replace(results, environment=replace(results.environment, gpu=gpu, device="cuda"))


def test_the_report_shows_each_cell_and_whether_autotuning_was_worth_it(tmp_path, made_up):
    run = run_of(tmp_path, targets=["mlp", "bert"], processes=2)
    sweep(run, ROOT)
    results = on_gpu(run.recorder.results)
    text = render(results, report)
    assert (
        "Of 16 cells (a model, training or inference, a mode), 12 are faster than eager, 4 inconclusive and 0 not"
        in text
    )
    assert "16 cells on" in text
    assert "Not measured yet" not in text
    # All models of this run have the same figures, which then stand in a sentence.
    same = "first steps: 13.2 s; compiling: 2.00 s; step: 10.0 ms → 5.71 ms; peak memory: 2.00 KiB → 1.00 KiB;"
    assert f"In every row: {same}" in text
    assert "In every row: first steps: 3.20 sᵃ;" in text
    assert "by 1.00× in the middle and 1.00× at most" in text
    # Ten seconds of autotuning for a step of 10 ms / 1.5 instead of 10 ms / 1.25; and without graphs 10 ms / 1.75.
    assert "| mlp training, max-autotune | reduce-overhead | 1.20× (1.19–1.21) | +10.0 sᵃ | 7,500 steps |" in text
    assert "| mlp training, max-autotune-no-cudagraphs | default | 1.75× (1.73–1.77) | +10.0 s | 2,333 steps |" in text
    assert "a step was faster in 8 of 8 cases" in text
    tuned = autotuned(results, measured_cases(results))
    assert {each.borrowed for each in tuned} == {True, False}
    charts = {chart.name: chart for chart in figures(results, report)}
    assert {"speedup", "autotuning", "models"} <= set(charts)
    assert all(len(charts[name].categories()) == 4 for name in ("speedup", "autotuning"))
    # The speed-ups of several modes are from several processes, so only those of one are drawn together.
    series = {name: charts[name].panels[0].series for name in ("speedup", "autotuning")}
    assert [line.name for line in series["speedup"]] == ["inconclusive"]  # those of mode default
    assert len(series["speedup"][0].points) == 4
    assert series["autotuning"][0].name.startswith("max-autotune against")
    for chart in charts.values():
        draw_chart(chart)


def test_cells_do_not_stand_in_the_tables_of_the_main_job(tmp_path, made_up):
    run = run_of(tmp_path)
    sweep(run, ROOT)
    text = render(run.recorder.results, report)
    assert "## Are the numbers right?" not in text
    assert "| eager against itself |" not in text
    assert "## The modes" in text


def test_a_sweep_is_not_put_into_the_results_of_another_machine(tmp_path, made_up):
    run = run_of(tmp_path)
    sweep(run, ROOT)
    other = on_gpu(run.recorder.results)
    with pytest.raises(
        UserError,
        match=r"was measured with machine .*-cores-.*, this is nvidia-h200-.*; remove it, or name another folder",
    ):
        Recorder.going_on(tmp_path, lens="compile-bench", environment=other.environment, configuration={})


@pytest.mark.slow
def test_two_real_cells_side_by_side(tmp_path, monkeypatch):
    """Through the command's own road: two processes compile, each measures while the other is stopped."""
    lens = build_lens(ROOT / "framework-internals" / "compile-bench")
    (tmp_path / "targets.py").write_text(TARGETS)
    wanted = {
        **configuration([f"{tmp_path / 'targets.py'}:well"], MODES[:2], 2, limit_seconds=1800.0),
        "kinds": ["training"],
    }
    lens = replace(lens, configure=lambda device, quick: {"sweep": wanted})
    written = sweep_and_write(lens, device="cpu", quick=True, out=tmp_path / "out")
    results = load(tmp_path / "out" / "sweep.json")
    assert list(outcomes(results).values()) == ["", ""]
    cases = measured_cases(results)
    assert len(cases) == 2
    for case in cases:
        assert 0 < sum(case.cold.phases.values()) <= case.cold.total
    assert all(case.accuracy.holds for case in cases)
    assert "2 cells on" in written.read_text()

"""The main job: work that fails or is too late does not stop the rest."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchkit import Quantity, UserError
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.report import render
from benchkit.results import Record, Recorder
from benchkit.run import Run
from compile_bench import Case, ChildFailure, Harness
from compile_bench.capture.trace import CompileTrace
from compile_bench.lens import _MainJob, collect, configure
from compile_bench.measure.records import (
    Accuracy,
    Bench,
    ErrorPair,
    FirstSteps,
    Memory,
    ShapeStudy,
    Steady,
    StepProfile,
)
from compile_bench.measure.shapes import Passes
from compile_bench.report.sections import report

ROOT = Path(__file__).parents[3]


@pytest.fixture
def measuring(tmp_path):
    configuration = {"until_seconds": {"cases": -1.0, "more cases": 1e6, "shapes": -1.0}}
    recorder = Recorder(
        tmp_path, lens="compile-bench", environment=capture("cpu", root=ROOT), configuration=configuration
    )
    with Harness.open("cpu") as harness:
        yield _MainJob(Run("cpu", configuration, recorder), harness, ROOT)


def record(name, **labels):
    return Record(name, labels, {"price": Quantity(1.0, "s")}, {})


def fails():
    raise UserError("it is not there")


def names(measuring):
    return [entry.name for entry in measuring.run.recorder.results.records]


def absences(measuring):
    return {entry.what: entry.why for entry in measuring.run.recorder.results.absences}


def test_a_failure_is_said_and_the_rest_is_kept(measuring):
    work = [("first", lambda: [record("a")]), ("second", fails), ("third", lambda: [record("b"), record("c")])]
    measuring._measure("more cases", work)
    assert sorted(names(measuring)) == ["a", "b", "c"]
    assert absences(measuring) == {"second": "it is not there"}


def test_when_the_budget_is_spent_the_rest_is_named(measuring):
    with budget.within(0.0):
        measuring._measure("more cases", [("first", lambda: [record("a")]), ("second", fails)])
    assert names(measuring) == []
    assert "--budget" in absences(measuring)["first; second"]


def test_a_mistake_of_ours_is_not_swallowed(measuring):
    with pytest.raises(ZeroDivisionError):
        measuring._measure("more cases", [("bad", lambda: 1 / 0)])


def test_what_comes_too_late_is_named_once(measuring):
    measuring._measure("shapes", [(f"work {index}", list) for index in range(5)])
    assert absences(measuring) == {
        "work 0; work 1; work 2; 2 others": "left out for time: of shapes no more is begun -1 s after the start"
    }


def test_one_case_is_measured_however_slow_the_machine_is(measuring):
    work = [("bad", fails), ("first", lambda: [record("case")]), ("second", lambda: [record("case")])]
    measuring._measure("cases", work)
    assert names(measuring) == ["case"]
    assert list(absences(measuring)) == ["bad", "second"]


def test_the_eager_start_of_a_model_is_kept_once(measuring, monkeypatch):
    asked = []

    def eager(self, case):
        asked.append(case)
        return FIRST

    monkeypatch.setattr(Harness, "eager", eager)
    monkeypatch.setattr(Harness, "bench", lambda self, case, **options: bench(case))
    measuring.run.configuration["steady_seconds"] = 1.0
    case = {"target": "gpt", "train": True, "scope": "whole", "warm": False, "artifacts": False}
    measuring.run.configuration["more cases"] = [{**case, "mode": mode} for mode in ("default", "reduce-overhead")]
    measuring.measure_cases("more cases")
    assert names(measuring) == ["eager start", "case", "case"]
    assert len(asked) == 1


def test_after_the_deadline_nothing_is_begun_and_what_runs_is_ended(measuring, monkeypatch):
    times = itertools.count(step=0.001)  # each look at the clock; the second one is after the fork
    for module in ("runner", "fork_server"):
        clock = SimpleNamespace(monotonic=lambda: next(times), sleep=time.sleep)
        monkeypatch.setattr(f"benchkit.processes.{module}.time", clock)
    measuring.harness.deadline = next(times)
    with pytest.raises(ChildFailure, match=r"mlp \(eager, default\) was not begun: the time for all"):
        measuring.harness.eager(Case("mlp"))
    measuring.harness.deadline = next(times) + 0.0025  # a model and three steps take longer than two looks
    with pytest.raises(ChildFailure, match=r"mlp \(eager, default\) was ended: the time for all"):
        measuring.harness.eager(Case("mlp"))


def test_every_part_of_the_job_has_its_deadline():
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            found = configure(device, quick)
            parts = {key for key in ("cases", "more cases", "shapes") if found[key]}
            assert parts <= set(found["until_seconds"])
            assert all(seconds < found["end_seconds"] for seconds in found["until_seconds"].values())


def bench(case):
    """A measured case, made up."""
    step, even = Quantity(0.01, "s", 0.009, 0.011, 9, "p20-p80"), Quantity(1.0, "×", 0.99, 1.01, 9)
    steady = Steady(step, step, Quantity(1.5, "×", 1.4, 1.6, 9, "bootstrap 95%"), "cuda-events", None, even)
    profile = StepProfile(0.9, 4, 7, 2, 1e-5)
    return Bench.of_case(
        case,
        CompileTrace(),
        eager=FIRST,
        cold=FIRST,
        steady=steady,
        accuracy=Accuracy(ErrorPair("output", 1e-7, 1e-7, 4e-7), None, 1),
        memory=Memory(2048, 1024),
        eager_profile=profile,
        compiled_profile=profile,
    )


FIRST = FirstSteps((1.0, 0.1, 0.1))


def test_the_gpu_job_goes_through_all_its_parts_whatever_fails(tmp_path, monkeypatch):
    """With a harness that answers at once: on a machine without a GPU, too."""

    def benched(self, case, **options):
        if case.scope == "blocks":
            raise UserError("gpt: the model raised")
        return bench(case)

    def in_child(self, call, **options):
        (case,), job = call.args, call.func.__name__
        if job == "shapes":
            passes = Passes(call.keywords["strategy"], 1.0, Quantity(0.1, "s", 0.1, 0.1, 9, "p20-p80"), 1)
            return ShapeStudy.of_case(case, ("[8]", "[5]"), ("args[0] dimension 0",), [passes])
        raise ChildFailure(f"{case.target} ({job}, default) ended with status -11: it wrote nothing")

    monkeypatch.setattr(Harness, "bench", benched)
    monkeypatch.setattr(Harness, "eager", lambda self, case, **options: FIRST)
    monkeypatch.setattr(Harness, "_in_child", in_child)
    monkeypatch.setattr(Harness, "toolchain_seconds", lambda self: 2.0)
    configuration = configure("cuda", quick=False)
    recorder = Recorder(
        tmp_path, lens="compile-bench", environment=capture("cpu", root=ROOT), configuration=configuration
    )
    collect(Run("cuda", configuration, recorder), ROOT / "framework-internals" / "compile-bench")
    results = recorder.results
    assert [(each.mode, each.scope) for each in Bench.select(results)] == [("default", "whole")]
    assert len(results.select("shapes")) == 1
    absent = {each.what: each.why for each in results.absences}
    assert "status -11" in absent["the break table of planted"]
    assert absent["gpt training, mode default, blocks"] == "gpt: the model raised"
    text = render(results, report)
    assert "## Shapes that change: gpt2 inference" in text
    assert "A process is forked from an interpreter that has imported torch" in text

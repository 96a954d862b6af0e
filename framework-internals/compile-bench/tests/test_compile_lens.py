"""The main job: what fails or comes too late leaves the rest standing, and an interruption ends what runs."""

import time
from pathlib import Path

import pytest

from benchkit import Quantity, UserError
from benchkit.environment import capture
from benchkit.results import Record, Recorder
from benchkit.run import Run
from compile_bench import Case, Harness, WorkerFailure
from compile_bench.lens import _Measuring, configure

ROOT = Path(__file__).parents[3]


@pytest.fixture
def measuring(tmp_path):
    configuration = {"until_seconds": {"cases": -1.0, "sweep": 1e6, "shapes": -1.0}}
    recorder = Recorder(
        tmp_path, lens="compile-bench", environment=capture("cpu", root=ROOT), configuration=configuration
    )
    with Harness.open("cpu") as harness:
        yield _Measuring(Run("cpu", configuration, recorder), harness, ROOT)


def record(name, **labels):
    return Record(name, labels, {"price": Quantity(1.0, "s")}, {})


def fails():
    raise UserError("it is not there")


def names(measuring):
    return [entry.name for entry in measuring.run.recorder.results.records]


def absences(measuring):
    return {entry.what: entry.why for entry in measuring.run.recorder.results.absences}


@pytest.mark.parametrize("waves", [True, False])
def test_a_failure_is_said_and_the_rest_is_kept(measuring, waves):
    work = [("first", lambda: [record("a")]), ("second", fails), ("third", lambda: [record("b"), record("c")])]
    measuring._keep("sweep", work, 2, waves=waves)
    assert sorted(names(measuring)) == ["a", "b", "c"]
    assert absences(measuring) == {"second": "it is not there"}


def test_a_mistake_of_ours_is_not_swallowed(measuring):
    with pytest.raises(ZeroDivisionError):
        measuring._keep("sweep", [("bad", lambda: 1 / 0)], 1)


def test_what_comes_too_late_is_named_once(measuring):
    measuring._keep("shapes", [(f"work {index}", list) for index in range(5)], 2)
    assert absences(measuring) == {
        "work 0, work 1, work 2 and 2 others": "-1 s after the start no more was begun of this part (shapes)"
    }


def test_one_case_is_measured_however_slow_the_machine_is(measuring):
    work = [("bad", fails), ("first", lambda: [record("verdict")]), ("second", lambda: [record("verdict")])]
    measuring._keep("cases", work, 1)
    assert names(measuring) == ["verdict"]
    assert list(absences(measuring)) == ["bad", "second"]


def test_the_eager_start_of_a_model_is_kept_once(measuring):
    eager = record("first steps", target="gpt", kind="training", mode="eager")
    measuring._keep("sweep", [("one", lambda: [eager]), ("two", lambda: [eager, record("b")])], 1)
    assert names(measuring) == ["first steps", "b"]


def test_what_found_no_memory_beside_others_is_done_once_more_alone(measuring):
    tried = []

    def crowded():
        tried.append(1)
        if len(tried) == 1:
            raise WorkerFailure(
                "a (compiled, default) ended with status 1: torch.OutOfMemoryError: CUDA out of memory."
            )
        return [record("a")]

    def hopeless():
        raise UserError("b: the eager training step raised OutOfMemoryError: CUDA out of memory")

    measuring._keep("sweep", [("crowded", crowded), ("hopeless", hopeless)], 2, waves=True)
    assert names(measuring) == ["a"]
    assert list(absences(measuring)) == ["hopeless"]


def test_after_the_deadline_nothing_is_begun_and_what_runs_is_ended(measuring):
    measuring.harness.deadline = time.monotonic() - 1
    with pytest.raises(WorkerFailure, match=r"mlp \(eager, default\) was not begun: the time for all"):
        measuring.harness.eager(Case("mlp"))
    measuring.harness.deadline = time.monotonic() + 0.2
    with pytest.raises(WorkerFailure, match=r"mlp \(eager, default\) was ended: the time for all"):
        measuring.harness.eager(Case("mlp"))


def test_every_part_of_the_job_has_its_deadline():
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            found = configure(device, quick)
            parts = {key for key in ("cases", "more cases", "shapes") if found[key]}
            parts |= {key for key in ("sweep", "agreement") if found[key]["targets"]}
            assert parts <= set(found["until_seconds"])
            assert all(seconds < found["end_seconds"] for seconds in found["until_seconds"].values())


def test_an_interruption_ends_what_runs(measuring):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring._keep("sweep", [("one", interrupted)], 1)
    assert measuring.harness._stopped

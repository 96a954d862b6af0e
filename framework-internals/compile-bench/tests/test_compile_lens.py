"""The main job: what fails or comes too late leaves the rest standing, and an interruption ends what runs."""

from pathlib import Path

import pytest

from benchkit import Quantity, UserError
from benchkit.environment import capture
from benchkit.results import Record, Recorder
from benchkit.run import Run
from compile_bench import Harness
from compile_bench.lens import _Measuring

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
        "work 0, work 1, work 2 and 2 others": "-1 s after the start, shapes were not to be begun any more"
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


def test_an_interruption_ends_what_runs(measuring):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measuring._keep("sweep", [("one", interrupted)], 1)
    assert measuring.harness._stopped

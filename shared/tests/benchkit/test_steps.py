"""A run is a list of steps: none that fails ends it, and what is missing has its reason."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest
import torch
import typer

from benchkit import Record, UserError
from benchkit.environment import capture
from benchkit.errors import why_missing
from benchkit.processes import ChildCrashed, budget
from benchkit.results import Recorder, load
from benchkit.run import Run, Step, _keeping


@pytest.fixture
def run(tmp_path):
    recorder = Recorder(tmp_path, lens="a-lens", environment=capture("cpu", root=tmp_path), configuration={})
    return Run("cpu", {}, recorder)


def _names(run: Run) -> list[str]:
    """The names of the records as they are on disk."""
    return [record.name for record in load(run.recorder.path).records]


def _absences(run: Run) -> dict[str, str]:
    return {absence.what: absence.why for absence in load(run.recorder.path).absences}


def _raise(error: BaseException) -> None:
    raise error


def _two_then_fail():
    yield Record("first")
    yield Record("second")
    raise RuntimeError("the third kernel failed\nwith a long explanation")


def test_each_kind_of_failure_is_an_absence_and_the_next_step_follows(run, capsys):
    run.steps(
        [
            Step("a missing tool", lambda: _raise(UserError("there is no compiler; install g++."))),
            Step("a failed kernel", _two_then_fail),
            Step("a compiler", lambda: _raise(RuntimeError("\x1b[01mkernel.cpp:1:\x1b[K error"))),
            Step("a dead process", lambda: _raise(ChildCrashed("the job ended with status -9", "its log"))),
            Step("the largest size", lambda: torch.empty(1 << 60)),
            Step("the last step", lambda: [Record("last")]),
            Step("a step that adds its records itself", lambda: run.record("own")),
        ]
    )
    assert _names(run) == ["first", "second", "last", "own"]
    absences = _absences(run)
    assert list(absences) == ["A missing tool", "A failed kernel", "A compiler", "A dead process", "The largest size"]
    assert absences["A missing tool"] == "there is no compiler; install g++"
    assert absences["A failed kernel"] == "it ended with RuntimeError: the third kernel failed"
    assert absences["A compiler"] == r"it ended with RuntimeError: \x1b[01mkernel.cpp:1:\x1b[K error"
    assert absences["A dead process"] == "it ended with ChildCrashed: the job ended with status -9"
    assert absences["The largest size"].startswith("there was not enough memory for ")
    printed = capsys.readouterr().err
    assert "with a long explanation" in printed  # the log has what the report's line leaves out
    assert "there is no compiler" not in printed


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB."
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_too_little_memory_is_told_from_other_errors(error):
    assert why_missing(error).startswith("there was not enough memory")


def test_the_bytes_that_were_asked_for_are_named():
    assert why_missing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 …")).endswith(
        "20.00 GiB more"
    )
    with pytest.raises(MemoryError) as raised:
        np.empty(1 << 59)
    assert why_missing(raised.value).endswith("4.00 EiB more")
    assert "memory" not in why_missing(RuntimeError("an illegal instruction was met"))


def test_steps_without_time_are_left_out_by_name_and_shorter_ones_still_follow(run):
    with budget.within(100.0):
        run.steps(
            [
                Step("a long step", lambda: [Record("long")], needs=200.0),
                Step("a short step", lambda: [Record("short")], needs=1.0),
                Step("a step that ran out", functools.partial(_raise, budget.OutOfTime("no time was left"))),
            ]
        )
        run.steps([Step("a later one", lambda: None, needs=200.0)])
    assert _names(run) == ["short"]
    assert _absences(run) == {
        "A long step; a step that ran out; a later one": "no time was left; a run with a larger --budget measures them"
    }


def test_an_interrupt_ends_the_run_and_keeps_what_was_added(run):
    def measure():
        yield Record("kept")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.steps([Step("interrupted", measure), Step("not begun", lambda: [Record("never")])])
    assert _names(run) == ["kept"]


def test_an_interrupt_before_the_first_measurement_is_told(run, monkeypatch, capsys):
    monkeypatch.setattr(gc, "collect", functools.partial(_raise, KeyboardInterrupt()))
    with pytest.raises(typer.Exit) as ended, _keeping(run.recorder):
        pass
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == f"a-lens: interrupted; 0 records are kept in {run.recorder.path}\n"


def test_a_gpu_that_an_earlier_kernel_broke_gives_each_later_step_its_reason(run, monkeypatch):
    answers = iter([None, RuntimeError("CUDA error: an illegal memory access was encountered")])

    def synchronize():
        if (error := next(answers, RuntimeError("CUDA error: an illegal memory access was encountered"))) is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    gpu = Run("cuda", {}, run.recorder)
    gpu.steps([Step("the bad kernel", lambda: [Record("launched")]), Step("the next", lambda: [Record("never")])])
    assert _names(gpu) == ["launched"]
    assert list(_absences(gpu)) == ["The bad kernel", "The next"]
    assert all("illegal memory access" in reason for reason in _absences(gpu).values())


def test_a_step_takes_half_of_the_time_and_leaves_the_rest_to_those_after_it(run):
    left = []
    with budget.within(100.0):
        run.steps(Step(name, lambda: left.append(budget.left())) for name in ("first", "second", "last"))
    assert [round(seconds, -1) for seconds in left] == [50, 50, 100]

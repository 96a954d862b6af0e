"""What memory is free, what fits into it, and what a step says that does not."""

from __future__ import annotations

import math

import pytest
import torch

from benchkit import Record, UserError
from benchkit.environment import capture
from benchkit.processes import memory
from benchkit.results import Recorder
from benchkit.run import Run, Step

GIB = 1 << 30


def test_what_is_left_to_others_is_not_free(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10 * GIB)
    monkeypatch.setenv(memory.LEFT_TO_OTHERS, str(4 * GIB))
    assert memory.free("cpu") == 6 * GIB
    monkeypatch.setenv(memory.LEFT_TO_OTHERS, str(40 * GIB))
    assert memory.free("cpu") == 0
    monkeypatch.setenv(memory.LEFT_TO_OTHERS, "a lot")
    with pytest.raises(UserError, match="expected a number of bytes, got 'a lot'"):
        memory.free("cpu")


@pytest.mark.parametrize(
    ("driver", "fraction", "reserved", "allocated", "free"),
    [
        (60, 1.0, 0, 0, 60),  # another process has 20 of 80
        (60, 0.25, 0, 0, 20),  # this process may take no more
        (60, 0.25, 15, 5, 15),  # of which it holds 15 and uses 5
        (10, 1.0, 4, 1, 13),  # what torch holds unused can be taken as well
    ],
)
def test_a_gpu_is_free_as_far_as_the_driver_and_this_process_allow(
    monkeypatch, driver, fraction, reserved, allocated, free
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (driver, 80))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated)
    assert memory.free("cuda") == free


def test_a_size_is_halved_until_it_fits_and_the_least_is_kept_where_none_does():
    assert list(memory.halved(12)) == [12, 6, 3, 1]
    assert list(memory.halved(1024, 300)) == [1024, 512, 300]
    assert memory.largest_that_fits(memory.halved(32), lambda size: 3.0 * size, 50) == 16
    assert memory.largest_that_fits(memory.halved(32), lambda size: 3.0 * size, math.inf) == 32
    assert memory.largest_that_fits(memory.halved(32), lambda size: 3.0 * size, 0) == 1


def test_a_step_that_does_not_fit_is_not_begun_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * GIB)
    recorder = Recorder(tmp_path, lens="a-lens", environment=capture("cpu", root=tmp_path), configuration={})
    Run("cpu", {}, recorder).steps(
        [
            Step("scores in memory", lambda: [Record("never")], memory=34 * GIB),
            Step("no scores", lambda: [Record("measured")], memory=2 * GIB),
        ]
    )
    assert [record.name for record in recorder.results.records] == ["measured"]
    (absence,) = recorder.results.absences
    assert (absence.what, absence.why) == ("Scores in memory", "it needs 34 GiB, 16 GiB are free")


@pytest.mark.gpu
@pytest.mark.parametrize("gib", [8, 16, 24, 40])
def test_on_a_gpu_a_fraction_is_the_limit_of_what_is_free_and_what_is_over_it_is_a_row(gib, tmp_path):
    total = torch.cuda.mem_get_info()[1]
    if total < gib * GIB:
        pytest.skip(f"this GPU has {memory.gib(total)}")
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total)
    try:
        assert memory.free("cuda") <= gib * GIB
        recorder = Recorder(tmp_path, lens="a-lens", environment=capture("cuda", root=tmp_path), configuration={})
        run = Run("cuda", {}, recorder)
        run.steps(
            [
                Step("stated", lambda: [Record("never")], memory=(gib + 1) * GIB),
                Step("not stated", lambda: torch.empty((gib + 1) * GIB, dtype=torch.uint8, device="cuda") and None),
                Step("the next", lambda: [Record("measured", data=torch.ones(8, device="cuda").sum().item())]),
            ]
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [record.name for record in recorder.results.records] == ["measured"]
    stated, surprised = (absence.why for absence in recorder.results.absences)
    assert stated.startswith(f"it needs {gib + 1} GiB")
    assert surprised.startswith("there was not enough memory")

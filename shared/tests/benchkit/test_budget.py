"""Tests of the time budget: deadlines, time counted apart, and what a comparison makes of them."""

import math
import os
import subprocess
import sys
import time

import pytest

from benchkit import compare
from benchkit.processes import budget


def test_without_a_budget_there_is_no_deadline():
    assert budget.left() == math.inf
    with budget.within(math.inf), budget.apart():
        assert budget.left() == math.inf
    budget.require("anything")


def test_the_earlier_of_two_deadlines_holds_and_the_outer_one_comes_back():
    with budget.within(100.0):
        with budget.within(1000.0):
            assert 0 < budget.left() <= 100
        with budget.within(1.0):
            assert budget.left() <= 1
        assert 99 < budget.left() <= 100
    assert budget.left() == math.inf


def test_time_counted_apart_moves_every_deadline(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv("BENCHKIT_SECONDS_APART", "5.0")
    with budget.within(10.0):
        with budget.within(4.0), budget.apart():
            now[0] += 7
        assert budget.left() == 10
        assert budget.seconds_apart() == 12
        now[0] += 11
        with pytest.raises(budget.OutOfTime, match="no time was left for the loss; give the run more with --budget"):
            budget.require("the loss")


def test_child_processes_keep_to_the_deadline():
    program = "from benchkit.processes import budget; print(budget.left())"
    with budget.within(1000.0):
        output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < float(output) < 1000
    assert "BENCHKIT_DEADLINE" not in os.environ


def test_a_comparison_of_slow_functions_takes_fewer_rounds_but_at_least_three():
    with budget.within(0.2):
        timings = compare({name: lambda: time.sleep(0.01) for name in "ab"}, rounds=50)
    assert 3 <= len(timings["a"].samples) < 50
    with budget.within(0.08):
        timings = compare({name: lambda: time.sleep(0.01) for name in "ab"}, rounds=50, warmup_calls=0)
    assert len(timings["a"].samples) == 3
    assert timings.speedup("a", over="b").interval == "range"


def test_no_comparison_begins_when_the_time_is_over():
    calls = []
    with budget.within(0.0), pytest.raises(budget.OutOfTime, match="no time was left for a"):
        compare({"a": lambda: calls.append(1)})
    assert not calls


def test_what_is_prepared_when_the_time_is_over_is_timed_and_the_others_are_named(monkeypatch):
    now, failed = [0.0], {}

    def prepare():
        now[0] += 6

    monkeypatch.setattr(budget, "_now", lambda: now[0])
    with budget.within(10.0):
        timings = compare(dict.fromkeys("abc", prepare), warmup_calls=0, failed=failed).timings
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": 3}
    assert {name: str(error).partition(";")[0] for name, error in failed.items()} == {
        "b": "no time was left for b", "c": "no time was left for c",
    }  # fmt: skip
    with budget.within(10.0), pytest.raises(budget.OutOfTime, match="no time was left for b"):
        compare(dict.fromkeys("abc", prepare), warmup_calls=0)  # nobody asks for those that are missing


def test_what_is_prepared_has_time_to_be_measured():
    with budget.within(1.0):
        with budget.at_least(50.0):
            assert 49 < budget.left() <= 50
            with budget.at_least(5.0):
                assert budget.left() > 5
        assert budget.left() <= 1
    with budget.at_least(50.0):
        assert budget.left() == math.inf

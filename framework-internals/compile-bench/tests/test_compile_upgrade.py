"""``compile-bench upgrade``: the same targets under two Python executables."""

import re
import sys
from dataclasses import replace

import pytest

from benchkit import Quantity, UserError
from benchkit.processes import ChildFailure
from compile_bench.check import upgrade
from compile_bench.check.side import Side
from compile_bench.check.upgrade import Upgrade, measure_upgrade
from compile_bench.cli.checking import describe_upgrade
from compile_bench.targets.case import Case

SIDE = Side("2.13.0", "3.11.7", graphs=1, breaks=0, break_lines=(), recompiles=0, recompile_lines=(), error=1e-7,
            error_bound=2e-7, compiled_bytes=1000, eager_bytes=1000, compile_seconds=5.0)  # fmt: skip
TIME = Quantity(1e-3, "s", 0.9e-3, 1.1e-3)


def ratio(value, low, high):
    return Quantity(value, "×", low, high)


def upgraded(after, speedup=(1.0, 0.99, 1.01), control=(1.0, 0.98, 1.02)):
    return Upgrade(Case("t.py:model"), SIDE, after, TIME, TIME, ratio(*speedup), ratio(*control))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"breaks": 1, "break_lines": ("t.py:5: a break",)}, "graph breaks in 1 line, 0 before"),
        ({"recompiles": 2, "recompile_lines": ("t.py:6: a guard",)}, "2 recompilations, 0 before"),
        ({"accurate": False}, "the compiled results are further from float64 than the bound allows"),
        ({"compiled_bytes": 1100}, "peak memory is 1.10×"),
        ({"failures": ("InductorError: no",)}, "raises when it is compiled: InductorError: no"),
    ],
)
def test_what_is_worse_is_said_and_what_is_better_is_not(changes, line):
    worse = upgraded(replace(SIDE, **changes))
    assert worse.worse[0] == line
    assert f"worse: {line}" in describe_upgrade(worse)
    better = Upgrade(worse.case, worse.after, worse.before, TIME, TIME, worse.speedup, worse.control)
    assert better.worse == []
    assert describe_upgrade(better).endswith("nothing is worse")


def test_of_two_wrong_results_the_second_is_worse_if_its_error_is_far_larger():
    wrong = replace(SIDE, accurate=False, error=0.01)
    for error, lines in ((0.02, 0), (0.1, 1), (None, 1)):
        other = replace(wrong, error=error)
        assert len(Upgrade(Case("t.py:model"), wrong, other).worse) == lines
    assert "and than under the first" in Upgrade(Case("t.py:model"), wrong, other).worse[0]
    assert Upgrade(Case("t.py:model"), other, other).worse == []


def test_memory_where_there_was_none_is_worse():
    none = replace(SIDE, compiled_bytes=0)
    assert Upgrade(Case("t.py:model"), none, SIDE).worse == ["peak memory is inf×"]
    assert Upgrade(Case("t.py:model"), none, none).worse == []


@pytest.mark.parametrize("error", [UserError("t.py:model raises"), ChildFailure("it ended")])
def test_a_side_that_cannot_be_measured_is_named(error, monkeypatch):
    def fails(*arguments):
        raise error

    monkeypatch.setattr(upgrade, "_measured", fails)
    with pytest.raises(type(error), match=f"{re.escape(sys.executable)}: {error}"):
        measure_upgrade(sys.executable, sys.executable, Case("t.py:model"), seconds=1.0, limit=60.0)


def test_a_slower_step_is_claimed_beyond_the_control_alone():
    assert upgraded(SIDE, (0.8, 0.79, 0.81)).worse == ["a step is slower: 0.800× (0.790–0.810) as fast"]
    assert upgraded(SIDE, (0.8, 0.79, 0.81), (0.9, 0.78, 1.02)).worse == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"'.*/python' cannot be run \(No such file or directory\); name a Python that has torch"),
        ("#!/bin/sh\n", r"'.*/python' does not run Python code; name a Python that has torch"),
        ("#!/bin/sh\necho '[[3, 9], []]'\n", r"'.*/python' is Python 3.9; expected 3.11 or later"),
        (
            "#!/bin/sh\necho '[[3, 12], [\"torch\"]]'\n",
            r"'.*/python' has no torch: .*/python -m pip install torch",
        ),
    ],
)
def test_an_executable_without_torch_is_named_before_anything_is_measured(tmp_path, script, message):
    other = tmp_path / "python"
    if script is not None:
        other.write_text(script)
        other.chmod(0o755)
    for pair in ((str(other), sys.executable), (sys.executable, str(other))):
        with pytest.raises(UserError, match=message):
            measure_upgrade(*pair, Case("t.py:model"), seconds=1.0, limit=60.0)


@pytest.mark.slow
def test_a_break_of_the_second_installation_is_found(tmp_path):
    (tmp_path / "t.py").write_text(
        "import os, torch\n\n"
        "def model():\n"
        "    planted = os.environ.get('PLANTED') == '1'\n"
        "    def step(x):\n"
        "        if planted and x.sum() > 0:\n"
        "            return x.sin()\n"
        "        return x.cos()\n"
        "    return step, (torch.ones(8),)\n"
    )
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nPLANTED=1 exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    case = Case(f"{tmp_path / 't.py'}:model", train=False)
    found = measure_upgrade(sys.executable, str(other), case, seconds=1.0, limit=1800.0)
    assert (found.before.breaks, found.after.breaks) == (0, 1)
    assert (found.before.graphs, found.after.graphs) == (1, 2)
    assert found.before.accurate
    assert found.after.accurate
    assert found.worse[0] == "graph breaks in 1 line, 0 before"
    assert "t.py:6" in found.worse[1]

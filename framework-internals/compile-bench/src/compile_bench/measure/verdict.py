"""Is compiling worth it? After how many steps, with which caches, and is the difference real?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from benchkit import numbers
from benchkit.results import Quantity
from compile_bench.measure.records import Bench, FirstSteps, Steady
from compile_bench.targets.case import FIRST_STEPS

Advice = Literal["compile", "don't", "inconclusive"]
Difference = Literal["faster", "slower", "none"]

# What each process of a run finds: nothing, the caches of the first process, or cache artifacts that it loads.
CacheState = Literal["lost", "kept", "artifact"]
CACHE_STATES: dict[CacheState, str] = {
    "lost": "empty caches",
    "kept": "the caches of the first",
    "artifact": "cache artifacts",
}

# The plans are for these runs: steps of the whole run, and how often it is restarted.
PLAN_STEPS = (100, 1_000, 10_000, 100_000)
PLAN_RESTARTS = (0, 10)

# Percent of the time in which some task waited for a core. More than this means that other work is running. Eager
# threads wait for one another, so other work slows eager code more than a generated loop in one thread. On two cores
# that other builds kept busy 90 % of the time, two compiled linear layers of 64 seemed 51 times as fast.
BUSY = 25.0

# Stands beside every recommendation of a case whose results could not be compared with float64.
NOT_COMPARED = "results not compared"


@dataclass(frozen=True)
class BreakEven:
    """Number of steps after which compiling has paid for itself."""

    steps: float | None  # the number at the median speed-up; None means never
    low: float | None  # the number at the upper end of the speed-up's interval; None means never
    high: float | None  # the number at the lower end of the interval; None means never, or not known

    @property
    def text(self) -> str:
        """The number of steps, with its interval if both ends are known; ``never``."""
        if self.steps is None:
            return "never"
        text = numbers.count(self.steps)
        if self.low is not None and self.high is not None:
            text += f" ({numbers.count(self.low)}–{numbers.count(self.high)})"
        return f"{text} steps"


@dataclass(frozen=True)
class Verdict:
    """What to do, and why."""

    # ``compile`` if the compiled step is faster and its results are right, ``don't`` if it is slower or its results are
    # wrong, ``inconclusive`` if no difference was seen or other work kept the machine busy.
    advice: Advice
    why: str  # the reason, as a clause
    cold: BreakEven  # break-even with empty caches
    warm: BreakEven | None  # break-even with caches of an earlier process; None if that was not measured
    cost: float  # compile cost: seconds that the first steps take longer than eager's, with empty caches
    artifact: BreakEven | None = None  # break-even with cache artifacts; None if that was not measured
    not_compared: str = ""  # why the results could not be compared with float64; empty if they were

    @property
    def text(self) -> str:
        """The advice with the break-even or the reason: a faster step pays only in a run that is long enough."""
        if self.advice != "compile":
            return f"{self.advice}: {self.why}"
        text = "compile" if self.cold.steps == FIRST_STEPS else f"only for runs over {self.cold.text}"
        return f"{text}; {NOT_COMPARED}" if self.not_compared else text


@dataclass(frozen=True)
class Plan:
    """Whether to compile in one kind of run."""

    advice: Advice  # like :attr:`Verdict.advice`, for the time of the whole run
    ratio: float  # time of the whole run, eager over compiled
    compared: bool = True  # whether the results were compared with float64

    @property
    def text(self) -> str:
        """The advice and the ratio."""
        mark = f" ({NOT_COMPARED})" if self.advice == "compile" and not self.compared else ""
        return f"{self.advice}{mark}, {numbers.significant(self.ratio)}×"


def judge(bench: Bench) -> Verdict:
    """The verdict on one case."""
    advice, why = _advice(bench)

    def after(first: FirstSteps | None) -> BreakEven | None:
        return None if first is None else break_even(first, bench.eager, bench.steady)

    return Verdict(
        advice,
        why,
        break_even(bench.cold, bench.eager, bench.steady),
        after(bench.warm),
        cost(bench.cold, bench.eager),
        after(bench.artifact),
        bench.accuracy.skipped,
    )


def difference(speedup: Quantity, control: Quantity | None) -> Difference:
    """Whether a step is faster or slower than a reference step, or not distinguishable from it.

    ``control`` is a step's time over its own in the same rounds: what drift, caches and the order of calls do to a
    ratio. A difference counts only if the interval of ``speedup``, the reference's time over the step's, is further
    from 1, and only one of enough rounds.
    """
    if not speedup.decides:
        return "none"
    low, high = _ends(speedup)
    off = _control_width(control)
    if low > off:
        return "faster"
    return "slower" if high < 1 / off else "none"


def _control_width(control: Quantity | None) -> float:
    """The largest ratio that the control's interval allows in either direction; 1 without a control."""
    if control is None:
        return 1.0
    # Its two samples are interchangeable, so a control on one side of 1 could as well have been on the other.
    lowest, highest = _ends(control)
    return max(highest, 1 / lowest, 1.0)


def _advice(bench: Bench) -> tuple[Advice, str]:
    if not bench.accuracy.holds:
        return "don't", bench.accuracy.wrong or "the compiled results are further from float64 than the bound allows"
    if disturbed := busy(bench):
        return "inconclusive", disturbed
    seen = difference(bench.steady.speedup, bench.steady.control)
    if seen == "slower":
        return "don't", "the whole interval of the speed-up is below 1 and below what eager shows against itself"
    if seen == "faster":
        return "compile", "the whole interval of the speed-up is above 1 and above what eager shows against itself"
    if not bench.steady.speedup.decides:
        return "inconclusive", f"{bench.steady.speedup.samples} rounds are too few for a verdict"
    low, high = _ends(bench.steady.speedup)
    if low <= 1 <= high:
        return "inconclusive", "the interval of the speed-up contains 1"
    off = _control_width(bench.steady.control)
    span = f"{numbers.significant(1 / off)}–{numbers.significant(off)}×"
    return "inconclusive", f"the interval reaches into {span}, which eager shows against itself"


def busy(bench: Bench) -> str:
    """That other work kept a CPU busy, as a clause; empty if it did not, if that is not known, or on a GPU."""
    pressure = bench.steady.pressure
    if bench.case.device != "cpu" or pressure is None or pressure <= BUSY:
        return ""
    return f"the machine was busy: some task waited for a core in {pressure:.0f} % of the time"


def cost(compiled: FirstSteps, eager: FirstSteps) -> float:
    """Seconds that the first steps take longer with compiling than without."""
    return compiled.total - eager.total


def break_even(compiled: FirstSteps, eager: FirstSteps, steady: Steady) -> BreakEven:
    """Solve N for: first steps + (N − 3) · compiled = eager first steps + (N − 3) · eager.

    The gain of a step is eager · (1 − 1 / speed-up), at the median and at both ends of the speed-up's interval.
    """
    low, high = _ends(steady.speedup)
    extra = cost(compiled, eager)

    def steps(speedup: float) -> float | None:
        gain = steady.eager.value * (1 - 1 / speedup)
        # With cheaper first steps and slower later ones the equation's N is where compiling stops being worth it.
        return FIRST_STEPS + max(extra, 0.0) / gain if gain > 0 else None

    return BreakEven(steps(steady.speedup.value), steps(high), steps(low))


def plan(bench: Bench, steps: int, restarts: int, cache: CacheState) -> Plan | None:
    """Compile or not, for a run of a number of steps in a number of processes.

    ``steps`` are those of the whole run, ``restarts`` the processes after the first one; with ``kept`` caches the first
    one finds nothing. None if the first steps with that cache were not measured, or if ``cache`` is ``kept`` and there
    are no restarts.
    """
    processes = restarts + 1
    if cache == "kept" and restarts == 0:
        return None
    if restarts < 0 or steps < FIRST_STEPS * processes:
        raise ValueError(f"{processes} processes take at least {FIRST_STEPS * processes} steps, got {steps}")
    firsts = _starts(bench, restarts, cache)
    if firsts is None:
        return None
    later = (steps - FIRST_STEPS * processes) * bench.steady.eager.value
    eager = processes * bench.eager.total + later

    def ratio(speedup: float) -> float:
        return eager / (firsts + later / speedup)

    low, high = (ratio(speedup) for speedup in _ends(bench.steady.speedup))
    if not bench.steady.speedup.decides:
        low, high = 0.0, ratio(math.inf)
    advice, _ = _advice(bench)
    if advice == "compile" and not low > 1:
        advice = "don't" if high < 1 else "inconclusive"
    elif advice == "inconclusive" and high < 1:
        advice = "don't"
    return Plan(advice, ratio(bench.steady.speedup.value), compared=not bench.accuracy.skipped)


def plan_rows(bench: Bench) -> list[tuple[int, CacheState, list[Plan]]]:
    """Restarts, state of the caches and a plan for each of :data:`PLAN_STEPS`, for every combination measured."""
    rows: list[tuple[int, CacheState, list[Plan]]] = []
    for restarts in PLAN_RESTARTS:
        for cache in CACHE_STATES:
            plans = [made for steps in PLAN_STEPS if (made := plan(bench, steps, restarts, cache)) is not None]
            if plans:
                rows.append((restarts, cache, plans))
    return rows


def _starts(bench: Bench, restarts: int, cache: CacheState) -> float | None:
    """Seconds of the first steps of all processes of a run; None if they were not measured with that cache."""
    if cache == "lost":
        return (restarts + 1) * bench.cold.total
    if cache == "kept":
        return None if bench.warm is None else bench.cold.total + restarts * bench.warm.total
    return None if bench.artifact is None else (restarts + 1) * bench.artifact.total


def _ends(ratio: Quantity) -> tuple[float, float]:
    assert ratio.low is not None
    assert ratio.high is not None
    return ratio.low, ratio.high

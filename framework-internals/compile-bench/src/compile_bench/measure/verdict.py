"""Is compiling worth it: after how many steps, with which caches, and is the difference real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchkit.results import Quantity
from compile_bench.measure.measurements import Bench, FirstSteps, Steady
from compile_bench.targets.case import FIRST_STEPS

Advice = Literal["compile", "don't", "inconclusive"]
Difference = Literal["faster", "slower", "none"]

# What the processes of a run find: nothing each time; what the first one left; the artifacts that are loaded.
CacheState = Literal["lost", "kept", "artifact"]
CACHE_STATES: dict[CacheState, str] = {
    "lost": "empty caches",
    "kept": "the caches of the first",
    "artifact": "cache artifacts",
}

# What a verdict is drawn up for: steps of a whole run, and how often it is started again.
PLAN_STEPS = (100, 1_000, 10_000, 100_000)
PLAN_RESTARTS = (0, 10)

# Percent of the time in which some task waited for a core. Far above 0 other work is running, and it hits eager code of
# several threads, which wait for one another, harder than a generated loop of one: on two cores that other builds kept
# busy 90 % of the time, two linear layers of 64 came out 51 times faster.
BUSY = 25.0


@dataclass(frozen=True)
class BreakEven:
    """Steps after which compiling has paid for itself.

    Attributes:
        steps: at the median speed-up; None: never.
        low: at the upper end of the speed-up's interval; None: not even there.
        high: at the lower end; None: never, or not known.
    """

    steps: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """What to do, and why.

    Attributes:
        advice: ``compile`` when the compiled step is faster and the numbers are right, ``don't`` when it is slower or
            the numbers are wrong, ``inconclusive`` when no difference was seen or the machine was busy with other work.
        why: the ground for it, a clause.
        cold: break-even with empty caches.
        warm: with caches from an earlier process; None if that was not measured.
        cost: seconds that compiling costs before the first useful step, caches empty.
        mega: break-even with cache artifacts; None if that was not measured.
    """

    advice: Advice
    why: str
    cold: BreakEven
    warm: BreakEven | None
    cost: float
    mega: BreakEven | None = None


@dataclass(frozen=True)
class Plan:
    """Compile or not, for one way of running.

    Attributes:
        steps: of the whole run, over all its processes.
        restarts: processes after the first one (preemption, a new job for every evaluation).
        cache: what each process finds.
        advice: as :class:`Verdict`, for the time of the whole run.
        ratio: that time, eager over compiled.
        low: at the lower end of the speed-up's interval.
        high: at the upper end.
    """

    steps: int
    restarts: int
    cache: CacheState
    advice: Advice
    ratio: float
    low: float
    high: float


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
        after(bench.mega),
    )


def difference(speedup: Quantity, control: Quantity | None) -> Difference:
    """Whether one of two steps is faster, slower, or not to be told from the other.

    Args:
        speedup: the other one over it, with its interval, which has to lie beyond 1 by more than the control's.
        control: eager over itself in the same rounds: what drift, caches and the order of calls do to a ratio here.
    """
    low, high = _ends(speedup)
    least, most = 1.0, 1.0
    if control is not None:
        # A control on either side of 1 could as well have come out on the other: the names are interchangeable.
        lowest, highest = _ends(control)
        off = max(highest, 1 / lowest, 1.0)
        least, most = 1 / off, off
    if low > most:
        return "faster"
    return "slower" if high < least else "none"


def _advice(bench: Bench) -> tuple[Advice, str]:
    pressure = bench.steady.pressure
    if not bench.accuracy.holds:
        return "don't", bench.accuracy.wrong or "the compiled results are further from float64 than the bound allows"
    if bench.case.device == "cpu" and pressure is not None and pressure > BUSY:
        return "inconclusive", f"the machine was busy: some task waited for a core in {pressure:.0f} % of the time"
    seen = difference(bench.steady.speedup, bench.steady.control)
    if seen == "slower":
        return "don't", "the whole interval of the speed-up is below 1 and below what eager shows against itself"
    if seen == "faster":
        return "compile", "the whole interval of the speed-up is above 1 and above what eager shows against itself"
    return "inconclusive", "the interval of the speed-up is within what eager shows against itself"


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
        # Cheaper first steps and slower later ones: that equation's N is where compiling stops being worth it.
        return FIRST_STEPS + max(extra, 0.0) / gain if gain > 0 else None

    return BreakEven(steps(steady.speedup.value), steps(high), steps(low))


def plan(bench: Bench, steps: int, restarts: int, cache: CacheState) -> Plan | None:
    """Compile or not, for a run of so many steps in so many processes.

    Args:
        bench: the measured case.
        steps: of the whole run; at least three for every process.
        restarts: processes after the first one.
        cache: what the processes find; the first one of ``kept`` finds nothing.

    Returns:
        None where the first steps with that cache were not measured, or no restart could find what was kept.

    Raises:
        ValueError: for fewer steps than the processes' first ones.
    """
    processes = restarts + 1
    if cache == "kept" and restarts == 0:
        return None  # one process finds nothing that an earlier one left
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
    advice, _ = _advice(bench)
    if advice == "compile" and not low > 1:
        advice = "don't" if high < 1 else "inconclusive"
    elif advice == "inconclusive" and high < 1:
        advice = "don't"
    return Plan(steps, restarts, cache, advice, ratio(bench.steady.speedup.value), low, high)


def _starts(bench: Bench, restarts: int, cache: CacheState) -> float | None:
    """Seconds of the first steps of all processes of a run."""
    if cache == "lost":
        return (restarts + 1) * bench.cold.total
    if cache == "kept":
        return None if bench.warm is None else bench.cold.total + restarts * bench.warm.total
    return None if bench.mega is None else (restarts + 1) * bench.mega.total


def _ends(ratio: Quantity) -> tuple[float, float]:
    assert ratio.low is not None
    assert ratio.high is not None
    return ratio.low, ratio.high

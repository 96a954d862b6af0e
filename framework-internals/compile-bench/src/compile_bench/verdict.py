"""Is compiling worth it: after how many steps, and is the difference real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compile_bench.results import FIRST_STEPS, Bench, FirstSteps, Steady

Advice = Literal["compile", "don't", "inconclusive"]

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
        advice: ``compile`` when the whole interval of the speed-up is above 1 and the numbers are right, ``don't`` when
            it is below 1 or the numbers are wrong, ``inconclusive`` when it covers 1 or the machine was busy with other
            work.
        why: the ground for it, a clause.
        cold: break-even with empty caches.
        warm: with caches from an earlier process; None if that was not measured.
        price: seconds that compiling costs before the first useful step, caches empty.
    """

    advice: Advice
    why: str
    cold: BreakEven
    warm: BreakEven | None
    price: float


def judge(bench: Bench) -> Verdict:
    """The verdict on one case."""
    advice, why = _advice(bench)
    return Verdict(
        advice,
        why,
        break_even(bench.cold, bench.eager, bench.steady),
        None if bench.warm is None else break_even(bench.warm, bench.eager, bench.steady),
        price(bench.cold, bench.eager),
    )


def _advice(bench: Bench) -> tuple[Advice, str]:
    low, high = _interval(bench.steady)
    pressure = bench.steady.pressure
    if not bench.accuracy.holds:
        return "don't", "the compiled results are further from float64 than the bound allows"
    if bench.case.device == "cpu" and pressure is not None and pressure > BUSY:
        return "inconclusive", f"the machine was busy: some task waited for a core in {pressure:.0f} % of the time"
    if high < 1:
        return "don't", "the whole interval of the speed-up is below 1"
    if low > 1:
        return "compile", "the whole interval of the speed-up is above 1"
    return "inconclusive", "the interval of the speed-up covers 1"


def price(compiled: FirstSteps, eager: FirstSteps) -> float:
    """Seconds that the first steps take longer with compiling than without."""
    return compiled.total - eager.total


def break_even(compiled: FirstSteps, eager: FirstSteps, steady: Steady) -> BreakEven:
    """Solve N for: first steps + (N − 3) · compiled = eager first steps + (N − 3) · eager.

    The gain of a step is eager · (1 − 1 / speed-up), at the median and at both ends of the speed-up's interval.
    """
    low, high = _interval(steady)
    extra = price(compiled, eager)

    def steps(speedup: float) -> float | None:
        gain = steady.eager.value * (1 - 1 / speedup)
        if extra <= 0:
            return float(FIRST_STEPS)
        return FIRST_STEPS + extra / gain if gain > 0 else None

    return BreakEven(steps(steady.speedup.value), steps(high), steps(low))


def _interval(steady: Steady) -> tuple[float, float]:
    assert steady.speedup.low is not None
    assert steady.speedup.high is not None
    return steady.speedup.low, steady.speedup.high

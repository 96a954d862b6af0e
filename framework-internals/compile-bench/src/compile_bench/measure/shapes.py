"""Shapes that change from call to call: what recompiling costs, and which strategy is the cheapest.

Every strategy makes several passes through the same schedule of calls, in a fresh process. Strategies are compared by
the time of all passes together, compiling included: ``first pass + (passes − 1) · a later pass``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchkit import numbers
from benchkit.results import Quantity
from compile_bench.capture.trace import Recompile

Strategy = Literal["eager", "automatic", "static", "dynamic", "mark_dynamic", "buckets", "padding"]

# Sorted by the work that they cause the user, the simplest first.
STRATEGIES: Mapping[Strategy, str] = {
    "eager": "no compiling",
    "automatic": "torch.compile as it is: a size that changes once is symbolic from then on",
    "mark_dynamic": "torch._dynamo.mark_dynamic on the dimensions that change, before the first call",
    "dynamic": "torch.compile(dynamic=True): every size symbolic",
    "static": "torch.compile(dynamic=False): code for every shape",
    "buckets": "pad to the next power of two, code for every bucket; only where the model masks what is added",
    "padding": "pad everything to the largest shape, one code; only where the model masks what is added",
}
PADDED: tuple[Strategy, ...] = ("buckets", "padding")

# Schedules that are cut from the arguments of a target that has none.
MADE_SCHEDULES = ("last-batch", "batch-1", "growing-sequence")


@dataclass(frozen=True)
class Passes:
    """One strategy's passes through a schedule."""

    strategy: Strategy  # name of the strategy
    # Seconds of the first pass in a fresh process, including the compiler's import and the toolchain check.
    first: float = 0.0
    later: Quantity | None = None  # seconds of a later pass
    compilations: int = 0  # number of compiled graphs
    recompiles: tuple[Recompile, ...] = ()  # what was compiled again, and why
    failed: str = ""  # why the strategy cannot be used, in one line; empty if it can

    def total(self, passes: int) -> tuple[float, float, float]:
        """Seconds of a number of passes: at the median of a later pass, at its p20 and at its p80."""
        later = self.later
        assert later is not None
        assert later.low is not None
        assert later.high is not None
        middle, low, high = (self.first + (passes - 1) * seconds for seconds in (later.value, later.low, later.high))
        return middle, low, high


def ranking(passes: Sequence[Passes], count: int) -> list[Passes]:
    """The strategies that can be used, sorted by the seconds of a number of passes."""
    return sorted((made for made in passes if not made.failed), key=lambda made: made.total(count)[0])


def tied(passes: Sequence[Passes], count: int) -> list[Passes]:
    """The cheapest strategy and those whose p20–p80 overlap with its, the simplest first; empty if none can be used."""
    ranked = ranking(passes, count)
    highest = ranked[0].total(count)[2] if ranked else 0.0
    order = list(STRATEGIES)
    overlapping = (made for made in ranked if made.total(count)[1] <= highest)
    return sorted(overlapping, key=lambda made: order.index(made.strategy))


def cheapest(passes: Sequence[Passes], count: int) -> str:
    """The cheapest strategy for a number of passes and those tied with it, in words; empty if none can be used."""
    ranked, level = ranking(passes, count), tied(passes, count)
    if not ranked:
        return ""
    name = ranked[0].strategy
    text = f"{name} ({STRATEGIES[name]}), {numbers.with_unit(ranked[0].total(count)[0], 's')}"
    if len(level) > 1:
        others = [passes.strategy for passes in level if passes is not ranked[0]]
        text += f"; {' and '.join(others)} {'takes' if len(others) == 1 else 'take'} as long within p20–p80"
        if level[0] is not ranked[0]:
            text += f", and {level[0].strategy} is {'simpler' if len(level) == 2 else 'the simplest'}"
    return text

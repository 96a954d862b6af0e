"""Shapes that change from call to call: what recompiling costs, and which way of living with it is the cheapest.

Every strategy goes through the same schedule of calls, several times, in a process of its own. What counts is the time
of all passes together, compiling included: ``first pass + (passes − 1) · a later pass``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchkit.results import Quantity
from compile_bench.capture.trace import Recompile
from compile_bench.targets.case import Case

Strategy = Literal["eager", "automatic", "static", "dynamic", "mark_dynamic", "buckets", "padding"]

# In the order of what they ask of the user: the first of those that cost the same is recommended.
STRATEGIES: Mapping[Strategy, str] = {
    "automatic": "torch.compile as it is: a size that changes once is symbolic from then on",
    "eager": "no compiling",
    "mark_dynamic": "torch._dynamo.mark_dynamic on the dimensions that change, before the first call",
    "dynamic": "torch.compile(dynamic=True): every size symbolic",
    "static": "torch.compile(dynamic=False): code for every shape",
    "buckets": "pad to the next power of two, code for every bucket",
    "padding": "pad everything to the largest shape, one code",
}
PADDED: tuple[Strategy, ...] = ("buckets", "padding")

# Made from a target's own arguments where it brings no schedule.
MADE_SCHEDULES = ("last-batch", "batch-1", "growing-sequence")


@dataclass(frozen=True)
class Passes:
    """One strategy's passes through a schedule.

    Attributes:
        strategy: which.
        first: seconds of the first pass in a fresh process, compiler's import and toolchain check included.
        later: seconds of a later pass.
        compilations: graphs that were compiled.
        recompiles: what was compiled again, and why.
        failed: why it cannot be used, in one line; empty if it can.
    """

    strategy: Strategy
    first: float = 0.0
    later: Quantity | None = None
    compilations: int = 0
    recompiles: tuple[Recompile, ...] = ()
    failed: str = ""

    def total(self, passes: int) -> tuple[float, float, float]:
        """Seconds of so many passes: at the median of a later pass, at its p20 and at its p80."""
        later = self.later
        assert later is not None
        assert later.low is not None
        assert later.high is not None
        middle, low, high = (self.first + (passes - 1) * each for each in (later.value, later.low, later.high))
        return middle, low, high


@dataclass(frozen=True)
class ShapeStudy:
    """All strategies on one schedule.

    Attributes:
        case: what was called.
        schedule: the shapes of its calls, for a reader.
        varying: the dimensions that change, ``"args[0] dimension 1"``.
        passes: by strategy, in the order they were measured.
    """

    case: Case
    schedule: tuple[str, ...]
    varying: tuple[str, ...]
    passes: tuple[Passes, ...]

    def ranking(self, passes: int) -> list[Passes]:
        """The strategies that can be used, cheapest first for so many passes.

        One that is dearer only within the spread of its passes stands before one that asks more of the user.
        """
        usable = [each for each in self.passes if not each.failed]
        ranked = sorted(usable, key=lambda each: each.total(passes)[0])
        if len(ranked) < 2:
            return ranked
        highest = ranked[0].total(passes)[2]
        tied = [each for each in ranked if each.total(passes)[1] <= highest]
        order = list(STRATEGIES)
        best = min(tied, key=lambda each: order.index(each.strategy))
        return [best, *(each for each in ranked if each is not best)]


@dataclass(frozen=True)
class ShapeAnswer:
    """What one process says: its passes, and what it found the schedule to be."""

    passes: Passes
    schedule: tuple[str, ...]
    varying: tuple[str, ...]

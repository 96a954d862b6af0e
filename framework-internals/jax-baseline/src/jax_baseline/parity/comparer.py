"""Compares two streams of values that should be the same up to rounding: the comparer of ``parity`` and ``diff``.

A stream is a sequence of places, such as the steps of a training or the dtypes of a function, each with values by name.
Controls, which differ from one of the sides by rounding alone, run along. A value may deviate so many times as far as
the controls do (:func:`margin`), and at least as far as a floor. The first value beyond is where the streams diverge.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from benchkit.timing.statistics import worst

# Part of the correct implementations that a whole comparison may call wrong, see :func:`margin`.
FALSE_ALARMS = 1e-5

# A bound above this part of the quantity itself is never a pass: what it lets through is no longer rounding. A port
# with another activation moves a gradient by about as much.
LARGEST_BOUND = 0.1

# Two runs of one function on the same inputs that differ by more, relative to the result, are random: √ε of float64.
REPEATABLE = float(np.sqrt(np.finfo(np.float64).eps))

Place = TypeVar("Place")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Compared:
    """A value of both streams."""

    deviation: float  # how far apart the two are
    bound: float  # how far rounding may move them apart

    @property
    def within(self) -> bool:
        """Whether rounding explains the deviation; one that is NaN is over every bound."""
        return self.deviation <= self.bound

    @property
    def times(self) -> float:
        """The deviation in multiples of its bound; infinite for one that is not finite, or over a bound of zero."""
        if self.within:
            return self.deviation / self.bound if self.bound else 0.0
        return self.deviation / self.bound if self.bound and math.isfinite(self.deviation) else math.inf


@dataclass(frozen=True)
class Bounds:
    """The bounds that controls set."""

    draws: int  # number of deviations of controls, of which the largest sets a bound
    comparisons: int  # number of values that are compared. Together they raise :data:`FALSE_ALARMS`

    @property
    def margin(self) -> float:
        """A bound in multiples of the controls' largest deviation."""
        return margin(self.draws, FALSE_ALARMS / self.comparisons)

    def bound(self, controls: Iterable[float], floor: float) -> float:
        """The bound of a value, from the deviations of the controls in it."""
        return max(self.margin * worst(controls), floor)


def divergence(stream: Iterable[tuple[Place, Mapping[Name, Compared]]]) -> tuple[Place, dict[Name, Compared]] | None:
    """Return the first place where values are over their bounds, with these values; None if all are within."""
    for place, values in stream:
        if over := {name: value for name, value in values.items() if not value.within}:
            return place, over
    return None


def first_vague(bounds: Iterable[float]) -> int | None:
    """Return the index of the first bound, relative to its value, that is too wide for a verdict; None without any."""
    return next((index for index, bound in enumerate(bounds) if not bound <= LARGEST_BOUND), None)


def bias(square: float, other_square: float, shift: float, count: float) -> tuple[float, float]:
    """Return how far the norm and the mean of an array y are from those of x: ‖y‖/‖x‖ − 1 and Σ(y − x) / (√n ‖x‖).

    Roundings of n elements average out in both, to about 1/√n of their distance. A factor or a shift does not: a
    constant rounded to bfloat16 makes a factor of 1.001, which is lost in a bound on the distance.

    Args:
        square: ‖x‖².
        other_square: ‖y‖².
        shift: Σ(y − x).
        count: n.
    """
    norm = math.sqrt(max(square, 1e-300))
    return math.sqrt(other_square) / norm - 1, shift / (math.sqrt(count) * norm)


@cache
def margin(draws: int, rate: float) -> float:
    """Return c so that a normal number is over c times the largest of n others in a share ``rate`` of cases.

    P(|Z₀| > c · max |Zᵢ|) = ∫ 2 φ(z) erf(z / (c √2))ⁿ dz for independent Z of the same variance. An array's deviation
    is a sum of many squares and varies less than one number.

    Args:
        draws: Number n of the other numbers.
        rate: Wanted probability, between 0 and 1/2.
    """
    z = np.linspace(0, 30, 301)  # the rule of equal steps is exact to a millionth here
    density = np.sqrt(2 / np.pi) * np.exp(-(z**2) / 2) * z[1]

    def tail(times: float) -> float:
        return float(density @ (np.array([math.erf(x / (times * math.sqrt(2))) for x in z]) ** draws))

    low, high = 1.0, 2.0
    while tail(high) > rate:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) > rate else (low, middle)
    return high

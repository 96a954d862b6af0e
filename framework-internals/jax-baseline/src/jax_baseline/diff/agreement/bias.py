"""A bias of results: how far their norms and means are apart, which rounding moves less than the results themselves.

The roundings of n elements are independent, so the norm and the mean of a result stray by about 1/√n of its distance. A
factor of 1.001, which a constant rounded to bfloat16 makes, stays as it is, and is lost in a bound on the distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchkit import numbers
from benchkit.timing.statistics import worst
from jax_baseline.bounds import FALSE_ALARMS, margin
from jax_baseline.diff.programs import Rounding, Tensor

# Of float32: functions of half precision are computed in float32 and rounded once. A library's own error, such as that
# of an approximated exponential, is a few ε in one direction everywhere.
_FLOOR = 16 * float(np.finfo(np.float32).eps)

Results = Sequence[Tensor]


@dataclass(frozen=True)
class Bias:
    """The norm ratio and the mean difference of one result of two functions.

    Attributes:
        index: Index of the result.
        tensor: The result.
        norm: ‖x‖ / ‖y‖ − 1.
        mean: Σ(x − y) / (√n ‖y‖), the difference of the means in units of the root of the mean square.
        bounds: How large the two may be.
    """

    index: int
    tensor: Tensor
    norm: float
    mean: float
    bounds: tuple[float, float]

    @property
    def allowed(self) -> bool:
        """Whether rounding explains both."""
        return abs(self.norm) <= self.bounds[0] and abs(self.mean) <= self.bounds[1]

    def said(self, names: tuple[str, str]) -> str:
        """The larger of the two in words."""
        what = f"result {self.index}, {self.tensor}, has"
        if abs(self.norm) > self.bounds[0]:
            return (
                f"{what} {1 + self.norm:.6g} times the norm in {names[0]} that it has in {names[1]}: {self.norm:+.2%} "
                f"(bound {numbers.error_size(self.bounds[0])})"
            )
        return (
            f"{what} another mean in {names[0]} than in {names[1]}: {self.mean:+.2e} of the root of its mean square "
            f"(bound {numbers.error_size(self.bounds[1])})"
        )


def first_bias(one: Results, other: Results, rounding: tuple[Rounding, Rounding]) -> Bias | None:
    """Return the first result with a bias that rounding does not explain, in the dtype of the inputs.

    The bound is a few times what noise does on the side that it moves more. A constant is not rounded and so not moved.
    """
    controls = min(len(side.native) for side in rounding) - 1
    if controls < 1:
        return None
    factor = margin(controls, FALSE_ALARMS / (2 * len(one)))
    for index, pair in enumerate(zip(one, other, strict=True)):
        strays = [_stray(side.native, index) for side in rounding]
        if (found := _statistics(*pair)) is None or None in strays:
            continue
        bounds = [max(_FLOOR, factor * worst(of_sides)) for of_sides in zip(*filter(None, strays), strict=True)]
        bias = Bias(index, pair[0], *found, (bounds[0], bounds[1]))
        if not bias.allowed:
            return bias
    return None


def _stray(runs: Sequence[Results], index: int) -> tuple[float, float] | None:
    """The largest of both statistics among the runs with noise."""
    first, *noisy = runs
    found = [_statistics(run[index], first[index]) for run in noisy]
    known = [pair for pair in found if pair is not None]
    return (worst(abs(norm) for norm, _ in known), worst(abs(mean) for _, mean in known)) if known else None


def _statistics(one: Tensor, other: Tensor) -> tuple[float, float] | None:
    """Norm ratio less 1 and scaled difference of the means; None for integers, zeros, and what was not computed."""
    if not (one.sketch and other.sketch and one.moments and other.moments) or one.shape != other.shape:
        return None
    if not one.dtype.startswith(("float", "bfloat")):
        return None
    size, square = other.moments[0], other.sketch[0]
    if not size or not square or not math.isfinite(square + one.sketch[0]):
        return None
    norm = math.sqrt(square)
    return math.sqrt(one.sketch[0]) / norm - 1, (one.moments[1] - other.moments[1]) / (math.sqrt(size) * norm)

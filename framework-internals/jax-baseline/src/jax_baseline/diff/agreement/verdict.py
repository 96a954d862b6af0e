"""The verdict on two functions: how far apart their results are, and the bound that follows from measured rounding.

Each function runs on operands that are moved by a unit in the last place (:mod:`jax_baseline.parity.rounding`), in the
dtype of its inputs and in float64. In float64 rounding hides almost nothing, so a difference there is one of the
functions. In the dtype of the inputs the bound is that of the side that rounds less, so that a side which computes more
coarsely is found. Other inputs, in float64, show what the given ones do not reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from benchkit import UserError, numbers
from benchkit.timing.statistics import worst
from jax_baseline.bounds import FALSE_ALARMS, LARGEST_BOUND, margin, multiple
from jax_baseline.diff.agreement.bias import first_bias
from jax_baseline.diff.programs import Rounding, Tensor
from jax_baseline.diff.region_diff import difference_between

_FLOOR = 16  # ε of a result that rounds alike in every control; XLA adds a mean of thousands of numbers less exactly
# Far from the inputs libraries take shortcuts: softplus of torch is x above 20, 2e-9 less. So its ε is float32's there.
_ELSEWHERE = _FLOOR * float(np.finfo(np.float32).eps)

_REPEATABLE = float(np.sqrt(np.finfo(np.float64).eps))

Results = Sequence[Tensor]


@dataclass(frozen=True)
class Agreement:
    """A verdict.

    Attributes:
        same: Whether the functions compute the same.
        text: The verdict in one line, with the deviation and its bound.
        where: On what a difference shows: ``float64``, ``own dtype``, or the other inputs by what they are. Empty if
            there is none, or none that can be located.
        judged: Whether a verdict is possible. A bound in float64 that is not small beside the results is never a pass.
    """

    same: bool
    text: str
    where: str = ""
    judged: bool = True


@dataclass(frozen=True)
class _Deviation:
    """How far apart one result of two functions is, and how far it may be."""

    index: int
    tensor: Tensor
    distance: float
    bound: float

    @property
    def allowed(self) -> bool:
        return self.distance <= self.bound  # not if it is NaN

    @property
    def times(self) -> float:
        return multiple(self.distance, self.bound)

    def __str__(self) -> str:
        what = f"result {self.index}, {self.tensor}"
        if math.isnan(self.distance):
            return f"{what}, is not finite in one of them; use inputs with finite results"
        figures = (numbers.error_size(number) for number in (self.distance, self.bound))
        return "{}, differs by {} (bound {})".format(what, *figures)


def judge(
    one: Results,
    other: Results,
    rounding: tuple[Rounding, Rounding],
    names: tuple[str, str],
    precision: tuple[str, str] = ("highest", "highest"),
) -> Agreement:
    """Compare the results of two functions, of one function each in torch and in JAX.

    ``names`` says what made the results, and ``precision`` how each multiplies float32 matrices.
    """
    if len(one) != len(other) or not one:
        return Agreement(False, f"NOT COMPARABLE: {names[0]} has {len(one)} results, {names[1]} has {len(other)}")
    for index, pair in enumerate(zip(one, other, strict=True)):
        if pair[0].sketch and pair[1].sketch and pair[0].shape != pair[1].shape:
            text = f"result {index} is {pair[0]} in {names[0]} and {pair[1]} in {names[1]}"
            return _different(text, where="float64" if rounding[0].wide and rounding[1].wide else "own dtype")
    wide = _in_float64(rounding)
    in_float64 = f"in float64 {wide}" if wide else ""
    if mismatch := _dtypes(one, other, names):
        return _different(mismatch, in_float64, where="float64" if wide and not wide.allowed else "")
    if wide and not wide.allowed:
        return _different(in_float64, where="float64")
    vague = _vague(rounding)
    if wide and len(vague) == len(one):
        text = f"CAN'T BE JUDGED: {in_float64}; rounding or chance alone moves them by more than {LARGEST_BOUND:.0%}"
        return Agreement(False, text, judged=False)
    narrow = _as_given(one, other, rounding)
    in_own = f"in the dtype of the inputs {narrow}"
    missing = [
        f"not compared in float64, because {name} raised {side.missing}"
        for name, side in zip(names, rounding, strict=True)
        if side.missing
    ]
    if not narrow.allowed:
        coarse = "in float64 the functions agree, so one side rounds more" if wide else ""
        if wide and precision[0] != precision[1]:
            each = (f"{how!r} in {name}" for how, name in zip(precision, names, strict=True))
            coarse += f"; likely cause: float32 matrices are multiplied in {' and '.join(each)}"
        return _different(in_own, *missing, in_float64, coarse, where="own dtype")
    if (bias := first_bias(one, other, rounding)) is not None:
        side = (
            "in float64 the functions agree, so one side rounds a constant, or always in one direction: in half "
            "precision JAX rounds a Python number to the array's dtype, torch computes with it in float32"
            if wide
            else ""
        )
        return _different(f"{in_own}; but {bias.said(names)}", *missing, in_float64, side, where="own dtype")
    elsewhere, notes = _elsewhere(rounding, names)
    if elsewhere and not elsewhere[-1][1].allowed:
        name, deviation = elsewhere[-1]
        return _different(f"on inputs {name} {deviation}; on the given ones {in_float64}", where=name)
    if elsewhere:
        tried = ", ".join(dict.fromkeys(name for name, _ in elsewhere))
        notes.insert(0, f"on inputs {tried} at most: {max((one for _, one in elsewhere), key=lambda one: one.times)}")
    if vague:
        notes.append(f"not judged, because they are almost nothing but rounding: results {', '.join(map(str, vague))}")
    return Agreement(True, _sentence("THE SAME FUNCTION", in_float64, in_own, *missing, *notes))


def require_repeatable(rounding: Rounding, name: str) -> None:
    """Refuse a function whose runs on the same inputs differ by more than √ε of float64, which is not rounding.

    Raises:
        UserError: If it is random.
    """
    for index, pair in enumerate(zip(rounding.wide[0] if rounding.wide else (), rounding.repeated, strict=False)):
        finite = all(one.moments and math.isfinite(one.moments[2]) for one in pair)
        if finite and not (apart := difference_between(*pair)) <= _REPEATABLE:
            raise UserError(
                f"{name} is random: two runs on the same inputs differ by {apart:.1e} in result {index}; switch off "
                "what draws random numbers (dropout, noise, augmentation) on both sides"
            )


def _vague(rounding: tuple[Rounding, Rounding]) -> list[int]:
    """Results whose bound in float64 is not small beside them."""
    one, other = (side.wide for side in rounding)
    if not one or not other:
        return []
    factor = margin(len(one) - 1, FALSE_ALARMS / len(one[0]))
    strays = map(max, _strays(one), _strays(other))
    return [index for index, stray in enumerate(strays) if not factor * stray <= LARGEST_BOUND and _eps(one[0][index])]


def _different(*parts: str, where: str) -> Agreement:
    return Agreement(False, _sentence("NOT THE SAME FUNCTION", *parts), where)


def _sentence(what: str, *parts: str) -> str:
    return f"{what}: {'; '.join(filter(None, parts))}"


def _dtypes(one: Results, other: Results, names: tuple[str, str]) -> str:
    """Name the first result whose dtypes differ. JAX narrows integers from 64 to 32 bits, which is no difference."""
    for index, pair in enumerate(zip(one, other, strict=True)):
        kinds = [tensor.dtype for tensor in pair]
        if len({kind.replace("64", "32") if kind.startswith(("int", "uint")) else kind for kind in kinds}) > 1:
            return (
                f"dtype mismatch: result {index} is {kinds[0]} in {names[0]} and {kinds[1]} in {names[1]}; convert one"
            )
    return ""


def _in_float64(rounding: tuple[Rounding, Rounding]) -> _Deviation | None:
    """Compare in float64. Weights from outside the function may be narrower; the noise moves them by their own ε."""
    one, other = (side.wide for side in rounding)
    if not one or not other:
        return None
    strays = map(max, _strays(one), _strays(other))
    return _furthest(one[0], other[0], strays, len(one) - 1)


def _as_given(one: Results, other: Results, rounding: tuple[Rounding, Rounding]) -> _Deviation:
    strays = map(min, *(_strays(side.native) for side in rounding))
    return _furthest(one, other, strays, len(rounding[0].native) - 1)


def _elsewhere(
    rounding: tuple[Rounding, Rounding], names: tuple[str, str]
) -> tuple[list[tuple[str, _Deviation]], list[str]]:
    """Compare on the other inputs until results differ. Integers, and what is not finite, are no evidence there."""
    found, notes = [], []
    for name in (name for name in rounding[0].others if name in rounding[1].others):
        one, other = (side.others[name] for side in rounding)
        factor = margin(len(one) - 1, FALSE_ALARMS / len(one[0]))
        strays = map(max, _strays(one), _strays(other))
        for index, (*pair, stray) in enumerate(zip(one[0], other[0], strays, strict=True)):
            finite = [tensor.moments is not None and math.isfinite(tensor.moments[2]) for tensor in pair]
            if any(finite) and not all(finite):
                notes.append(f"on inputs {name} result {index} is finite in {names[finite.index(True)]} only")
            if all(finite) and _eps(pair[0]):
                bound = max(_ELSEWHERE, factor * stray)
                found.append((name, _Deviation(index, pair[0], difference_between(*pair), bound)))
                if not found[-1][1].allowed:
                    return found, notes
    return found, notes


def _furthest(one: Results, other: Results, strays: Sequence[float] | map[float], controls: int) -> _Deviation:
    """Return the result that is closest to its bound, or furthest over it."""
    factor = margin(controls, FALSE_ALARMS / len(one))
    deviations = []
    for index, (*pair, stray) in enumerate(zip(one, other, strays, strict=True)):
        eps = max(map(_eps, pair))
        bound = max(factor * stray, _FLOOR * eps) if eps else 0.0
        deviations.append(_Deviation(index, pair[0], difference_between(*pair), bound))
    return max(deviations, key=lambda one: one.times)


def _strays(runs: Sequence[Results]) -> list[float]:
    """Largest difference that noise makes in each result."""
    first, *controls = runs
    return [
        worst([found for control in controls if math.isfinite(found := difference_between(one, control[index]))] or [0])
        for index, one in enumerate(first)
    ]


def _eps(tensor: Tensor) -> float:
    """The unit of rounding of a result; 0 for integers, which do not round."""
    floating = tensor.dtype.startswith(("float", "bfloat", "complex"))
    return float(ml_dtypes.finfo(tensor.dtype).eps) if floating else 0.0  # type: ignore[no-untyped-call]

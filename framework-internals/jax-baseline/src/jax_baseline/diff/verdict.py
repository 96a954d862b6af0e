"""The verdict on two functions: how far apart their results are, and the bound that follows from measured rounding.

Each function runs on operands that are moved by a unit in the last place (:mod:`jax_baseline.parity.rounding`), in the
dtype of its inputs and in float64. In float64 rounding hides almost nothing, so a difference there is one of the
functions. In the dtype of the inputs the bound is that of the side that rounds less, so that a side which computes more
coarsely is found. Other inputs, in float64, show what the given ones do not reach.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from benchkit import UserError, numbers
from benchkit.timing.statistics import worst
from jax_baseline.diff.programs import Rounding, Tensor
from jax_baseline.diff.region_diff import difference_between
from jax_baseline.diff.runs import SCALES
from jax_baseline.parity import comparer
from jax_baseline.parity.comparer import LARGEST_BOUND, REPEATABLE, Bounds, Compared

# ε of a result that rounds alike in every control; XLA adds a mean of thousands of numbers less exactly. A library's
# own error, such as that of an approximated exponential, is a few ε in one direction everywhere.
_FLOOR = 16
# Far from the inputs libraries take shortcuts: softplus of torch is x above 20, 2e-9 less. So its ε is float32's there.
# A bias too: functions of half precision are computed in float32 and rounded once.
_FLOAT32_FLOOR = _FLOOR * float(np.finfo(np.float32).eps)
_LARGEST = max(SCALES, key=lambda name: SCALES[name])

Results = Sequence[Tensor]
Runs = Sequence[Results]  # without noise, then with


@dataclass(frozen=True)
class Agreement:
    """A verdict."""

    same: bool  # whether the functions compute the same
    text: str  # the verdict in one line, with the deviation and its bound
    # On what a difference shows: ``float64``, ``own dtype``, or the other inputs by what they are. Empty if there is
    # none, or none that can be located.
    where: str = ""
    # Whether a verdict is possible. A bound in float64 that is not small beside the results is never a pass.
    judged: bool = True


@dataclass(frozen=True)
class _Stage:
    """Both functions in one dtype, on one kind of inputs: the results of one, and how far the other is from each."""

    tensors: Results
    values: Mapping[int, Compared]
    advice: str = "; use inputs with finite results"

    @property
    def within(self) -> bool:
        return all(value.within for value in self.values.values())

    @property
    def furthest(self) -> int:
        """The result that is closest to its bound, or furthest over it."""
        return max(self.values, key=lambda index: self.values[index].times)

    def __str__(self) -> str:
        return self.said(self.furthest)

    def said(self, index: int) -> str:
        what, value = f"result {index}, {self.tensors[index]}", self.values[index]
        if math.isnan(value.deviation):
            return f"{what}, is not finite at the same places of both, or nowhere{self.advice}"
        figures = (numbers.error_size(number) for number in (value.deviation, value.bound))
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
        return _different(mismatch, in_float64, where="float64" if wide and not wide.within else "")
    if wide and not wide.within:
        return _different(in_float64, where="float64")
    vague = [index for index, value in wide.values.items() if not value.bound <= LARGEST_BOUND] if wide else []
    if wide and len(vague) == len(one):
        text = f"CAN'T BE JUDGED: {in_float64}; rounding or chance alone moves them by more than {LARGEST_BOUND:.0%}"
        return Agreement(False, text, judged=False)
    missing = [
        f"not compared in float64, because {name} raised {side.missing}"
        for name, side in zip(names, rounding, strict=True)
        if side.missing
    ]
    own = _stage(one, other, [side.native for side in rounding], min)
    in_own = f"in the dtype of the inputs {own}"
    if not own.within:
        in_float64, agree = _in_float64_too(wide, own.furthest)
        coarse = "in float64 the functions agree, so one side rounds more" if agree else ""
        if agree and precision[0] != precision[1]:
            settings = (f"{how!r} in {name}" for how, name in zip(precision, names, strict=True))
            coarse += f"; likely cause: float32 matrices are multiplied in {' and '.join(settings)}"
        return _different(in_own, *missing, in_float64, coarse, where="own dtype")
    if (biased := comparer.divergence(_biases(one, other, rounding))) is not None:
        index = biased[0][0]
        in_float64, agree = _in_float64_too(wide, index)
        rounds = f"in float64 the functions agree, so {_who_rounds(index, rounding, names)}" if agree else ""
        return _different(f"{in_own}; but {_bias(biased, names)}", *missing, in_float64, rounds, where="own dtype")
    elsewhere, notes = _elsewhere(rounding, names)
    if (parted := comparer.divergence((name, stage.values) for name, stage in elsewhere.items())) is not None:
        name, over = parted
        said = elsewhere[name].said(next(iter(over)))
        return _different(f"on inputs {name} {said}; on the given ones {in_float64}", where=name)
    if elsewhere:
        furthest = max(elsewhere.values(), key=lambda stage: stage.values[stage.furthest].times)
        notes.insert(0, f"on inputs {', '.join(elsewhere)} at most: {furthest}")
    if vague:
        which = ", ".join(map(str, vague))
        notes.append(
            f"not judged, because rounding or chance alone moves them by more than {LARGEST_BOUND:.0%}: results {which}"
        )
    return Agreement(True, _sentence("THE SAME FUNCTION", in_float64, in_own, *missing, *notes))


def require_repeatable(rounding: Rounding, name: str) -> None:
    """Refuse a function whose runs on the same inputs differ by more than √ε of float64, which is not rounding.

    Raises:
        UserError: If it is random.
    """
    for index, pair in enumerate(zip(rounding.wide[0] if rounding.wide else (), rounding.repeated, strict=False)):
        if all(map(_finite, pair)) and not (apart := difference_between(*pair)) <= REPEATABLE:
            raise UserError(
                f"{name} is random: two runs on the same inputs differ by {apart:.1e} in result {index}; switch off "
                "what draws random numbers (dropout, noise, augmentation) on both sides"
            )


def _in_float64_too(wide: _Stage | None, index: int) -> tuple[str, bool]:
    """Say how far a result that differs in its own dtype does in float64, and whether the functions agree there."""
    if wide is None:
        return "", False
    said, value = f"in float64 {wide.said(index)}", wide.values[index]
    if value.bound <= LARGEST_BOUND or value.deviation <= REPEATABLE:
        return said, True
    vague = f"rounding alone moves it by more than {LARGEST_BOUND:.0%} there, which hides whether the functions agree"
    return f"{said}; {vague}", False


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


def _in_float64(rounding: tuple[Rounding, Rounding]) -> _Stage | None:
    """Compare in float64. Weights from outside the function may be narrower; the noise moves them by their own ε."""
    one, other = (side.wide for side in rounding)
    return _stage(one[0], other[0], (one, other), max) if one and other else None


def _stage(
    one: Results,
    other: Results,
    runs: Sequence[Runs],
    chosen: Callable[[Iterable[float]], float],
    elsewhere: bool = False,
) -> _Stage:
    """Compare results under bounds from the noise on the side that is ``chosen``: that which it moves more, or less.

    Integers do not round. But on the other inputs, ``elsewhere``, operands of a comparison may be equal, and elements
    that are ordered too. Noise then moves a result, and one of both sides shows a difference of the functions.
    """
    bounds = Bounds(len(runs[0]) - 1, len(one))
    values = {}
    for index, pair in enumerate(zip(one, other, strict=True)):
        eps = max(map(_eps, pair))
        stray = (chosen if eps else min)(_stray(side, index) for side in runs)
        floor = max(_FLOOR * eps, _FLOAT32_FLOOR * elsewhere) if eps else 0.0
        bound = bounds.bound([stray], floor) if eps or elsewhere else 0.0
        values[index] = Compared(difference_between(*pair), bound)
    return _Stage(one, values)


def _elsewhere(rounding: tuple[Rounding, Rounding], names: tuple[str, str]) -> tuple[dict[str, _Stage], list[str]]:
    """Compare results on the other inputs, and note what is not judged there.

    Where both have something that is not finite, it has to be the same at the same places. On scaled inputs it need
    not: where numbers leave the range of float64 depends on the formula. An integer does not show that they did, so it
    is not judged on the largest inputs.
    """
    stages: dict[str, _Stage] = {}
    notes = []
    for name in (name for name in rounding[0].others if name in rounding[1].others):
        one, other = (side.others[name] for side in rounding)
        stage = _stage(one[0], other[0], (one, other), max, elsewhere=True)
        evidence = {}
        for index, pair in enumerate(zip(one[0], other[0], strict=True)):
            finite, value = [*map(_finite, pair)], stage.values[index]
            where = f"on inputs {name} result {index}"
            if any(finite) and not all(finite):
                notes.append(f"{where} is finite in {names[finite.index(True)]} only")
            elif not any(finite) and _same_sketch(*pair):
                continue
            elif math.isnan(value.deviation) and name in SCALES:
                notes.append(f"{where} is not finite at the same places of both, or not in the same way")
            elif name == _LARGEST and not _eps(pair[0]) and not value.within:
                notes.append(f"{where} differs by {numbers.error_size(value.deviation)}, and is not judged")
            else:
                evidence[index] = value
                if value.within and value.deviation > _FLOAT32_FLOOR and value.bound > LARGEST_BOUND:
                    apart = numbers.error_size(value.deviation)
                    notes.append(f"{where} differs by {apart}, as rounding or the order of equal elements may move it")
        if evidence:
            stages[name] = _Stage(one[0], evidence, advice="")
    return stages, notes


def _same_sketch(one: Tensor, other: Tensor) -> bool:
    return np.array_equal(one.sketch or (), other.sketch or (), equal_nan=True)


_Biased = tuple[int, Tensor, tuple[float, float]]  # a result and its bias: of the norm and of the mean


def _biases(
    one: Results, other: Results, rounding: tuple[Rounding, Rounding]
) -> Iterator[tuple[_Biased, dict[str, Compared]]]:
    """The bias of each result in the dtype of the inputs, under a bound from the side that noise moves more."""
    controls = min(len(side.native) for side in rounding) - 1
    for index, pair in enumerate(zip(one, other, strict=True) if controls > 0 else ()):
        of_result = _statistics(*pair)
        noise = [
            [stray for run in side.native[1:] if (stray := _statistics(run[index], side.native[0][index])) is not None]
            for side in rounding
        ]
        if of_result is None or not all(noise):
            continue
        bounds, values = Bounds(controls, 2 * len(one)), {}
        for name, value, *strays in zip(("norm", "mean"), of_result, *itertools.chain(*noise), strict=True):
            values[name] = Compared(abs(value), bounds.bound(map(abs, strays), _FLOAT32_FLOOR))
        yield (index, pair[0], of_result), values


def _statistics(one: Tensor, other: Tensor) -> tuple[float, float] | None:
    """The bias of a result; None for integers, zeros, and what was not computed."""
    if not (one.sketch and other.sketch and one.moments and other.moments) or one.shape != other.shape:
        return None
    if not one.dtype.startswith(("float", "bfloat")):
        return None
    size, square = other.moments[0], other.sketch[0]
    shift = one.moments[1] - other.moments[1]
    if not size or not square or not math.isfinite(square + one.sketch[0] + shift):
        return None
    return comparer.bias(square, one.sketch[0], shift, size)


def _bias(biased: tuple[_Biased, Mapping[str, Compared]], names: tuple[str, str]) -> str:
    (index, tensor, (norm, mean)), over = biased
    statistic, value = next(iter(over.items()))
    what, bound = f"result {index}, {tensor}, has", f"(bound {numbers.error_size(value.bound)})"
    if statistic == "norm":
        return f"{what} {1 + norm:.6g} times the norm in {names[0]} that it has in {names[1]}: {norm:+.2%} {bound}"
    return f"{what} another mean in {names[0]} than in {names[1]}: {mean:+.2e} of the root of its mean square {bound}"


def _who_rounds(index: int, rounding: tuple[Rounding, Rounding], names: tuple[str, str]) -> str:
    """Name the side whose result has the bias beside its own in float64, if the other has a quarter of it at most."""
    apart = [_statistics(side.native[0][index], side.wide[0][index]) or (0.0, 0.0) for side in rounding]
    sizes = [max(map(abs, statistics)) for statistics in apart]
    if 4 * min(sizes) > max(sizes):
        return "one side rounds a constant, or always in one direction"
    side = sizes.index(max(sizes))
    norms = " and ".join(f"{norm:+.2%} in {name}" for (norm, _), name in zip(apart, names, strict=True))
    weak = "; JAX rounds a Python number to the array's dtype, which torch keeps in float32" if side == 0 else ""
    return f"{names[side]} rounds a constant, or always in one direction (norms beside float64: {norms}){weak}"


def _stray(runs: Runs, index: int) -> float:
    """The largest difference that noise makes in a result."""
    first, *noisy = (run[index] for run in runs)
    return worst([apart for tensor in noisy if math.isfinite(apart := difference_between(first, tensor))] or [0])


def _finite(tensor: Tensor) -> bool:
    return tensor.moments is not None and math.isfinite(tensor.moments[2] + (tensor.sketch or (0.0,))[0])


def _eps(tensor: Tensor) -> float:
    """The unit of rounding of a result; 0 for integers, which do not round."""
    floating = tensor.dtype.startswith(("float", "bfloat", "complex"))
    return float(ml_dtypes.finfo(tensor.dtype).eps) if floating else 0.0  # type: ignore[no-untyped-call]

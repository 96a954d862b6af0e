"""Whether two functions, one in torch and one in JAX, compute the same: their difference against measured rounding.

Each side runs on operands that are moved by a unit in the last place (:mod:`jax_baseline.parity.rounding`), in the
dtype of its inputs and in float64. In float64 rounding hides almost nothing, so a difference there is one of the
functions. In the dtype of the inputs the bound is that of the side that rounds less, so that a side which computes more
coarsely is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchkit import numbers
from benchkit.timing.statistics import worst
from jax_baseline.diff.programs import Rounding, Tensor, sketch
from jax_baseline.diff.region_diff import difference_between
from jax_baseline.parity.comparison import FALSE_ALARMS, margin

CONTROLS = 8  # of each framework
_FLOOR = 16  # ε of a result that rounds alike in every control; XLA adds a mean of thousands of numbers less exactly
_INTEGERS = ("int", "uint", "bool")

Run = Callable[[int | None], Sequence[Any]]  # seed of the noise or None → results as arrays


def measure(run: Run, wide: Run | None, sketched: bool = True) -> Rounding:
    """Run a function with rounding noise.

    Args:
        run: Calls the function on the inputs.
        wide: The same on the inputs in float64; None leaves it out.
        sketched: Whether results have the same layout in both frameworks.
    """
    native = [_tensors(run(seed), sketched) for seed in (None, *range(CONTROLS))]
    try:
        in_float64 = [] if wide is None else [_tensors(wide(seed), sketched) for seed in (None, *range(CONTROLS))]
    except (TypeError, ValueError, RuntimeError):  # a function may ask for float32: then its dtype alone is compared
        in_float64 = []
    return Rounding(tuple(native), tuple(in_float64))


@contextmanager
def torch_noise(seed: int | None) -> Iterator[None]:
    """Run torch with rounding noise; without, if the seed is None."""
    from jax_baseline.parity.rounding import Noise

    if seed is None:
        yield
        return
    with Noise(seed):
        yield


def _tensors(results: Sequence[Any], sketched: bool) -> tuple[Tensor, ...]:
    return tuple(tensor_of(index, array, sketched) for index, array in enumerate(results))


def tensor_of(index: int, array: NDArray, sketched: bool) -> Tensor:
    """Return what is kept of a result: its dtype, its shape, and a sketch or the two sums that need no layout."""
    wide = np.asarray(array).astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    sums = (float(wide.size), float(wide.real.sum()), float(np.abs(wide).sum()))
    kept = sketch(wide) if sketched else None
    return Tensor(f"result {index}", str(array.dtype), array.shape, array.nbytes, sums, kept)


@dataclass(frozen=True)
class Agreement:
    """A verdict.

    Attributes:
        same: Whether the functions compute the same.
        text: The verdict in one line, with the deviation and its bound.
    """

    same: bool
    text: str


def judge(
    one: Sequence[Tensor],
    other: Sequence[Tensor],
    rounding: tuple[Rounding, Rounding],
    names: tuple[str, str],
    precision: tuple[str, str] = ("highest", "highest"),
) -> Agreement:
    """Compare the results of two functions, of one function each in torch and in JAX.

    Args:
        one: Results of the first.
        other: Results of the second.
        rounding: What rounding does to each.
        names: What made the results, for the text.
        precision: In which precision each multiplies float32 matrices.
    """
    if len(one) != len(other) or not one:
        return Agreement(False, f"NOT COMPARABLE: {names[0]} has {len(one)} results, {names[1]} has {len(other)}")
    for index, pair in enumerate(zip(one, other, strict=True)):
        if pair[0].sketch and pair[1].sketch and pair[0].shape != pair[1].shape:
            return Agreement(
                False,
                f"NOT THE SAME FUNCTION: result {index} is {pair[0]} in {names[0]} and {pair[1]} in {names[1]}",
            )
        if kind(pair[0].dtype) != kind(pair[1].dtype):
            return Agreement(
                False,
                f"NOT THE SAME FUNCTION: result {index} is {pair[0].dtype} in {names[0]} and {pair[1].dtype} in "
                f"{names[1]}; convert one",
            )
    verdicts = []
    if all(side.wide for side in rounding):
        verdicts.append(_pass("float64", rounding[0].wide[0], rounding[1].wide[0], rounding, wide=True))
    verdicts.append(_pass("the dtype of the inputs", one, other, rounding, wide=False))
    wrong = [verdict for verdict in verdicts if not verdict.same]
    if not wrong:
        return Agreement(True, "THE SAME FUNCTION: " + "; ".join(verdict.text for verdict in verdicts))
    only = ""
    if len(wrong) < len(verdicts) == 2 and wrong[0] is verdicts[1]:
        only = "; in float64 the functions agree, so one side rounds more"
        if precision[0] != precision[1]:
            each = (f"{how!r} in {name}" for how, name in zip(precision, names, strict=True))
            only += f"; likely cause: float32 matrices are multiplied in {' and '.join(each)}"
    return Agreement(False, f"NOT THE SAME FUNCTION: {wrong[0].text}{only}")


def kind(dtype: str) -> str:
    """Return the dtype, with one name for the integers that JAX narrows from 64 to 32 bits."""
    return dtype.replace("64", "32") if dtype.startswith(("int", "uint")) else dtype


def _pass(
    what: str, one: Sequence[Tensor], other: Sequence[Tensor], rounding: tuple[Rounding, Rounding], *, wide: bool
) -> Agreement:
    """Compare in one dtype. The text has the result that is closest to its bound."""
    found: list[tuple[float, str, bool]] = []
    factor = margin(CONTROLS, FALSE_ALARMS / len(one))
    for index, pair in enumerate(zip(one, other, strict=True)):
        difference = difference_between(*pair)
        if math.isnan(difference):
            return Agreement(False, f"result {index} is not finite in one of them; use inputs with finite results")
        strays = [_stray(side.wide if wide else side.native, index) for side in rounding]
        bound = factor * (max(strays) if wide else min(strays))
        if pair[0].dtype.startswith(_INTEGERS):
            bound = 0.0
        else:
            bound = max(bound, _FLOOR * max(_eps(tensor.dtype) for tensor in pair))
        text = (
            f"in {what} result {index}, {pair[0]}, differs by {numbers.error_size(difference)} (bound "
            f"{numbers.error_size(bound)}: {factor:.1f} times what rounding does)"
        )
        times = difference / bound if bound else (math.inf if difference else 0.0)
        found.append((times, text, difference <= bound))
    _, text, same = max(found)
    return Agreement(same, text)


def _stray(runs: Sequence[Sequence[Tensor]], index: int) -> float:
    """Largest difference that noise makes in a result."""
    first, *controls = runs
    strays = [difference_between(first[index], control[index]) for control in controls]
    return worst([stray for stray in strays if math.isfinite(stray)] or [0.0])


def _eps(dtype: str) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(jnp.dtype(dtype)).eps) if dtype.startswith(("float", "bfloat", "complex")) else 0.0

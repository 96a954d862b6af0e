"""Runs of one function: on the inputs and on other inputs, with rounding noise and without, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchkit.errors import first_line
from jax_baseline.diff.programs import Rounding, Tensor, sketch

CONTROLS = 8  # runs with noise on the inputs
OTHER_CONTROLS = 3  # on each of the other inputs
SCALES = {"times 16": 16, "times 1000": 1000, "times 1/16": 1 / 16}  # other inputs that are the given ones, scaled

Arrays = Sequence[NDArray]


class Run(Protocol):
    """Calls a function: on ``arrays``, with noise of a seed or without noise, in float64 or as it is."""

    def __call__(self, arrays: Arrays, seed: int | None, *, wide: bool, ties: bool = False) -> Sequence[Any]:
        """Return the results as arrays; with ``ties``, noise orders equal elements at random."""


def measure(run: Run, arrays: Arrays, *, narrow_only: bool = False, kinks: bool = True) -> Rounding:
    """Run a function with rounding noise.

    ``narrow_only`` leaves out float64 and other inputs; results then need not have the same layout in both frameworks.
    Without ``kinks`` no inputs with equal numbers or zeros are tried, where a gradient is a convention.
    """

    def repeated(given: Arrays, controls: int, wide: bool, ties: bool = False) -> tuple[tuple[Tensor, ...], ...]:
        results = (run(given, seed, wide=wide, ties=ties) for seed in (None, *range(controls)))
        return tuple(
            tuple(tensor_of(index, array, not narrow_only) for index, array in enumerate(arrays)) for arrays in results
        )

    native = repeated(arrays, CONTROLS, wide=False)
    if narrow_only:
        return Rounding(native)
    others = {}
    try:
        wide, again = repeated(arrays, CONTROLS, wide=True), repeated(arrays, 0, wide=True)[0]
    except Exception as error:  # a function may ask for its dtype, or bring kernels that take no other
        return Rounding(native, missing=first_line(error)[:200])
    for name, changed in other_inputs(arrays, kinks):
        try:
            others[name] = repeated(changed, OTHER_CONTROLS, wide=True, ties=True)
        except Exception:  # noqa: S112 - these inputs may be outside the function's domain
            continue
    return Rounding(native, wide, others, repeated=again)


def other_inputs(arrays: Arrays, kinks: bool = True) -> Iterator[tuple[str, Arrays]]:
    """Return inputs that show what the given ones may not reach: limits, thresholds, signs, zeros, ties of rounding.

    An array keeps to what it shows of its domain. If it has one sign, its sign stays; if it is within ±1, it is not
    enlarged; if it has whole numbers only, it is not changed; if its matrices are symmetric, they stay so.
    """
    free = [
        index
        for index, array in enumerate(arrays)
        if np.issubdtype(array.dtype, np.floating) and array.size and not np.array_equal(array, np.rint(array))
    ]
    large = [index for index in free if np.abs(arrays[index]).max() > 1]
    signed = [index for index in free if arrays[index].min() < 0 < arrays[index].max()]

    def changed(which: Sequence[int], change: Any) -> Arrays:
        return [_alike(array, change) if index in which else array for index, array in enumerate(arrays)]

    for name, which, change in (
        *((name, large if scale > 1 else free, partial(np.multiply, scale)) for name, scale in SCALES.items()),
        ("of the opposite sign", signed, np.negative),
        ("with zeros", signed if kinks else [], _with_zeros),
        ("of multiples of 1/2", signed if kinks else [], _halves),
    ):
        if which:
            yield name, changed(which, change)


def _alike(array: NDArray, change: Callable[[NDArray], Any]) -> NDArray:
    """A changed copy, which is symmetric if the array is: a covariance, of which frameworks read one half or both."""
    made = np.asarray(change(array.astype(np.float64)))
    if array.ndim > 1 and 1 < array.shape[-1] == array.shape[-2] and np.array_equal(array, array.swapaxes(-1, -2)):
        return np.asarray(np.tril(made) + np.tril(made, -1).swapaxes(-1, -2))
    return made


def _with_zeros(x: NDArray) -> NDArray:
    flat = x.ravel()
    flat[::3] = 0
    return flat.reshape(x.shape)


def _halves(x: NDArray) -> NDArray:
    """Multiples of 1/2 around 0 in the order of the numbers, all different along the last axis."""
    ranks = np.atleast_1d(x).argsort(-1).argsort(-1).reshape(x.shape)
    return (ranks - x.shape[-1] // 2) / 2 if x.ndim else np.rint(x) + 0.5


def torch_arrays(results: Sequence[Any]) -> list[NDArray]:
    """Return torch's results as arrays; NumPy's own bfloat16 is the one that JAX brings."""
    import ml_dtypes
    import torch

    return [
        tensor.float().numpy().astype(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
        for tensor in (result.detach().cpu().resolve_conj().resolve_neg() for result in results)
    ]


def tensor_of(index: int, array: NDArray, sketched: bool) -> Tensor:
    """Return what is kept of a result: its dtype, its shape, and a sketch or the two sums that need no layout."""
    wide = np.asarray(array).astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    with np.errstate(invalid="ignore"):  # infinities may cancel
        sums = (float(wide.size), float(wide.real.sum()), float(np.abs(wide).sum()))
    kept = sketch(wide) if sketched else None
    return Tensor(f"result {index}", str(array.dtype), array.shape, array.nbytes, sums, kept)

"""Whether two implementations of a training loop compute the same thing, step by step.

Each implementation is a :class:`Side`: given a batch it takes one optimizer step and says what it saw. A reference and
a candidate are run over the same batches, and beside them controls: the reference again, in ways that change its
rounding and nothing else. How far the controls have strayed from the reference up to a step is what rounding alone does
to this model, at this learning rate, in this dtype, by that step; the candidate may stray some times as far. A porting
mistake is orders of magnitude above it.

Nothing here knows torch or JAX: :func:`compare` takes any objects with a ``step``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from torch_baseline.data import Tokens

Arrays = Mapping[str, NDArray]
Quantity = Literal["loss", "gradient norm", "gradients", "weights", "optimizer state"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
_SCALARS: tuple[Quantity, ...] = ("loss", "gradient norm")

# How many times as far as the controls the candidate may stray. NOTES.md has the measurements behind it: how far a
# control strays by the measure of the other controls, and a faithful candidate by that of all of them.
TIMES_CONTROL: Mapping[str, float] = {"float64": 4.0, "float32": 4.0, "bfloat16": 3.0}

# A loss or a norm is one number, and one number of a few controls is now and then right by accident: the first steps
# share what the controls reach in any of them. An array's distance is a sum over many elements and needs no such help.
_SHARED_STEPS = 8

# What a step can cost without any mistake, in units of the epsilon that sums are kept in: so that a run in which the
# controls happen to round as the reference does asks for nothing impossible. A mean over thousands of tokens, a norm
# over a million gradients, and gradients that pass every product of the model twice.
_FLOOR_EPS: Mapping[Quantity, float] = {
    "loss": 8,
    "gradient norm": 32,
    "gradients": 256,
    "weights": 64,
    "optimizer state": 256,
}


@dataclass(frozen=True)
class Observation:
    """What one side saw of one step.

    Attributes:
        loss: before the update, nats per token.
        gradient_norm: before clipping.
        gradients: before clipping, in the forward pass's order of parameters; by the same names, and the same way
            round, on all sides.
        weights: after the update.
        moments: the optimizer's state after the update, under any names that the sides agree on; may be empty.
    """

    loss: float
    gradient_norm: float
    gradients: Arrays
    weights: Arrays
    moments: Arrays = field(default_factory=dict)


class Side(Protocol):
    """An implementation of a training loop."""

    def step(self, tokens_BT: Tokens, targets_BT: Tokens) -> Observation:
        """Take the next step on a batch of NumPy tokens."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A :class:`Side` that can be asked where in the forward pass it parts from another."""

    def restart(self) -> None:
        """Go back to the state before the first step."""
        ...

    def activations(self, tokens_BT: Tokens) -> Arrays:
        """Return arrays from inside the forward pass, in its order, with the present weights."""
        ...


@dataclass(frozen=True)
class Distance:
    """How far several arrays are from their reference.

    Attributes:
        total: √Σ Δ² over √Σ x², all arrays together.
        each: √Σ Δ² over √Σ x² by array, in the reference's order.
    """

    total: float
    each: Mapping[str, float]


@dataclass(frozen=True)
class Deviation:
    """How far one side's step is from another's.

    Attributes:
        scalars: the loss, |Δ| in nats per token, and the gradient norm, |Δ| over the reference's.
        arrays: the other quantities; those that a side does not tell are absent.
    """

    scalars: Mapping[Quantity, float]
    arrays: Mapping[Quantity, Distance]

    def total(self, quantity: Quantity) -> float:
        """One number for the quantity; 0 where the sides tell nothing."""
        if quantity in _SCALARS:
            return self.scalars[quantity]
        return self.arrays[quantity].total if quantity in self.arrays else 0.0

    def each(self, quantity: Quantity) -> Mapping[str, float]:
        """The quantity by parameter; a scalar under an empty name."""
        if quantity in _SCALARS:
            return {"": self.scalars[quantity]}
        return self.arrays[quantity].each if quantity in self.arrays else {}


@dataclass(frozen=True)
class Divergence:
    """The first place where the candidate left its bounds.

    Attributes:
        step: counted from 0.
        quantity: the first to leave, in the order in which a step computes them.
        parameter: whose; empty for a scalar. Of several gradients the first that the backward pass computes.
        deviation: of the candidate.
        bound: that it had to keep.
        layer: the first activation of the forward pass that is off, where the sides can be asked; else empty.
    """

    step: int
    quantity: Quantity
    parameter: str
    deviation: float
    bound: float
    layer: str = ""

    def __str__(self) -> str:
        where = f" in {self.parameter}" if self.parameter else ""
        first = f"; first in the forward pass: {self.layer}" if self.layer else ""
        return (
            f"step {self.step}: the {self.quantity} off by {self.deviation:.1e}{where}, bound {self.bound:.1e}{first}"
        )


@dataclass(frozen=True)
class Comparison:
    """What came of one run.

    Attributes:
        dtype: the precision compared.
        reference: losses by step.
        candidate: likewise.
        controls: likewise, by control.
        deviations: of the candidate from the reference, by step.
        control_deviations: of each control from the reference, by step.
        layer: see :class:`Divergence`.
    """

    dtype: str
    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]
    deviations: tuple[Deviation, ...]
    control_deviations: tuple[tuple[Deviation, ...], ...]
    layer: str = ""

    def largest(self, quantity: Quantity) -> float:
        """The candidate's largest deviation over the run."""
        return _largest(found.total(quantity) for found in self.deviations)

    def control_largest(self, quantity: Quantity) -> float:
        """The controls' largest deviation over the run."""
        return _largest(found.total(quantity) for control in self.control_deviations for found in control)

    def bounds(self, quantity: Quantity) -> list[float]:
        """What the candidate's :meth:`Deviation.total` may be, by step: rounding accumulates, so it never falls."""
        return [
            self._bound(quantity, _largest(found.total(quantity) for found in self._until(step, quantity)))
            for step in range(len(self.deviations))
        ]

    def excess(self, step: int, quantity: Quantity) -> dict[str, tuple[float, float]]:
        """Deviation and bound by parameter, of those that are over their bound at a step.

        A deviation that is not a number is over every bound.
        """
        over = {}
        until = self._until(step, quantity)
        for name, deviation in self._judged(self.deviations[step], quantity).items():
            bound = self._bound(quantity, _largest(self._judged(found, quantity)[name] for found in until))
            if not deviation <= bound:
                over[name] = (deviation, bound)
        return over

    def worst_ratio(self, quantity: Quantity) -> float:
        """The largest ratio of the candidate's deviation to what the controls had reached by that step."""
        times = TIMES_CONTROL[self.dtype]
        bounds = self.bounds(quantity)
        return _largest(
            times * found.total(quantity) / bound for found, bound in zip(self.deviations, bounds, strict=True)
        )

    def divergence(self) -> Divergence | None:
        """The first step and quantity over its bound, in the order a step computes them; None if all are within."""
        for step in range(len(self.deviations)):
            for quantity in QUANTITIES:
                if over := self.excess(step, quantity):
                    # The backward pass computes gradients from the last parameter to the first.
                    name = list(over)[-1] if quantity == "gradients" else _most_over(over)
                    return Divergence(step, quantity, name, *over[name], self.layer)
        return None

    def _until(self, step: int, quantity: Quantity) -> list[Deviation]:
        """What the bound at a step is taken from."""
        last = max(step, _SHARED_STEPS - 1) if quantity in _SCALARS else step
        return [found for control in self.control_deviations for found in control[: last + 1]]

    def _judged(self, found: Deviation, quantity: Quantity) -> Mapping[str, float]:
        # bfloat16 rounds seldom and far: one element of a small parameter may be off in this run and in no control (the
        # sign of a gradient near zero, which is all that Adam's first update takes). Many parameters together are not.
        if self.dtype == "bfloat16":
            return {"": found.total(quantity)}
        return found.each(quantity)

    def _bound(self, quantity: Quantity, reached: float) -> float:
        scale = max(map(abs, self.reference)) if quantity == "loss" else 1.0
        return max(TIMES_CONTROL[self.dtype] * reached, _FLOOR_EPS[quantity] * scale * _eps(self.dtype))


def compare(
    batches: Sequence[tuple[Tokens, Tokens]],
    *,
    reference: Side,
    candidate: Side,
    controls: Sequence[Side],
    dtype: str,
) -> Comparison:
    """Take the same steps on all sides and say how far they come apart.

    Args:
        batches: one a step.
        reference: the side that is right by definition.
        candidate: the side in question.
        controls: the reference with other rounding, at least one; the more there are, the less their largest deviation
            is an accident. :mod:`jax_baseline.parity.permuted` makes any number of them from one model.
        dtype: that they compute in: ``float64``, ``float32`` or ``bfloat16``.

    Raises:
        ValueError: for another dtype, for no controls, or if the sides do not hold the same parameters.
    """
    if dtype not in TIMES_CONTROL:
        raise ValueError(f"dtype must be one of {', '.join(TIMES_CONTROL)}, got {dtype!r}")
    if not controls:
        raise ValueError("a bound needs at least one control; got none")
    sides = (reference, candidate, *controls)
    losses: list[list[float]] = [[] for _ in sides]
    deviations: list[list[Deviation]] = [[] for _ in sides[1:]]
    # All sides take a step before any takes the next: what they saw is compared at once and need not be kept.
    for batch in batches:
        expected, *others = (side.step(*batch) for side in sides)
        for kept, seen in zip(losses, (expected, *others), strict=True):
            kept.append(seen.loss)
        for found, seen in zip(deviations, others, strict=True):
            found.append(deviation(expected, seen))
    comparison = _comparison(dtype, losses, deviations)
    divergence = comparison.divergence()
    inspectable = all(isinstance(side, Inspectable) for side in sides)
    if divergence is None or divergence.quantity in ("weights", "optimizer state") or not inspectable:
        return comparison
    return replace(comparison, layer=_first_layer(batches[: divergence.step + 1], sides, dtype))


def judge(
    reference: Sequence[Observation],
    candidate: Sequence[Observation],
    *,
    controls: Sequence[Sequence[Observation]],
    dtype: str,
) -> Comparison:
    """Return the comparison of observations that are there already: one reference serves many candidates.

    Raises:
        ValueError: if the sides do not hold the same parameters.
    """
    others = (candidate, *controls)
    return _comparison(
        dtype,
        [[seen.loss for seen in side] for side in (reference, *others)],
        [[deviation(*pair) for pair in zip(reference, side, strict=True)] for side in others],
    )


def _comparison(dtype: str, losses: list[list[float]], deviations: list[list[Deviation]]) -> Comparison:
    by_side, strays = [tuple(side) for side in losses], [tuple(side) for side in deviations]
    return Comparison(dtype, by_side[0], by_side[1], tuple(by_side[2:]), strays[0], tuple(strays[1:]))


def deviation(expected: Observation, found: Observation) -> Deviation:
    """Return how far one observation is from another.

    Raises:
        ValueError: if they do not hold the same parameters.
    """
    arrays: dict[Quantity, Distance] = {
        "gradients": distance(expected.gradients, found.gradients),
        "weights": distance(expected.weights, found.weights),
    }
    if expected.moments and found.moments:
        arrays["optimizer state"] = distance(expected.moments, found.moments)
    norm = abs(expected.gradient_norm - found.gradient_norm) / max(expected.gradient_norm, 1e-300)
    return Deviation({"loss": abs(expected.loss - found.loss), "gradient norm": norm}, arrays)


def distance(expected: Arrays, found: Arrays) -> Distance:
    """Return how far arrays are from others of the same names.

    Raises:
        ValueError: if the names differ.
    """
    if expected.keys() != found.keys():
        raise ValueError(f"the sides differ in {sorted(expected.keys() ^ found.keys())}; both must hold all parameters")
    squares = {
        name: (_square(array.astype(np.float64) - found[name]), _square(array)) for name, array in expected.items()
    }
    difference, size = (sum(pair[index] for pair in squares.values()) for index in range(2))
    return Distance(_ratio(difference, size), {name: _ratio(*pair) for name, pair in squares.items()})


def _first_layer(batches: Sequence[tuple[Tokens, Tokens]], sides: Sequence[Side], dtype: str) -> str:
    """Go back to the last batch and name the first activation that is off; empty if none is (the backward is)."""
    seen = []
    for side in sides:
        assert isinstance(side, Inspectable)
        side.restart()
        for batch in batches[:-1]:
            side.step(*batch)
        seen.append(side.activations(batches[-1][0]))
    reference, candidate, *controls = seen
    strays = distance(reference, candidate).each
    allowed = [distance(reference, control).each for control in controls]
    for name, stray in strays.items():
        floor = _FLOOR_EPS["gradients"] * _eps(dtype)
        if not stray <= max(TIMES_CONTROL[dtype] * max(control[name] for control in allowed), floor):
            return name
    return ""


def _eps(dtype: str) -> float:
    # Under bfloat16 sums are kept in float32, and bounded as such: what bfloat16 rounds, the controls tell.
    return float(np.finfo(np.float64 if dtype == "float64" else np.float32).eps)


def _most_over(over: Mapping[str, tuple[float, float]]) -> str:
    def times(name: str) -> float:
        deviation, bound = over[name]
        return math.inf if math.isnan(deviation) else deviation / bound

    return max(over, key=times)


def _square(array: NDArray) -> float:
    return float(np.sum(np.square(array, dtype=np.float64)))


def _ratio(difference: float, size: float) -> float:
    # What is zero on both sides (the gradient of an unused token, a moment before its first gradient) does not differ.
    return 0.0 if difference == 0 else math.sqrt(difference / max(size, 1e-300))


def _largest(values: Iterable[float]) -> float:
    return float(np.max(list(values)))  # np.max, unlike max, keeps a NaN

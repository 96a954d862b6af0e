"""Whether two implementations of a training loop compute the same thing, step by step.

Each implementation is an :class:`Adapter`: it takes one optimizer step on a batch and returns what it observed. A
reference, a candidate and several controls run over the same batches. A control is the reference with other rounding
and no other difference. The deviation of the controls from the reference up to a step measures what rounding alone does
to this model, at this learning rate, in this dtype. The candidate may deviate so many times as far, see
:mod:`jax_baseline.parity.comparer`. A porting mistake deviates orders of magnitude further.

This module imports neither torch nor JAX. :func:`compare` takes any objects with a ``step`` method.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from benchkit.command.progress import track
from benchkit.timing.statistics import worst
from jax_baseline.parity import comparer
from jax_baseline.parity.comparer import Bounds, Compared, first_vague
from torch_baseline.data import Tokens

Arrays = Mapping[str, NDArray]
Quantity = Literal["loss", "gradient norm", "gradients", "gradient bias", "state", "weights", "optimizer state"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
# What a report records.
REPORTED: tuple[Quantity, ...] = ("loss", "gradient norm", "gradients", "weights", "optimizer state")

Verdict = Literal["PARITY", "NO PARITY", "CAN'T BE JUDGED"]

DTYPES = ("float64", "float32", "bfloat16")

# The few controls may all agree with the reference by accident at one step. The first steps therefore share one bound:
# the largest deviation of the controls in any of them.
SHARED_STEPS = 8

# Steps of all controls together, of the first eight of each, that bounds are taken from.
CONTROL_STEPS = 24

# An array below this part of the norm of all is noted instead: in exact arithmetic many gradients are zero, such as
# that of a bias before a norm, so that rounding is all there is of them.
_NEGLIGIBLE = 1e-3

# Smallest bounds, in units of the epsilon of the accumulation dtype: an exact control has no rounding to measure. The
# loss is a mean over thousands of tokens, the norm a sum over a million gradients, and a gradient passes every matrix
# product of the model twice.
_FLOOR_EPS: Mapping[Quantity, float] = {
    "loss": 8,
    "gradient norm": 32,
    "gradients": 256,
    "gradient bias": 32,
    "state": 256,
    "weights": 64,
    "optimizer state": 256,
}


@dataclass(frozen=True)
class Observation:
    """What one implementation observed in one step.

    All implementations must use the same names and the same layouts of arrays.

    Attributes:
        loss: Loss before the update, in nats per token.
        gradient_norm: Norm of all gradients before clipping.
        gradients: Gradients before clipping by parameter name, in the order of the forward pass.
        weights: Weights after the update, by parameter name.
        moments: Optimizer state after the update, by name; may be empty. Compared is what both have.
        state: What the forward pass writes, such as running statistics, by name; may be empty.
    """

    loss: float
    gradient_norm: float
    gradients: Arrays
    weights: Arrays
    moments: Arrays = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)


class Adapter(Protocol):
    """The interface of one implementation of a training step."""

    def step(self, tokens_BT: Tokens, targets_BT: Tokens) -> Observation:
        """Take the next step on a batch of NumPy tokens."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """An :class:`Adapter` that also exposes the intermediates of its forward pass."""

    def restart(self) -> None:
        """Return to the state before the first step."""
        ...

    def activations(self, tokens_BT: Tokens) -> Arrays:
        """Return the intermediates of the forward pass with the current weights, in the order of the computation."""
        ...


@dataclass(frozen=True)
class Distance:
    """How far the values of one quantity are from their reference; without any value if it is not observed.

    Attributes:
        total: Distance of all values together: √Σ Δ² / √Σ x² of arrays, |Δ| in nats per token of the loss.
        of_array: Distance of each array by name, in the order of the reference; a scalar has the empty name.
        share: Norm of each array of the reference, as a part of the norm of all.
    """

    total: float = 0.0
    of_array: Mapping[str, float] = field(default_factory=dict)
    share: Mapping[str, float] = field(default_factory=dict)


Deviation = Mapping[Quantity, Distance]  # of one observation from another, in every quantity


@dataclass(frozen=True)
class Divergence:
    """The first deviation of the candidate that exceeds its bound.

    Attributes:
        step: Index of the step, from 0.
        quantity: First quantity over its bound, in the order in which a step computes them.
        parameter: Name of the parameter; empty for a scalar. If several gradients are over their bounds, it is the one
            that the backward pass computes first.
        deviation: Deviation of the candidate.
        bound: Bound of the deviation.
        layer: First intermediate of the forward pass that is over its bound. Empty if there is none, or if the
            implementations are not :class:`Inspectable`.
    """

    step: int
    quantity: Quantity
    parameter: str
    deviation: float
    bound: float
    layer: str = ""

    def __str__(self) -> str:
        where = f" of the norm of {self.parameter}" if self.parameter else ""
        first = f"; first in the forward pass: {self.layer}" if self.layer else ""
        return (
            f"step {self.step}: the {self.quantity} off by {self.deviation:.1e}{where}, bound {self.bound:.1e}{first}"
        )


@dataclass(frozen=True)
class Unjudged:
    """A quantity whose bound is not small beside it: rounding, or chance, moves it too far for a verdict.

    Attributes:
        step: First step at which its bound is above :data:`jax_baseline.parity.comparer.LARGEST_BOUND` of it.
        quantity: The quantity.
        parameter: Name of the parameter; empty for the whole quantity.
        bound: Its bound at the step, relative.
        negligible: Whether it is the array of one parameter that has almost no part in the quantity.
    """

    step: int
    quantity: Quantity
    parameter: str
    bound: float
    negligible: bool = False

    def __str__(self) -> str:
        of = f" of {self.parameter}" if self.parameter else ""
        return f"the {self.quantity}{of} from step {self.step} on, where the bound is {self.bound:.1e} of it"


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        deviations: Deviations of the candidate from the reference by step.
        control_deviations: Deviations of each control from the reference by step.
        layer: See :class:`Divergence`.
    """

    dtype: str
    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]
    deviations: tuple[Deviation, ...]
    control_deviations: tuple[tuple[Deviation, ...], ...]
    layer: str = ""

    @property
    def comparisons(self) -> int:
        """Number of deviations that are compared with a bound."""
        return sum(len(self._named(deviation, quantity)) for deviation in self.deviations for quantity in QUANTITIES)

    @property
    def margin(self) -> float:
        """Bound of a deviation, in multiples of the controls' largest: :func:`jax_baseline.parity.comparer.margin`."""
        return self._controls.margin

    def largest(self, quantity: Quantity) -> float:
        """Largest deviation of the candidate over the run."""
        return worst(deviation[quantity].total for deviation in self.deviations)

    def control_largest(self, quantity: Quantity) -> float:
        """Largest deviation of any control over the run."""
        return worst(deviation[quantity].total for control in self.control_deviations for deviation in control)

    def bounds(self, quantity: Quantity, name: str | None = None) -> list[float]:
        """Bound by step of the whole quantity, or of one parameter. It never falls, because rounding accumulates."""
        return [self._bound(step, quantity, name) for step in range(len(self.deviations))]

    def compared(self, step: int, quantity: Quantity) -> dict[str, Compared]:
        """What is compared of a quantity at a step: each parameter; in bfloat16 all of them together."""
        whole = self.dtype == "bfloat16"
        return {
            name: Compared(deviation, self._bound(step, quantity, None if whole else name))
            for name, deviation in self._named(self.deviations[step], quantity).items()
        }

    def worst_ratio(self, quantity: Quantity) -> float:
        """Largest ratio, over the steps, of the candidate's deviation to that of the controls up to the step."""
        bounds = zip(self.deviations, self.bounds(quantity), strict=True)
        return worst(self.margin * deviation[quantity].total / bound for deviation, bound in bounds)

    def divergence(self) -> Divergence | None:
        """First deviation over its bound, by step and by the order of computation; None if all are within bounds."""
        places = product(range(len(self.deviations)), QUANTITIES)
        parted = comparer.divergence((place, self.compared(*place)) for place in places)
        if parted is None:
            return None
        (step, quantity), over = parted
        # The backward pass computes gradients from the last parameter to the first.
        name = list(over)[-1] if quantity == "gradients" else max(over, key=lambda name: over[name].times)
        return Divergence(step, quantity, name, over[name].deviation, over[name].bound, self.layer)

    @property
    def verdict(self) -> Verdict:
        """Whether the implementations compute the same; a bound that is not small beside its quantity never passes."""
        if self.divergence() is not None:
            return "NO PARITY"
        return "CAN'T BE JUDGED" if self.too_vague else "PARITY"

    @property
    def too_vague(self) -> str:
        """In words, what rounding or chance moves too far for a verdict; empty if nothing."""
        return "; ".join(str(quantity) for quantity in self.unjudged() if not quantity.negligible)

    def unjudged(self) -> list[Unjudged]:
        """Quantities, and arrays of single parameters, whose bounds are too wide for a verdict."""
        quantities = []
        for quantity in ("loss", "gradient norm", "gradients", "state"):
            scale = self._scale(quantity) or math.inf
            bounds = [bound / scale for bound in self.bounds(quantity)]
            if (step := first_vague(bounds)) is not None:
                quantities.append(Unjudged(step, quantity, "", bounds[step]))
        return quantities or self._unjudged_arrays()

    def _unjudged_arrays(self) -> list[Unjudged]:
        if self.dtype == "bfloat16":  # compared all together
            return []
        arrays = []
        both: tuple[Quantity, ...] = ("gradients", "state")
        names = [(quantity, name) for quantity in both for name in self.deviations[0][quantity].of_array]
        for quantity, name in names:
            bounds = self.bounds(quantity, name)
            if (step := first_vague(bounds)) is not None:
                share = max(deviation[quantity].share[name] for deviation in self.deviations)
                arrays.append(Unjudged(step, quantity, name, bounds[step], share < _NEGLIGIBLE))
        return arrays

    @cached_property
    def _controls(self) -> Bounds:
        return Bounds(len(self.control_deviations) * min(len(self.deviations), SHARED_STEPS), self.comparisons)

    def _bound(self, step: int, quantity: Quantity, name: str | None) -> float:
        last = max(step, SHARED_STEPS - 1)
        controls = (deviation for run in self.control_deviations for deviation in run[: last + 1])
        floor = _FLOOR_EPS[quantity] * self._scale(quantity) * _eps(self.dtype)
        return self._controls.bound(
            (control[quantity].total if name is None else control[quantity].of_array[name] for control in controls),
            floor,
        )

    def _scale(self, quantity: Quantity) -> float:
        return max(map(abs, self.reference)) if quantity == "loss" else 1.0

    def _named(self, deviation: Deviation, quantity: Quantity) -> Mapping[str, float]:
        # In bfloat16 one element of a small parameter may be far off in the candidate and in no control: Adam's first
        # update depends only on the sign of a gradient, which rounding can flip near zero.
        return {"": deviation[quantity].total} if self.dtype == "bfloat16" else deviation[quantity].of_array


def compare(
    batches: Sequence[tuple[Tokens, Tokens]],
    *,
    reference: Adapter,
    candidate: Adapter,
    controls: Sequence[Adapter],
    controls_of_candidate: Sequence[Adapter] = (),
    dtype: str,
) -> Comparison:
    """Take the same steps with all implementations and compare what they observe.

    Args:
        batches: One batch per step.
        reference: Implementation that is correct by definition.
        candidate: Implementation under test.
        controls: The reference with other rounding, at least one. More controls make the bound depend less on chance.
            :mod:`jax_baseline.parity.gpt.permuted` makes any number of them from one model.
        controls_of_candidate: The candidate with other rounding. How far they are from the candidate counts as the
            deviation of a control.
        dtype: Compute dtype: ``float64``, ``float32`` or ``bfloat16``.

    Raises:
        ValueError: For another dtype, for no controls, or if the implementations have different parameters.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not controls:
        raise ValueError("a bound needs at least one control, got none; pass the reference with other rounding")
    adapters = (reference, candidate, *controls, *controls_of_candidate)
    # All take one step before any takes the next, so that only one observation of each is in memory.
    with track(batches, f"steps in {dtype}") as batches_in_turn:
        steps = ([adapter.step(*batch) for adapter in adapters] for batch in batches_in_turn)
        comparison = _comparison(dtype, steps, len(controls_of_candidate))
    divergence = comparison.divergence()
    compared = (reference, candidate, *controls)
    inspectable = all(isinstance(adapter, Inspectable) for adapter in compared)
    if divergence is None or divergence.quantity in ("weights", "optimizer state") or not inspectable:
        return comparison
    return replace(comparison, layer=_first_layer(batches[: divergence.step + 1], compared, comparison))


def compare_observations(
    reference: Sequence[Observation],
    candidate: Sequence[Observation],
    *,
    controls: Sequence[Sequence[Observation]],
    dtype: str,
) -> Comparison:
    """Compare observations that were made before, so that one reference serves many candidates.

    Raises:
        ValueError: If the implementations have different parameters.
    """
    return _comparison(dtype, zip(reference, candidate, *controls, strict=True))


def _comparison(dtype: str, steps: Iterable[Sequence[Observation]], of_candidate: int = 0) -> Comparison:
    """Compare a reference, a candidate and controls step by step; the last ``of_candidate`` are the candidate's."""
    losses, deviations = [], []
    for reference, *observed in steps:
        against = [reference] * (len(observed) - of_candidate) + observed[:1] * of_candidate
        losses.append((reference.loss, *(observation.loss for observation in observed)))
        deviations.append([deviation(*pair) for pair in zip(against, observed, strict=True)])
    reference_losses, candidate_losses, *control_losses = zip(*losses, strict=True)
    candidate_deviations, *control_deviations = zip(*deviations, strict=True)
    return Comparison(
        dtype,
        reference_losses,
        candidate_losses,
        tuple(control_losses),
        candidate_deviations,
        tuple(control_deviations),
    )


def deviation(expected: Observation, observed: Observation) -> Deviation:
    """Return the deviation of one observation from another.

    Raises:
        ValueError: If they have different parameters.
    """
    norm = abs(expected.gradient_norm - observed.gradient_norm) / max(expected.gradient_norm, 1e-300)
    both = [name for name in expected.moments if name in observed.moments]
    has_state = bool(expected.state and observed.state)
    return {
        "loss": _scalar(abs(expected.loss - observed.loss)),
        "gradient norm": _scalar(norm),
        "gradients": distance(expected.gradients, observed.gradients),
        "gradient bias": bias(expected.gradients, observed.gradients),
        "state": distance(expected.state, observed.state) if has_state else Distance(),
        "weights": distance(expected.weights, observed.weights),
        "optimizer state": distance(*({name: side.moments[name] for name in both} for side in (expected, observed))),
    }


def _scalar(deviation: float) -> Distance:
    return Distance(deviation, {"": deviation})


def distance(expected: Arrays, observed: Arrays) -> Distance:
    """Return the distance of arrays from others of the same names.

    Raises:
        ValueError: If the names differ.
    """
    if expected.keys() != observed.keys():
        different = sorted(expected.keys() ^ observed.keys())
        raise ValueError(f"the implementations differ in {different}; both must have the same parameters")
    squares = {name: _squares(array, observed[name]) for name, array in expected.items()}
    difference, size = (sum(pair[index] for pair in squares.values()) for index in range(2))
    of_array = {name: _ratio(*pair) for name, pair in squares.items()}
    share = {name: math.sqrt(pair[1] / size) if size else 0.0 for name, pair in squares.items()}
    return Distance(_ratio(difference, size), of_array, share)


def bias(expected: Arrays, observed: Arrays) -> Distance:
    """Return how far norm and mean of arrays are off: the larger of :func:`jax_baseline.parity.comparer.bias`."""
    sums = {
        name: np.array(
            [
                _square(array),
                _square(observed[name]),
                float(np.sum(observed[name].astype(np.float64) - array)),
                array.size,
            ]
        )
        for name, array in expected.items()
    }
    total = sum(sums.values(), np.zeros(4))
    return Distance(_bias(*total), {name: _bias(*four) for name, four in sums.items()})


def _bias(square: float, other_square: float, shift: float, count: float) -> float:
    if square == other_square and shift == 0:
        return 0.0
    return worst(map(abs, comparer.bias(square, other_square, shift, count)))


def _first_layer(batches: Sequence[tuple[Tokens, Tokens]], adapters: Sequence[Adapter], comparison: Comparison) -> str:
    """Name the first intermediate over its bound at the last batch; empty without one: the backward pass is wrong."""
    activations = []
    for adapter in adapters:
        assert isinstance(adapter, Inspectable)
        adapter.restart()
        for batch in batches[:-1]:
            adapter.step(*batch)
        activations.append(adapter.activations(batches[-1][0]))
    reference, candidate, *controls = activations
    of_controls = [distance(reference, control).of_array for control in controls]
    floor = _FLOOR_EPS["gradients"] * _eps(comparison.dtype)
    for name, deviation in distance(reference, candidate).of_array.items():
        if not deviation <= max(comparison.margin * max(control[name] for control in of_controls), floor):
            return name
    return ""


def _eps(dtype: str) -> float:
    # With bfloat16 products, sums are accumulated in float32. The controls measure the rounding to bfloat16 itself.
    return float(np.finfo(np.float64 if dtype == "float64" else np.float32).eps)


def _squares(expected: NDArray, observed: NDArray) -> tuple[float, float]:
    """Return Σ Δ² and Σ x² without what is the same infinity, or NaN, in both: a mask, a minimum before its start."""
    size = _square(expected)
    if not math.isfinite(size) and expected.shape == observed.shape:
        both = np.isclose(expected, observed, 0, 0, equal_nan=True) & ~np.isfinite(expected)
        expected, observed = (np.where(both, 0, array) for array in (expected, observed))
        size = _square(expected)
    return _square(expected.astype(np.float64) - observed), size


def _square(array: NDArray) -> float:
    return float(np.sum(np.square(array, dtype=np.float64)))


def _ratio(difference: float, size: float) -> float:
    # Arrays that are zero in both (the gradient of an unused token, a moment before its first gradient) are equal.
    return 0.0 if difference == 0 else math.sqrt(difference / max(size, 1e-300))

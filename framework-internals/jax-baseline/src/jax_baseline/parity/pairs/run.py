"""The comparison of a pair, step by step: loss, gradients, state, updates and the optimizer's moments.

Weights, state and batches come from one place: torch's initial values go through a map of names into JAX's. The
controls are torch with rounding noise. In float64 both sides compute in float64 throughout, casts to narrower types
among them. A divergence is located in the forward pass, or attributed to the state or the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from benchkit import UserError
from benchkit.errors import first_line
from jax_baseline.parity.comparison import CONTROL_STEPS, Comparison, Divergence, Verdict, compare, distance
from jax_baseline.parity.location.functions import locate
from jax_baseline.parity.location.updates import LIKELY, UNKNOWN, why_updates_differ
from jax_baseline.parity.pairs.pair import Pair
from jax_baseline.parity.pairs.randomness import require_repeatable_jax, require_repeatable_torch
from jax_baseline.parity.pairs.sides import JaxSide, TorchSide
from jax_baseline.parity.pairs.state import StateNotReturned, difference_of_changes, momentum_of, state_not_returned
from jax_baseline.parity.rounding import Widening, in_torchs_precision
from jax_baseline.user_code import FunctionRaisedError

_JAX_CONTROLS = 3


@dataclass(frozen=True)
class Outcome:
    """What the comparison of a pair in one dtype found."""

    comparison: Comparison  # the comparison
    where: str  # where and probably why the models part; empty if they do not
    # In words, what was computed in float64 in place of a narrower type, or why nothing was. Empty if there is nothing
    # to say.
    widened: str
    state: StateNotReturned  # what torch's steps change and JAX's loss does not return
    narrowest: str  # the narrowest type that either side casts to
    # Why the optimizers differ beyond these steps, by one cause or several; empty if none explains it.
    optimizers: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the models compute the same."""
        return "NO PARITY" if self.state.other or self.optimizers else self.comparison.verdict

    def __str__(self) -> str:
        """The reasons of the verdict in one line."""
        divergence, too_vague = self.comparison.divergence(), self.comparison.too_vague
        parts = [str(divergence)] if divergence else []
        parts += [f"the new value of {name} differs after step 0: {how}" for name, how in self.state.other.items()]
        if self.optimizers:
            parts.append("within bounds on these batches, but the optimizers differ beyond them: by steps or gradients")
        if not parts:
            parts = [f"rounding or chance alone moves {too_vague}" if too_vague else "within bounds"]
        unjudged = self.comparison.unjudged()
        if small := [f"{array.quantity} of {array.parameter}" for array in unjudged if array.negligible]:
            parts.append(f"not judged, because they are almost nothing but rounding: {', '.join(small)}")
        if self.state.equal:
            parts.append(
                f"compared at step 0 only, because JAX's loss does not return them: {', '.join(self.state.equal)}"
            )
        if self.state.unknown:
            parts.append(
                f"not compared: {', '.join(self.state.unknown)}, which torch's steps change: return JAX's as a state, "
                "and map it"
            )
        return "; ".join(parts)


def run(pair: Pair, dtype: str, *, narrowest: str = "float32") -> Outcome:
    """Compare a pair over its batches.

    In ``float64`` casts to narrower types give float64 too. ``narrowest`` is the narrowest type that a side casts to,
    from the outcome in float64: if it has half the bits, the bounds in ``float32`` are for all arrays together.

    Raises:
        UserError: If the parameters do not fit, one side draws random numbers, or a function of the user raises.
    """
    jax.clear_caches()  # JAX keeps a NumPy constant of the loss in the dtype of the mode that traced it first
    with jax.enable_x64(dtype == "float64"), in_torchs_precision():
        if dtype != "float64":
            half = ml_dtypes.finfo(narrowest).bits < 32  # type: ignore[no-untyped-call]
            return _compared(pair, torch.float32, "bfloat16" if half else dtype, widened=False)
        try:
            return _compared(pair, torch.float64, dtype, widened=True)
        except Exception as error:  # a side may ask for its dtype, or bring kernels that take no other
            if isinstance(error, UserError) and not isinstance(error, FunctionRaisedError):
                raise
            reason = first_line(error.__cause__ or error)[:200]
        made = _compared(pair, torch.float64, dtype, widened=False)
        return replace(made, widened=f"casts to narrower types stay, because without them a side raised {reason}")


def _compared(pair: Pair, of_torch: torch.dtype, dtype: str, *, widened: bool) -> Outcome:
    wide = of_torch == torch.float64

    def side(noise: int | None = None, leader: TorchSide | None = None) -> TorchSide:
        widening = Widening(exact=True) if widened else None
        return TorchSide(pair, of_torch, noise=noise, widening=widening, leader=leader)

    of_jax = jnp.float64 if wide else jnp.float32
    widening = Widening() if widened else None
    reference = side()
    leader = None if wide else reference
    candidate = JaxSide(pair, of_jax, widening, leader)
    if wide:
        require_repeatable_torch(side, pair.batches)
        require_repeatable_jax(candidate, pair.batches[0])
    controls = [side(seed, leader=leader) for seed in range(max(3, -(-CONTROL_STEPS // len(pair.batches))))]
    batches: Any = pair.batches
    comparison = compare(batches, reference=reference, candidate=candidate, controls=controls, dtype=dtype)
    text, narrowest = _casts(reference.widening, widening)
    if comparison.divergence() is not None and widening is not None and _brings_along(pair, reference, widening):
        wider = _with_arrays_moved(pair, reference, candidate, len(controls))
        if wider.divergence() is None:
            comparison = wider
            text = "; ".join(
                filter(None, (text, "arrays that a side brings along in a narrower type limit the bounds"))
            )
    state = state_not_returned(reference, candidate, widened=widened)
    divergence = comparison.divergence()
    where = "" if divergence is None else _where(pair, divergence, reference, candidate)
    # Beyond these batches optimizers may differ too, as by a limit that no gradient here reaches.
    cause = _cause_of_update(reference, candidate) if wide and comparison.verdict == "PARITY" else ""
    optimizers = cause if cause.startswith(LIKELY) or ", or " in cause else ""  # of several causes one is true
    return Outcome(comparison, where or optimizers, text, state, narrowest, optimizers)


def _with_arrays_moved(pair: Pair, reference: TorchSide, candidate: JaxSide, count: int) -> Comparison:
    """Compare in float64 with controls that move the arrays a side brings along by their own ε."""
    for side in (reference, candidate):
        side.restart()
    batches: Any = pair.batches
    return compare(
        batches,
        reference=reference,
        candidate=candidate,
        controls=[TorchSide(pair, torch.float64, noise=seed, widening=Widening()) for seed in range(count)],
        controls_of_candidate=[JaxSide(pair, jnp.float64, Widening(seed=seed)) for seed in range(_JAX_CONTROLS)],
        dtype="float64",
    )


def _brings_along(pair: Pair, reference: TorchSide, of_jax: Widening) -> bool:
    """Whether a side has arrays of a narrower type that are no parameters, so that each rounds them on its own."""
    narrow = any(buffer.is_floating_point() and buffer.dtype != torch.float64 for buffer in pair.model.buffers())
    return narrow or of_jax.outside or (reference.widening is not None and reference.widening.outside)


def _casts(of_torch: Widening | None, of_jax: Widening | None) -> tuple[str, str]:
    """Say what was computed in float64 in place of a narrower type; and the narrowest type."""
    sides, types = [], ["float32"]
    for name, widening in (("torch", of_torch), ("JAX", of_jax)):
        places: dict[str, list[str]] = {}
        for dtype, line in widening.casts if widening else ():
            if not line and ml_dtypes.finfo(dtype).bits >= 32:  # type: ignore[no-untyped-call]
                continue  # a counter of an optimizer
            types.append(dtype)
            places.setdefault(dtype, []).append(line or "a line of a library")
        sides += [f"{dtype} of {name} ({_first(lines)})" for dtype, lines in sorted(places.items())]
    narrowest = min(types, key=lambda dtype: ml_dtypes.finfo(dtype).bits)  # type: ignore[no-untyped-call]
    return f"computed in float64 here: {', '.join(sides)}" if sides else "", narrowest


def _first(lines: Sequence[str]) -> str:
    return lines[0] + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")


def _where(pair: Pair, divergence: Divergence, reference: TorchSide, candidate: JaxSide) -> str:
    reference.restart()
    candidate.restart()
    for batch in pair.batches[: divergence.step]:
        reference.step(*batch)
        candidate.step(*batch)
    batch = pair.batches[divergence.step]
    name = divergence.parameter
    if divergence.quantity == "state":
        old = reference.state()
        theirs, ours = (side.step(*batch).state for side in (reference, candidate))
        apart = distance(theirs, ours).of_array
        name = name or max(apart, key=lambda name: apart[name])  # under bounds of all arrays together none is named
        with np.errstate(invalid="ignore"):  # of infinities
            how = difference_of_changes(ours[name], theirs[name], old[name], momentum_of(pair.model, name))
        return f"loss and gradients agree, the new value of {name} differs{': ' * bool(how)}{how}"
    if divergence.quantity in ("weights", "optimizer state"):
        _, moments = (side.step(*batch).moments for side in (reference, candidate))
        if narrow := sorted({str(moment.dtype) for moment in moments.values()} - {"float32", "float64"}):
            return f"gradients agree, and JAX's optimizer keeps its first moments in {', '.join(narrow)}"
        return _where_updates(divergence, reference, candidate)

    def in_torch() -> torch.Tensor:
        with reference.computing():
            return reference.loss(batch)

    with candidate.computing():
        location = locate(in_torch, lambda *given: candidate.loss(*given), candidate.arguments(batch))
    if location.torch or location.jax:
        return str(location)
    if divergence.quantity == "loss":
        return "where they part is not known: each operation of one is computed by the other, and the loss differs"
    of_torch, of_jax = (side.step(*batch).gradients for side in (reference, candidate))
    if unused := [name for name, gradient in of_torch.items() if gradient.any() and not of_jax[name].any()]:
        return (
            f"the forward pass agrees, and JAX's gradient of {', '.join(unused)} is zero: its loss does not depend on "
            "it, or stops the gradient"
        )
    return str(location)


def _where_updates(divergence: Divergence, reference: TorchSide, candidate: JaxSide) -> str:
    name = divergence.parameter
    if divergence.quantity == "optimizer state":
        what = f"gradients and weights agree, the optimizer's {name} differs"
    elif name in reference.optimized():
        what = f"gradients agree, the optimizer's update of {name} differs"
    else:
        return f"gradients agree, the new value of {name} differs, which torch's optimizer does not train"
    cause = _cause_of_update(reference, candidate, divergence.step)
    if not cause and name in reference.without_gradient:
        cause = f"{LIKELY}: torch leaves out a parameter that has no gradient (None); with zeros they agree"
    if not cause and divergence.quantity == "weights":
        return (
            f"the update of {name} differs as its gradient does, within a wide bound: from the same they are the same"
        )
    return f"{what}; {cause or UNKNOWN}"


def _cause_of_update(reference: TorchSide, candidate: JaxSide, step: int = 0) -> str:
    """Run both optimizers on the gradients of torch's model, and on drawn ones; empty if they agree."""
    reference.restart()
    weights = reference.weights()
    gradients = [reference.step(*batch).gradients for batch in reference.pair.batches]
    try:
        with reference.computing(), candidate.computing():
            return why_updates_differ(
                reference.optimizer_of,
                reference.pair.optimizer_of_jax(),
                candidate.with_zeros,
                weights,
                gradients,
                step,
            )
    except Exception as error:  # an optimizer may take gradients of its own model alone, such as sparse ones
        return f"{UNKNOWN}: an optimizer raised {first_line(error)[:200]} on drawn gradients"

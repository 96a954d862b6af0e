"""State beside the parameters: how two changes of it differ, and where JAX computes what its loss does not return.

A training loss may compute new running statistics, as ``apply(…, mutable=["batch_stats"])`` does, and drop them. Then
nothing names them. But the values that torch writes into a buffer have to be among the results of JAX's first step if
both compute the same. And a result that nothing reads, of the buffer's size, computed from an array with the buffer's
old values that is no argument, is JAX's new value of that buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from jax_baseline.parity.location.operations import ARGUMENT, Index, Operation, ancestors, jax_operations
from jax_baseline.parity.pairs.sides import JaxSide, TorchSide

_CLOSE_CHANGE = 1e-6  # of the change that a sentence has to explain
_CLOSE = 1e-13  # part of an array by which two frameworks' float64 may differ in it; 30 times as much is allowed


@dataclass(frozen=True)
class StateNotReturned:
    """What torch's steps change and JAX's loss does not return."""

    equal: tuple[str, ...] = ()  # buffers whose new values JAX's loss computes as torch does
    # In words, by the name of the buffer: what JAX's loss computes instead.
    other: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # what nothing in JAX was compared with


def state_not_returned(reference: TorchSide, candidate: JaxSide, *, widened: bool) -> StateNotReturned:
    """Look for the state after the first step among the operations of JAX's loss, if both sides are in float64."""
    pair = reference.pair
    left = sorted(
        name for name in reference.changed - pair.state_paths().keys() if not _is_unread_counter(pair.model, name)
    )
    if not left or not widened:
        return StateNotReturned(unknown=tuple(left))
    reference.restart()
    candidate.restart()
    old = reference.state()
    reference.step(*pair.batches[0])
    new = reference.state()
    with candidate.computing():
        operations = jax_operations(lambda *given: candidate.loss(*given), candidate.arguments(pair.batches[0]))
    index = Index(
        (value, _CLOSE * float(np.linalg.norm(value))) for operation in operations for value in operation.values
    )
    equal, other = [], {}
    for name in (name for name in left if new[name].size > 1 and np.issubdtype(new[name].dtype, np.floating)):
        wide = new[name].astype(np.float64)
        if index.meets(wide, _CLOSE * float(np.linalg.norm(wide))):
            equal.append(name)
        elif (replaced := _replaced(operations, old[name])) is not None:
            value, at = replaced.values[0].astype(np.float64), f" at {replaced.place}" if replaced.place else ""
            how = difference_of_changes(value, new[name], old[name], momentum_of(pair.model, name))
            other[name] = f"JAX computes it{at} and does not return it{'; ' * bool(how)}{how}"
    unknown = tuple(name for name in left if name not in equal and name not in other)
    return StateNotReturned(tuple(equal), other, unknown)


def _replaced(operations: Sequence[Operation], old: NDArray) -> Operation | None:
    """A result that nothing reads, made from an array with the old values that is no argument."""
    read = {operand for operation in operations for operand in operation.operands}
    for number, operation in enumerate(operations):
        if number in read or not operation.values or operation.name == "input" or operation.values[0].size != old.size:
            continue
        inputs = (operations[of] for of in ancestors(operations, number) if operations[of].name == "input")
        arrays = (of.values[0] for of in inputs if of.place != ARGUMENT)
        if any(np.array_equal(array.ravel(), old.ravel()) for array in arrays):
            return operation
    return None


def momentum_of(model: torch.nn.Module, name: str) -> float | None:
    """The ``momentum`` of the module that a buffer belongs to: torch's part of the new in a running statistic."""
    momentum = getattr(model.get_submodule(name.rpartition(".")[0]), "momentum", None)
    return momentum if isinstance(momentum, float) else None


def _is_unread_counter(model: torch.nn.Module, name: str) -> bool:
    """Whether a buffer is the count of a BatchNorm's batches, which torch reads only if there is no momentum."""
    return name.rpartition(".")[2] == "num_batches_tracked" and momentum_of(model, name) is not None


def difference_of_changes(ours: NDArray, theirs: NDArray, old: NDArray, momentum: float | None) -> str:
    """Say what JAX's new value is beside torch's; empty if neither of two explanations fits.

    ``old`` is the value before, the same in both.
    """
    if ours.shape != theirs.shape:
        return ""
    if (factor := _factor(ours - old, theirs - old)) is not None:
        return f"JAX's changes {factor:.6g} times as far"
    if momentum is None:
        return ""
    kept = (1 - momentum) * old
    factor = _factor(ours - kept, theirs - kept)
    count = 0.0 if factor is None or factor >= 1 else 1 / (1 - factor)
    if count >= 2 and abs(count - round(count)) < _CLOSE_CHANGE * count:
        return f"JAX's has the variance over n = {round(count)}, torch's that over n − 1"
    return ""


def _factor(ours: NDArray, theirs: NDArray) -> float | None:
    """The number by which one array is the other, if there is one."""
    factor = float((ours * theirs).sum() / max(float((theirs * theirs).sum()), 1e-300))
    return factor if np.linalg.norm(ours - factor * theirs) <= _CLOSE_CHANGE * np.linalg.norm(ours) else None

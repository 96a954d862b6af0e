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

from jax_baseline.parity.comparison import Arrays
from jax_baseline.parity.location.operations import ARGUMENT, Index, Operation, jax_operations
from jax_baseline.parity.pairs.pair import Batch
from jax_baseline.parity.pairs.sides import JaxSide

_CLOSE_CHANGE = 1e-6  # of the change that a sentence has to explain
_CLOSE = 1e-13  # part of an array by which two frameworks' float64 may differ in it; 30 times as much is allowed


@dataclass(frozen=True)
class Discarded:
    """What is known of buffers that JAX's loss does not return.

    Attributes:
        equal: Names of the buffers whose new values JAX computes.
        different: By the name of the buffer: where JAX computes another value for it, and this value.
    """

    equal: tuple[str, ...] = ()
    different: Mapping[str, tuple[str, NDArray]] = field(default_factory=dict)


def discarded_state(side: JaxSide, batch: Batch, old: Arrays, new: Arrays) -> Discarded:
    """Look for the state after the first step among the operations of JAX's loss."""
    arguments = side.arguments(batch)
    with side.computing():
        operations = jax_operations(lambda *given: side.loss(*given), arguments)
    index = Index(
        (value, _CLOSE * float(np.linalg.norm(value))) for operation in operations for value in operation.values
    )
    equal: list[str] = []
    different: dict[str, tuple[str, NDArray]] = {}
    for name, value in new.items():
        if value.size < 2 or not np.issubdtype(value.dtype, np.floating):
            continue
        wide = value.astype(np.float64)
        if index.meets(wide, _CLOSE * float(np.linalg.norm(wide))):
            equal.append(name)
        elif (replaced := _replaced(operations, old[name])) is not None:
            different[name] = replaced.place, replaced.values[0]
    return Discarded(tuple(equal), different)


def _replaced(operations: Sequence[Operation], old: NDArray) -> Operation | None:
    """A result that nothing reads, made from an array with the old values that is no argument."""
    read = {operand for operation in operations for operand in operation.operands}
    for number, operation in enumerate(operations):
        if number in read or not operation.values or operation.name == "input" or operation.values[0].size != old.size:
            continue
        for ancestor in _inputs(operations, number):
            value = operations[ancestor].values[0]
            if operations[ancestor].place != ARGUMENT and np.array_equal(value.ravel(), old.ravel()):
                return operation
    return None


def _inputs(operations: Sequence[Operation], number: int) -> set[int]:
    """The arrays from outside that a result is computed from."""
    reached, waiting = set(), [number]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            waiting += operations[current].operands
    return {number for number in reached if operations[number].name == "input"}


def momentum_of(model: torch.nn.Module, name: str) -> float | None:
    """The ``momentum`` of the module that a buffer belongs to: torch's part of the new in a running statistic."""
    momentum = getattr(model.get_submodule(name.rpartition(".")[0]), "momentum", None)
    return momentum if isinstance(momentum, float) else None


def is_unread_counter(model: torch.nn.Module, name: str) -> bool:
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

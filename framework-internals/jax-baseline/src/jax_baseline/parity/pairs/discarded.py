"""State that JAX's loss computes and does not return: looked for among the results of its operations, by value.

A training loss may compute new running statistics, as ``apply(…, mutable=["batch_stats"])`` does, and drop them. Then
nothing names them. But the values that torch writes into a buffer have to be among the results of JAX's first step if
both compute the same. And a result that nothing reads, of the buffer's size, computed from an array with the buffer's
old values that is no argument, is JAX's new value of that buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jax_baseline.parity.comparison import Arrays
from jax_baseline.parity.location.matching import Index
from jax_baseline.parity.location.operations import ARGUMENT, Operation, jax_operations
from jax_baseline.parity.pairs.pair import Batch
from jax_baseline.parity.pairs.sides import JaxSide

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
    index = Index((value, _CLOSE * float(np.linalg.norm(value))) for one in operations for value in one.values)
    equal: list[str] = []
    different: dict[str, tuple[str, NDArray]] = {}
    for name, value in new.items():
        if value.size < 2 or not np.issubdtype(value.dtype, np.floating):
            continue
        wide = value.astype(np.float64)
        if index.meets(wide, _CLOSE * float(np.linalg.norm(wide))):
            equal.append(name)
        elif (found := _replaced(operations, old[name])) is not None:
            different[name] = found.place, found.values[0]
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
    return {one for one in reached if operations[one].name == "input"}

"""Runs what follows a changed operation of torch again, and compares what comes out with what JAX computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from jax_baseline.parity.location.matching import Index
from jax_baseline.parity.location.operations import Operation, array
from jax_baseline.parity.location.variants import other_divisions, other_maskings

_INTEGER = ("div", "floor_divide", "remainder", "fmod")
_MASKS = ("masked_fill", "masked_fill_", "where", "add")
_AFTER = 64  # operations that are run again at most
_NEAR = 12  # operations after a table that may join it with the features


def changed_before(operation: Operation, ours: Sequence[Operation], index: Index) -> Iterator[str]:
    """Changes of an operation that precedes ``operation``, after which JAX computes it or what follows from it.

    ``index`` has the results of JAX that torch does not compute.
    """
    target = _number_of(operation, ours)
    for number in sorted(_ancestors(target, ours)):
        call, name = ours[number].call, ours[number].name
        if call is None or name not in (*_INTEGER, *_MASKS):
            continue
        for words, value in other_divisions(call) if name in _INTEGER else other_maskings(call):
            if _met_after(number, value, target, ours, index):
                yield words


def other_rotation(operation: Operation, ours: Sequence[Operation], index: Index) -> Iterator[str]:
    """Rotary embeddings that pair neighbouring features instead of halves, or halves instead of neighbours."""
    target = _number_of(operation, ours)
    # The first difference may be a table of cosines, which meets the features in an operation that follows.
    joined = {one for later in _dependents(target, ours)[:_NEAR] for one in _ancestors(later, ours)}
    before = joined - {target, *_dependents(target, ours)}
    for number in sorted(before, reverse=True)[:_AFTER]:
        if not ours[number].values or ours[number].values[0].ndim < 2 or ours[number].values[0].shape[-1] % 2:
            continue
        x = torch.from_numpy(ours[number].values[0].copy())
        count = x.shape[-1]
        apart = torch.cat([torch.arange(0, count, 2), torch.arange(1, count, 2)])
        for words, order in (
            ("rotary pairs of neighbouring features instead of halves", apart),
            ("rotary pairs of halves instead of neighbouring features", apart.argsort()),
        ):
            back = order.argsort()
            for later, value in _replayed(number, x[..., order], ours):
                if later < target or not value.is_floating_point() or value.shape[-1:] != x.shape[-1:]:
                    continue
                moved = value[..., back]
                if not _same_numbers(moved, x) and index.meets(array(moved), _stray(ours[later])):
                    yield words
                    return


def _met_after(number: int, value: torch.Tensor, target: int, ours: Sequence[Operation], index: Index) -> bool:
    return any(
        index.meets(array(found), _stray(ours[later]))
        for later, found in ((number, value), *_replayed(number, value, ours))
        if later >= target and found.is_floating_point() and ours[later].values
    )


def followed(operation: Operation, value: torch.Tensor, ours: Sequence[Operation], index: Index) -> bool:
    """Whether JAX computes something that follows from another result of an operation too; true if nothing does.

    A part of what JAX computes instead, such as the sigmoid in its SiLU, may be another operation of torch by accident.
    """
    number, tested = _number_of(operation, ours), False
    for later, found in _replayed(number, value.reshape(operation.values[0].shape), ours):
        if not found.is_floating_point() or not ours[later].values or _same_numbers(found, value):
            continue
        if index.meets(array(found), _stray(ours[later])):
            return True
        tested = True
    return not tested


def _replayed(number: int, value: torch.Tensor, ours: Sequence[Operation]) -> Iterator[tuple[int, torch.Tensor]]:
    """Run the operations that depend on a changed result again, in order."""
    results: dict[int, list[torch.Tensor]] = {number: [value]}
    for later in range(number + 1, min(len(ours), number + 1 + _AFTER)):
        call = ours[later].call
        if call is None:
            continue
        changes = {}
        for position, source in call.sources.items():
            if source in results:
                made = results[source]
                changes[position] = made[min(_which(call.leaves[position], ours[source]), len(made) - 1)]
        if changes and (found := call.results(changes)):
            results[later] = found
            yield later, found[0]


def _which(leaf: torch.Tensor, source: Operation) -> int:
    """Which result of an operation a tensor is."""
    if len(source.values) < 2:
        return 0
    given = array(leaf)
    same = (one.shape == given.shape and bool((one == given).all()) for one in source.values)
    return next((number for number, equal in enumerate(same) if equal), 0)


def _dependents(target: int, ours: Sequence[Operation]) -> list[int]:
    """The operations that depend on one, itself first, in order."""
    found = [target]
    for later in range(target + 1, len(ours)):
        if not set(found).isdisjoint(ours[later].operands):
            found.append(later)
    return found


def _ancestors(target: int, ours: Sequence[Operation]) -> set[int]:
    found, pending = {target}, [target]
    while pending:
        for operand in ours[pending.pop()].operands:
            if operand not in found:
                found.add(operand)
                pending.append(operand)
    return found


def _number_of(operation: Operation, ours: Sequence[Operation]) -> int:
    return next(number for number, one in enumerate(ours) if one is operation)


def _stray(operation: Operation) -> float:
    return operation.stray[0] if operation.stray else 0.0


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten().sort()[0], other.flatten().sort()[0])

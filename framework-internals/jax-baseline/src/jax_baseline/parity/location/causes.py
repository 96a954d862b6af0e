"""What makes two functions agree: torch's first wrong operation is run again in other ways, until JAX computes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from jax_baseline.parity.location.operations import TIMES, Call, Index, Operation, array, arrays
from jax_baseline.parity.location.variants import DIVISIONS, MASKINGS, Variants, other_operations, variants

_PRODUCTS = ("mm", "addmm", "linear")
_AFTER = 64  # operations that are run again at most
_NEAR = 12  # operations after a table that may join it with the features


def likely_cause(
    of_torch: Operation | None,
    of_jax: Operation | None,
    ours: Sequence[Operation],
    theirs: Sequence[Operation],
    alone: Sequence[Operation],
) -> str:
    """Say what makes two functions agree; empty if nothing that is tried does.

    Only the operations of JAX whose result torch does not compute, ``alone``, are evidence for a change: one that
    undoes the operation gives its operand, which JAX computes in any case.
    """
    if of_torch is None or of_torch.call is None:
        return ""
    if "dropout" in of_torch.name or "bernoulli" in of_torch.name:
        return "dropout is active in torch; call eval()"
    index = Index(arrays(alone))
    constants = () if of_jax is None else of_jax.constants
    changes_by_name: dict[str, str] = {}  # by what is changed: another value of the same argument is no other cause
    for change, value in variants(of_torch.call, constants):
        if index.meets(array(value), of_torch.stray[0]) and _followed(of_torch, value, ours, index):
            changes_by_name.setdefault(change.partition("=")[0], change)
    if not changes_by_name:  # what is moved to another place is followed by other operations
        changes_by_name = {
            change: change
            for change, value in _before_the_product(of_torch, ours)
            if index.meets(array(value), of_torch.stray[0])
        }
    if not changes_by_name:
        changes = (*_changed_before(of_torch, ours, index), *_other_rotation(of_torch, ours, index))
        changes_by_name = {change: change for change in changes}
    if changes_by_name:
        return f"with {' or '.join(changes_by_name.values())} in torch they agree"
    if _fixed_statistics(of_torch.call, alone):
        return "JAX normalises with fixed statistics (training=False), torch with those of the batch"
    if _smoothing_left_out(of_torch, ours, Index(arrays(theirs))):
        return "without label smoothing in torch they agree"
    if _left_out(of_torch, ours, index):
        return "JAX computes what follows without this operation: it is left out or elsewhere"
    return ""


def _fixed_statistics(call: Call, alone: Sequence[Operation]) -> bool:
    """Whether JAX computes a · x + b by channel, with a mean that is not the one of a normalised batch.

    The last such array counts: what leads to a normalised batch need not be centred.
    """
    asked = call.arguments()
    if call.name != "native_batch_norm" or not asked["training"]:
        return False
    x = array(asked["input"])
    rows = _by_channel(x)
    centred = rows - rows.mean(1, keepdims=True)
    bias = np.zeros(len(rows)) if asked["bias"] is None else array(asked["bias"])
    weight = np.ones(len(rows)) if asked["weight"] is None else array(asked["weight"])
    fixed = False
    for value, stray in arrays(alone):
        orders = itertools.permutations(range(value.ndim)) if value.size == x.size and value.ndim == x.ndim else ()
        for turned in (value.transpose(order) for order in orders):
            if turned.shape != x.shape:
                continue
            y = _by_channel(turned)
            slope, mean = (centred * y).sum(1) / (centred**2).sum(1), y.mean(1)
            left = y - mean[:, None] - slope[:, None] * centred
            allowed = max(TIMES * stray, 1e-12 * float(np.linalg.norm(y)))
            if np.linalg.norm(left) > allowed:
                continue
            unnormalised = np.allclose(slope, weight) and np.allclose(mean - slope * rows.mean(1), bias)
            fixed = not np.allclose(mean, bias, atol=1e-5) and not unnormalised
    return fixed


def _by_channel(x: NDArray) -> NDArray:
    return np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)


def _smoothing_left_out(operation: Operation, ours: Sequence[Operation], index: Index) -> bool:
    """Whether JAX computes the cross-entropy that torch smooths, and not the sum over classes that it adds."""
    if not any(ours[number].name == "_log_softmax" for number in operation.operands):
        return False
    losses = (other for other in ours if other.name == "nll_loss_forward" and other is not operation)
    return any(other.place == operation.place and index.meets(other.values[0], other.stray[0]) for other in losses)


def _before_the_product(operation: Operation, ours: Sequence[Operation]) -> Variants:
    """A gate that multiplies the operand of a matrix product instead of its result."""
    call = operation.call
    if call is None or operation.name not in ("mul", "mul_") or len(call.sources) != 2:
        return
    positions = list(call.sources)
    for own, other in (positions, positions[::-1]):
        product = _product_behind(call.sources[other], ours)
        gate = call.leaves[own]
        for leaf in () if product is None else product.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.shape == gate.shape:
                yield "the multiplication before the matrix product", gate * leaf


def _product_behind(number: int, ours: Sequence[Operation]) -> Call | None:
    """The matrix product that a result is a part of."""
    while ours[number].name not in _PRODUCTS:
        call = ours[number].call
        if call is None or len(call.sources) != 1:
            return None
        (number,) = call.sources.values()
    return ours[number].call


def _left_out(operation: Operation, ours: Sequence[Operation], index: Index) -> bool:
    """Whether what follows an operation is computed in JAX from an operand of the operation instead."""
    assert operation.call is not None
    start = next(number for number, one in enumerate(ours) if one is operation)
    for position in operation.call.sources:
        operand = operation.call.leaves[position]
        if operand.numel() != operation.values[0].size:
            continue
        results = {start: operand.reshape(operation.values[0].shape)}
        for number in range(start + 1, len(ours)):
            call = ours[number].call
            changes = {} if call is None else {p: results[one] for p, one in call.sources.items() if one in results}
            if call is None or not changes or not ours[number].values:
                continue
            result = call.again(changes)
            if result is None:
                break
            if result.numel() == operand.numel() and torch.equal(
                *(one.flatten().sort()[0] for one in (result, operand))
            ):
                results[number] = result  # the same numbers in another order: no evidence
            elif index.meets(array(result), ours[number].stray[0]):
                return True
            else:
                break
    return False


def _changed_before(operation: Operation, ours: Sequence[Operation], index: Index) -> Iterator[str]:
    """Changes of an operation that precedes ``operation``, after which JAX computes it or what follows from it.

    ``index`` has the results of JAX that torch does not compute.
    """
    target = _number_of(operation, ours)
    for number in sorted(_ancestors(target, ours)):
        call = ours[number].call
        if call is None or call.name not in (*DIVISIONS, *MASKINGS):
            continue
        for words, value in other_operations(call):
            if _met_after(number, value, target, ours, index):
                yield words


def _other_rotation(operation: Operation, ours: Sequence[Operation], index: Index) -> Iterator[str]:
    """Rotary embeddings that pair neighbouring features instead of halves, or halves instead of neighbours."""
    target = _number_of(operation, ours)
    # The first difference may be a table of cosines, which meets the features in an operation that follows.
    joined = {ancestor for later in _dependents(target, ours)[:_NEAR] for ancestor in _ancestors(later, ours)}
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
        index.meets(array(result), _stray(ours[later]))
        for later, result in ((number, value), *_replayed(number, value, ours))
        if later >= target and result.is_floating_point() and ours[later].values
    )


def _followed(operation: Operation, value: torch.Tensor, ours: Sequence[Operation], index: Index) -> bool:
    """Whether JAX computes something that follows from another result of an operation too; true if nothing does.

    A part of what JAX computes instead, such as the sigmoid in its SiLU, may be another operation of torch by accident.
    """
    number, tested = _number_of(operation, ours), False
    for later, result in _replayed(number, value.reshape(operation.values[0].shape), ours):
        if not result.is_floating_point() or not ours[later].values or _same_numbers(result, value):
            continue
        if index.meets(array(result), _stray(ours[later])):
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
        if changes and (tensors := call.results(changes)):
            results[later] = tensors
            yield later, tensors[0]


def _which(leaf: torch.Tensor, source: Operation) -> int:
    """Which result of an operation a tensor is."""
    if len(source.values) < 2:
        return 0
    given = array(leaf)
    same = (result.shape == given.shape and bool((result == given).all()) for result in source.values)
    return next((number for number, equal in enumerate(same) if equal), 0)


def _dependents(target: int, ours: Sequence[Operation]) -> list[int]:
    """The operations that depend on one, itself first, in order."""
    dependents = [target]
    for later in range(target + 1, len(ours)):
        if not set(dependents).isdisjoint(ours[later].operands):
            dependents.append(later)
    return dependents


def _ancestors(target: int, ours: Sequence[Operation]) -> set[int]:
    reached, pending = {target}, [target]
    while pending:
        for operand in ours[pending.pop()].operands:
            if operand not in reached:
                reached.add(operand)
                pending.append(operand)
    return reached


def _number_of(operation: Operation, ours: Sequence[Operation]) -> int:
    return next(number for number, candidate in enumerate(ours) if candidate is operation)


def _stray(operation: Operation) -> float:
    return operation.stray[0] if operation.stray else 0.0


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten().sort()[0], other.flatten().sort()[0])

"""Where two functions, one in torch and one in JAX, begin to differ: the first operation, and its likely cause.

Both functions run operation by operation, once as they are and a few times with rounding noise. An operation is *met*
if the other side computes the same array somewhere, in any order of the axes and with any division into axes, up to
what the noise does there. An operation is right if it is met, or if something that is computed from it is: frameworks
divide a formula in different ways. The first operation that is not right is where the functions part. A cause is found
by trying: torch's operation is run again in other ways, until JAX computes its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jax_baseline.parity.location.operations import (
    TIMES,
    Call,
    Index,
    Operation,
    ancestors,
    array,
    arrays,
    finite,
    recorded_jax,
    recorded_torch,
)
from jax_baseline.parity.location.variants import DIVISIONS, LOSSES, MASKINGS, Variants, other_operations, variants
from jax_baseline.parity.rounding import WHOLE

_CARRIES = ("lift_fresh", "_to_copy", "detach", "clone", "alias", "view", "t", "transpose", "permute", "expand")
_BY_SHAPE = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")  # read no numbers
_PRODUCTS = ("mm", "addmm", "linear")
_AFTER = 64  # operations that are run again at most
_MUCH = 10.0  # times the noise of one side: the other's loses more than its order of operations explains
_NEAR = 12  # operations after a table that may join it with the features


@dataclass(frozen=True)
class Location:
    """Where two functions part."""

    torch: str  # the first operation of torch that JAX does not compute; empty if there is none
    jax: str  # the first operation of JAX that torch does not compute; empty if there is none
    cause: str  # what makes the two equal, where that was found

    def __str__(self) -> str:
        sides = [f"{name} computes {where}" for name, where in (("torch", self.torch), ("JAX", self.jax)) if where]
        if not sides:
            return "all operations of the forward pass agree: the backward pass differs"
        cause = f"likely cause: {self.cause}" if self.cause else "cause not identified"
        return f"first difference: {', '.join(sides)}; {cause}"


def locate(torch_run: Callable[[], Any], jax_function: Callable[..., Any], jax_arguments: Sequence[Any]) -> Location:
    """Find the first operation in which two functions differ."""
    with torch.no_grad(), np.errstate(all="ignore"):
        with torch.enable_grad():  # a function may differentiate, such as the loss of a differential equation
            of_torch = recorded_torch(torch_run)
        of_jax = recorded_jax(jax_function, jax_arguments)
        # What is more than the rounding of both sides comes first: a side that rounds more may hide nothing else.
        for exact in (False, True):
            met_torch, met_jax = _met(of_torch, of_jax, exact), _met(of_jax, of_torch, exact)
            first_torch, first_jax = _first_wrong(of_torch, met_torch), _first_wrong(of_jax, met_jax)
            if first_torch is not None or first_jax is not None:
                break
        if exact:
            cause = _precisions(first_torch, of_jax, "JAX") or _precisions(first_jax, of_torch, "torch")
            cause = cause or _cancellation(of_torch, of_jax)
        else:
            alone = [operation for operation, met in zip(of_jax, met_jax, strict=True) if not met]
            cause = _likely_cause(first_torch, first_jax, of_torch, of_jax, alone)
    unseen = ", whose inside is not compared" if first_jax is not None and first_jax.name in WHOLE else ""
    return Location(str(first_torch or ""), f"{first_jax or ''}{unseen}", cause)


def _met(mine: list[Operation], theirs: list[Operation], exact: bool) -> list[bool]:
    index = Index(arrays(theirs), exact=exact)
    return [bool(operation.values) and index.meets(operation.values[0], operation.stray[0]) for operation in mine]


def _first_wrong(mine: list[Operation], met: Sequence[bool]) -> Operation | None:
    right = list(met)
    for operation in reversed(mine):
        if right[operation.number] and operation.name not in _BY_SHAPE:
            for operand in operation.operands:
                right[operand] = True
    for operation in mine:  # what carries right numbers, such as what autograd keeps, has them too
        if operation.name in _CARRIES and operation.operands and all(right[number] for number in operation.operands):
            right[operation.number] = True
    brought: set[int] = set()  # inputs, and what only carries them
    for operation in mine:
        if operation.name == "input" or (operation.name in _CARRIES and brought.issuperset(operation.operands)):
            brought.add(operation.number)
    # Operations without floating results, constants, and one repeated number are neither right nor wrong.
    wrong = {
        operation.number
        for operation in mine
        if operation.number not in brought and operation.values and not right[operation.number]
        if np.ptp(finite(operation.values[0])) > 0 or (operation.values[0].size == 1 and operation.operands)
    }
    firsts = [number for number in sorted(wrong) if not wrong & set(mine[number].operands)]
    # A table that one side computes and the other has as a constant starts from nothing that both have.
    after = [number for number in firsts if any(right[operand] for operand in mine[number].operands)]
    return next((mine[number] for number in (*after, *firsts)), None)


def _precisions(first: Operation | None, others: list[Operation], name: str) -> str:
    """Name the narrower dtype in which the other side computes an operation, which agrees up to its rounding."""
    if first is None:
        return ""
    value, stray = first.values[0], first.stray[0]
    for other in others:
        if not other.values or other.values[0].dtype.itemsize >= value.dtype.itemsize:
            continue
        if Index([(other.values[0], other.stray[0])]).meets(value, stray):
            return (
                f"the dtype, {name} computes it in {other.values[0].dtype} at {other.place}: up to rounding they agree"
            )
    return ""


def _cancellation(of_torch: list[Operation], of_jax: list[Operation]) -> str:
    """Name the side whose last result the noise moves much more; empty if there is none."""
    last = {
        name: next((operation.stray[0] for operation in reversed(operations) if operation.values), 0.0)
        for name, operations in (("torch", of_torch), ("JAX", of_jax))
    }
    less, more = sorted(last, key=last.__getitem__)
    if not 0 < _MUCH * last[less] < last[more]:
        return ""
    return (
        f"rounding, which one unit in the last place of each operand moves by {last[more]:.0e} in {more} and by "
        f"{last[less]:.0e} in {less}: {more}'s formula loses digits, as E[x²] − E[x]² does for a variance"
    )


def _likely_cause(
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
    trial = _Trial(of_torch, ours, theirs, alone)
    if changes := trial.changes(() if of_jax is None else of_jax.constants):
        return f"with {' or '.join(changes)} in torch they agree"
    if _fixed_statistics(of_torch.call, alone):
        return "JAX normalises with fixed statistics (training=False), torch with those of the batch"
    if _smoothing_left_out(of_torch, ours, Index(arrays(theirs))):
        return "without label smoothing in torch they agree"
    if trial.is_left_out():
        return "JAX computes what follows without this operation: it is left out or elsewhere"
    return ""


class _Trial:
    """Runs torch's operations again with a change at or before ``first``, and looks for the results in JAX.

    ``alone`` are the operations of JAX, among ``theirs``, whose result torch does not compute.
    """

    def __init__(
        self,
        first: Operation,
        operations: Sequence[Operation],
        theirs: Sequence[Operation],
        alone: Sequence[Operation],
    ) -> None:
        self._first, self._operations = first, operations
        read = {operand for operation in theirs for operand in operation.operands}
        self._index = Index(arrays(alone))
        self._results = Index(arrays(operation for operation in alone if operation.number not in read))

    def changes(self, constants: Sequence[float]) -> list[str]:
        """The changes, in words, after which JAX computes the same; those of the operation itself first."""
        assert self._first.call is not None
        if found := self._explaining(self._first.number, variants(self._first.call, constants)):
            return found
        # What is moved to another place is followed by other operations.
        moved = [change for change, value in self._before_the_product() if self._meets(self._first.number, value)]
        elsewhere = (*self._changed_before(), *self._changed_loss(constants), *self._other_rotation())
        return list(dict.fromkeys(moved or elsewhere))

    def _explaining(self, number: int, tried: Variants) -> list[str]:
        """The changes of an operation after which JAX computes the same."""
        by_argument: dict[str, str] = {}  # another value of the same argument is no other cause
        for change, value in tried:
            if self._explains(number, value):
                by_argument.setdefault(change.partition("=")[0], change)
        return list(by_argument.values())

    def is_left_out(self) -> bool:
        """Whether what follows the operation is computed in JAX from an operand of the operation instead."""
        assert self._first.call is not None
        shape = self._first.values[0].shape
        for operand in map(self._first.call.leaves.__getitem__, self._first.call.sources):
            if operand.numel() != self._first.values[0].size:
                continue
            nearest = itertools.islice(self._evidence(self._first.number, operand.reshape(shape)), 2)
            met = [self._meets(number, result) for number, result in nearest]
            if met and all(met):  # one alone may be another part of JAX's formula
                return True
        return False

    def _meets(self, number: int, value: torch.Tensor) -> bool:
        if value.numel() == 1 and not (value.isfinite() and value):  # 0 and ∞ have many causes
            return False
        stray = self._operations[number].stray
        return self._index.meets(array(value), stray[0] if stray else 0.0)

    def _explains(self, number: int, value: torch.Tensor) -> bool:
        """Whether JAX computes another result of an operation and what follows, or returns it if nothing follows.

        A part of what JAX computes instead, such as the sigmoid in its SiLU or the sum in its mean, may be another
        operation of torch by accident.
        """
        given = self._operations[number].values[0]
        if value.numel() != given.size or not self._meets(number, value):
            return False
        follows = self._evidence(number, value.reshape(given.shape))
        if (nearest := next(follows, None)) is None:
            return self._results.meets(array(value), self._operations[number].stray[0])
        return any(self._meets(*result) for result in itertools.chain([nearest], follows))

    def _evidence(self, number: int, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """What follows from a changed result, without the same numbers in another order."""
        for later, result in self._replayed(number, value):
            known = result.is_floating_point() and self._operations[later].values
            if known and not _same_numbers(result, value):
                yield later, result

    def _before_the_product(self) -> Variants:
        """A gate that multiplies the operand of a matrix product instead of its result."""
        call = self._first.call
        if call is None or self._first.name not in ("mul", "mul_") or len(call.sources) != 2:
            return
        positions = list(call.sources)
        for own, other in (positions, positions[::-1]):
            product = self._product_behind(call.sources[other])
            gate = call.leaves[own]
            for leaf in () if product is None else product.leaves:
                if isinstance(leaf, torch.Tensor) and leaf.shape == gate.shape:
                    yield "the multiplication before the matrix product", gate * leaf

    def _product_behind(self, number: int) -> Call | None:
        """The matrix product that a result is a part of."""
        while self._operations[number].name not in _PRODUCTS:
            call = self._operations[number].call
            if call is None or len(call.sources) != 1:
                return None
            (number,) = call.sources.values()
        return self._operations[number].call

    def _changed_before(self) -> Iterator[str]:
        """Changes of an operation that precedes the first, after which JAX computes it or what follows from it."""
        for number in sorted(ancestors(self._operations, self._first.number)):
            call = self._operations[number].call
            if call is None or call.name not in (*DIVISIONS, *MASKINGS):
                continue
            for words, value in other_operations(call):
                results = ((number, value), *self._replayed(number, value))
                if any(
                    later >= self._first.number
                    and result.is_floating_point()
                    and self._operations[later].values
                    and self._meets(later, result)
                    for later, result in results
                ):
                    yield words

    def _changed_loss(self, constants: Sequence[float]) -> Iterator[str]:
        """Changes of the first or of the loss that reads it, where JAX may compute no logarithms of a softmax."""
        assert self._first.call is not None
        for number in self._dependents(self._first.number):
            call = self._operations[number].call
            if call is not None and call.name in LOSSES:
                yield from self._explaining(number, variants(call, ()))
                of_first = (
                    (words, result)
                    for words, value in variants(self._first.call, constants)
                    for later, result in self._replayed(self._first.number, value)
                    if later == number
                )
                yield from self._explaining(number, of_first)

    def _other_rotation(self) -> Iterator[str]:
        """Rotary embeddings that pair neighbouring features instead of halves, or halves instead of neighbours."""
        first = self._first.number
        # The first difference may be a table of cosines, which meets the features in an operation that follows.
        dependents = self._dependents(first)
        joined = set[int]().union(*(ancestors(self._operations, later) for later in dependents[:_NEAR]))
        for number in sorted(joined.difference(dependents), reverse=True)[:_AFTER]:
            values = self._operations[number].values
            if not values or values[0].ndim < 2 or values[0].shape[-1] % 2:
                continue
            x = torch.from_numpy(values[0].copy())
            apart = torch.cat([torch.arange(start, x.shape[-1], 2) for start in (0, 1)])
            for words, order in (
                ("rotary pairs of neighbouring features instead of halves", apart),
                ("rotary pairs of halves instead of neighbouring features", apart.argsort()),
            ):
                for later, value in self._replayed(number, x[..., order]):
                    if later < first or not value.is_floating_point() or value.shape[-1:] != x.shape[-1:]:
                        continue
                    moved = value[..., order.argsort()]
                    if _is_rotation(x, moved) and self._meets(later, moved):
                        yield words
                        return

    def _replayed(self, number: int, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Run the operations that depend on a changed result again, in order."""
        results: dict[int, list[torch.Tensor]] = {number: [value.clone()]}
        for operation in self._operations[number + 1 : number + 1 + _AFTER]:
            call = operation.call
            if call is None:
                continue
            changes = {}
            for position, source in call.sources.items():
                if source in results:
                    made = results[source]
                    which = _which(call.leaves[position], self._operations[source])
                    changes[position] = made[min(which, len(made) - 1)]
            if changes and (tensors := call.results(changes)):
                results[operation.number] = tensors
                yield operation.number, tensors[0]

    def _dependents(self, number: int) -> list[int]:
        """The operations that depend on one, itself first, in order."""
        dependents = [number]
        for later in self._operations[number + 1 :]:
            if not set(dependents).isdisjoint(later.operands):
                dependents.append(later.number)
        return dependents


def _which(leaf: torch.Tensor, source: Operation) -> int:
    """Which result of an operation a tensor is."""
    if len(source.values) < 2:
        return 0
    given = array(leaf)
    same = (result.shape == given.shape and bool((result == given).all()) for result in source.values)
    return next((number for number, equal in enumerate(same) if equal), 0)


def _is_rotation(x: torch.Tensor, turned: torch.Tensor) -> bool:
    """Whether other numbers have the lengths of the same rows, up to one factor."""
    if _same_numbers(x, turned) or x.numel() != turned.numel():
        return False
    lengths = [rows.double().flatten(0, -2).norm(dim=-1).sort()[0] for rows in (x, turned)]
    return torch.allclose(*(length / length.norm() for length in lengths))


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten().sort()[0], other.flatten().sort()[0])


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

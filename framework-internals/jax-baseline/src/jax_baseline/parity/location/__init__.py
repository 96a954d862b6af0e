"""Where two functions, one in torch and one in JAX, begin to differ: the first operation, and its likely cause.

Both functions run operation by operation, once as they are and a few times with rounding noise. An operation is *met*
if the other side computes the same array somewhere, in any order of the axes and with any division into axes, up to
what the noise does there. An operation is right if it is met, or if something that is computed from it is: frameworks
divide a formula in different ways. The first operation that is not right is where the functions part. A cause is found
by trying: the operation is repeated in another way until it is met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_baseline.parity.location.causes import likely_cause
from jax_baseline.parity.location.operations import Index, Operation, arrays, finite, recorded_jax, recorded_torch

_CARRIES = ("lift_fresh", "_to_copy", "detach", "clone", "alias", "view", "t", "transpose", "permute", "expand")


@dataclass(frozen=True)
class Location:
    """Where two functions part.

    Attributes:
        torch: The first operation of torch that JAX does not compute; empty if there is none.
        jax: The first operation of JAX that torch does not compute; empty if there is none.
        cause: What makes the two equal, where that was found.
    """

    torch: str
    jax: str
    cause: str

    def __str__(self) -> str:
        sides = [f"{name} computes {where}" for name, where in (("torch", self.torch), ("JAX", self.jax)) if where]
        if not sides:
            return "all operations of the forward pass agree: the backward pass differs"
        cause = f"likely cause: {self.cause}" if self.cause else "cause not identified"
        return f"first difference: {', '.join(sides)}; {cause}"


def locate(torch_run: Callable[[], Any], jax_function: Callable[..., Any], jax_arguments: Sequence[Any]) -> Location:
    """Find the first operation in which two functions differ."""
    with np.errstate(all="ignore"):
        of_torch, of_jax = recorded_torch(torch_run), recorded_jax(jax_function, jax_arguments)
        # What is more than the rounding of both sides comes first: a side that rounds more may hide nothing else.
        for exact in (False, True):
            met_torch, met_jax = _met(of_torch, of_jax, exact), _met(of_jax, of_torch, exact)
            first_torch, first_jax = _first_wrong(of_torch, met_torch), _first_wrong(of_jax, met_jax)
            if first_torch is not None or first_jax is not None:
                break
        if exact:
            cause = _precisions(first_torch, of_jax, "JAX") or _precisions(first_jax, of_torch, "torch")
        else:
            alone = [operation for operation, met in zip(of_jax, met_jax, strict=True) if not met]
            cause = likely_cause(first_torch, first_jax, of_torch, of_jax, alone)
    return Location(str(first_torch or ""), str(first_jax or ""), cause)


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


def _met(mine: list[Operation], theirs: list[Operation], exact: bool) -> list[bool]:
    index = Index(arrays(theirs), exact=exact)
    return [bool(operation.values) and index.meets(operation.values[0], operation.stray[0]) for operation in mine]


def _first_wrong(mine: list[Operation], met: Sequence[bool]) -> Operation | None:
    right = list(met)
    for number in reversed(range(len(mine))):
        if right[number]:
            for operand in mine[number].operands:
                right[operand] = True
    brought: set[int] = set()  # inputs, and what only carries them
    for number, operation in enumerate(mine):
        if operation.name == "input" or (operation.name in _CARRIES and brought.issuperset(operation.operands)):
            brought.add(number)
    # Operations without floating results, constants, and one repeated number are neither right nor wrong.
    wrong = {
        number
        for number, operation in enumerate(mine)
        if number not in brought and operation.values and not right[number]
        if _is_scalar(operation) or _varies(operation)
    }
    firsts = [number for number in sorted(wrong) if not wrong & set(mine[number].operands)]
    # A table that one side computes and the other has as a constant starts from nothing that both have.
    after = [number for number in firsts if any(right[operand] for operand in mine[number].operands)]
    return next((mine[number] for number in (*after, *firsts)), None)


def _is_scalar(operation: Operation) -> bool:
    return operation.values[0].size == 1 and bool(operation.operands)


def _varies(operation: Operation) -> bool:
    return bool(np.ptp(finite(operation.values[0])) > 0)

"""Conditions on what becomes of a value: arithmetic, text, a size. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compile_bench.catalogue.conditions.condition import Condition, condition, with_arguments
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, UsedAs, name_of, nodes_of


def _ways(names: Sequence[str]) -> tuple[frozenset[UsedAs], str]:
    """The ways with these names, and the ways in words."""
    ways = [UsedAs[name.upper()] for name in names]
    return frozenset(ways), " or ".join(way.value for way in ways)


@with_arguments
def only(*ways: str, of: Sequence[str] = (), text: str = "") -> Condition:
    """The value of the calls named ``of``, of what broke, or of what the guard checked is used in these ways alone."""
    accepted, words = _ways(ways)

    def holds(use: Use) -> bool:
        calls = use.calls(*of) if of else []
        if of and not calls:
            return False
        used = frozenset[UsedAs]().union(*(use.used_as(call) for call in calls)) if of else use.used_as()
        return bool(used) and used <= accepted

    return Condition(text or f"it is used only as {words}", holds)


@with_arguments
def never(*ways: str, of: Sequence[str] = ()) -> Condition:
    """The value is used, but in none of these ways; see :func:`only`."""
    excluded, words = _ways(ways)
    return only(*(way.name for way in UsedAs if way not in excluded), of=of, text=f"it is not used as {words}")


@condition("the number goes into arithmetic with tensors only: not into text, range(), an index, a condition or a list")
def arithmetic(use: Use) -> bool:
    return only("arithmetic").holds(use)


@condition("it belongs to an nn.Module")
def of_module(use: Use) -> bool:
    return use.in_module


@condition("the number goes into arithmetic with tensors only: not into text, range(), an index or a condition")
def state(use: Use) -> bool:
    return only("arithmetic", "step").holds(use)


def is_read(node: ast.AST) -> bool:
    """Whether a node reads the value of a tensor into Python."""
    return isinstance(node, ast.Call) and (
        name_of(node.func) in ("item", "tolist") or dotted(node.func) in ("float", "int")
    )


def _of_numpy(node: ast.AST) -> bool:
    """Whether what is read comes from NumPy or Python's math, and is no tensor."""
    return any(isinstance(part, ast.Name) and part.id in ("np", "numpy", "math") for part in ast.walk(node))


def value_reads(use: Use) -> list[ast.AST]:
    """The calls that read the value of a tensor, the innermost left out where another one is around it."""
    around = [root for root in (use.node, use.statement) if root is not None]
    reads = next((within for root in around if (within := [node for node in nodes_of(root) if is_read(node)])), [])
    return [node for node in reads if not any(outer in reads for outer in use.syntax.above(node))]


@with_arguments
def read_as(*ways: str, text: str) -> Condition:
    """What ``.item()``, ``float()`` or ``int()`` gives is used in these ways only."""

    def holds(use: Use) -> bool:
        reads = value_reads(use)
        used = frozenset[UsedAs]().union(*(use.used_as(node) for node in reads))
        return bool(used) and used <= _ways(ways)[0] and not any(map(_of_numpy, reads))

    return Condition(text, holds)

"""Conditions on what becomes of a value: arithmetic, text, a size. Nothing here imports torch."""

from __future__ import annotations

import ast

from compile_bench.catalogue.conditions.condition import Condition
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, UsedAs, name_of, nodes_of


def only(*kinds: UsedAs, of: tuple[str, ...] = ()) -> Condition:
    """The value is used in no other way.

    Args:
        kinds: The ways.
        of: Names of the calls whose value is meant; by default what broke, or the value that the guard checked.
    """
    text = f"it is used only as {' or '.join(kind.value for kind in kinds)}"

    def holds(use: Use) -> bool:
        calls = use.calls(*of) if of else []
        if of and not calls:
            return False
        used = frozenset[UsedAs]().union(*(use.used_as(call) for call in calls)) if of else use.used_as()
        return bool(used) and used <= {*kinds}

    return Condition(text, holds)


def never(*kinds: UsedAs, of: tuple[str, ...] = ()) -> Condition:
    """The value is used, but in none of these ways; the arguments are those of :func:`only`."""
    others = [kind for kind in UsedAs if kind not in kinds]
    return Condition(f"it is not used as {' or '.join(kind.value for kind in kinds)}", only(*others, of=of).holds)


ARITHMETIC = Condition(
    "the number goes into arithmetic with tensors only: not into text, range(), an index, a condition or a list",
    only(UsedAs.ARITHMETIC).holds,
)


OF_MODULE = Condition("it belongs to an nn.Module", lambda use: use.in_module)


STATE = Condition(
    "the number goes into arithmetic with tensors only: not into text, range(), an index or a condition",
    only(UsedAs.ARITHMETIC, UsedAs.STEP).holds,
)


STATE_OF_MODULE = OF_MODULE & STATE


def is_read(node: ast.AST) -> bool:
    """Whether a node reads the value of a tensor into Python."""
    return isinstance(node, ast.Call) and (
        name_of(node.func) in ("item", "tolist") or dotted(node.func) in ("float", "int")
    )


def _of_numpy(node: ast.AST) -> bool:
    """Whether what is read comes from NumPy or Python's math, and is no tensor."""
    return any(isinstance(each, ast.Name) and each.id in ("np", "numpy", "math") for each in ast.walk(node))


def value_reads(use: Use) -> list[ast.AST]:
    """The calls that read the value of a tensor, the innermost left out where another one is around it."""
    around = [each for each in (use.node, use.statement) if each is not None]
    reads = next((found for each in around if (found := [node for node in nodes_of(each) if is_read(node)])), [])
    return [node for node in reads if not any(each in reads for each in use.syntax.above(node))]


def read_as(*kinds: UsedAs, text: str) -> Condition:
    """What ``.item()``, ``float()`` or ``int()`` gives is used in these ways only."""

    def holds(use: Use) -> bool:
        reads = value_reads(use)
        used = frozenset[UsedAs]().union(*(use.used_as(node) for node in reads))
        return bool(used) and used <= {*kinds} and not any(map(_of_numpy, reads))

    return Condition(text, holds)

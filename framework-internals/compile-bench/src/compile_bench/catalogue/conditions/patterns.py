"""Conditions that a pattern of source code says, such as ``range(*$passed)``. Nothing here imports torch.

A pattern is an expression or a statement in which ``$kind`` stands for any expression of a kind, see :data:`_KINDS`,
and ``*$kind`` for any number of them. ``**$any`` allows keywords. A call fits by its name alone, unless the pattern
says what it is a method of.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from compile_bench.catalogue.conditions.condition import Condition, with_arguments
from compile_bench.catalogue.conditions.statements import comes_from_outside
from compile_bench.catalogue.source import is_elementwise
from compile_bench.catalogue.use import Use, is_constant, name_of

_KINDS: dict[str, Callable[[Use, ast.AST], bool]] = {
    "any": lambda use, node: True,
    "constant": lambda use, node: is_constant(node),
    "elementwise": lambda use, node: isinstance(node, ast.expr) and is_elementwise(node),
    "name": lambda use, node: isinstance(node, ast.Name),
    "parameter": lambda use, node: isinstance(node, ast.Name) and use.is_parameter(node.id),
    "passed": lambda use, node: _KINDS["constant"](use, node) or _KINDS["parameter"](use, node),
    "outside": lambda use, node: isinstance(node, ast.expr) and comes_from_outside(use, node),
    "own": lambda use, node: isinstance(node, ast.Name) and use.varies(node) and not use.is_parameter(node.id),
    "item": lambda use, node: isinstance(node, ast.Call) and name_of(node.func) == "item",
}
_MARK = "kind_of_"


def _parsed(patterns: Sequence[str]) -> list[ast.AST]:
    statements = [ast.parse(pattern.replace("$", _MARK)).body[0] for pattern in patterns]
    return [statement.value if isinstance(statement, ast.Expr) else statement for statement in statements]


@with_arguments
def like(*patterns: str, text: str) -> Condition:
    """The statement, every call with the name of a pattern, or a part of what broke fits one of the patterns."""
    parsed = _parsed(patterns)
    names = {name_of(pattern.func) for pattern in parsed if isinstance(pattern, ast.Call)}

    def holds(use: Use) -> bool:
        if names:
            calls = use.calls(*names)
            return bool(calls) and all(any(_fits(use, pattern, call) for pattern in parsed) for call in calls)
        nodes = use.nodes if use.statement is not None else ()
        return any(_fits(use, pattern, node) for pattern in parsed for node in nodes)

    return Condition(text, holds)


@with_arguments
def assigned_like(*patterns: str, text: str) -> Condition:
    """A statement that gives the guarded value another value fits one of the patterns."""
    parsed = _parsed(patterns)
    return Condition(text, lambda use: any(_fits(use, pattern, node) for pattern in parsed for node in use.assignments))


def _fits(use: Use, pattern: object, node: object) -> bool:
    match pattern, node:
        case ast.Name(id=name), ast.AST() if name.startswith(_MARK):
            return _KINDS[name.removeprefix(_MARK)](use, node)
        case ast.Call(), ast.Call():
            function = pattern.func
            named = (
                function.id == name_of(node.func) if isinstance(function, ast.Name) else _fits(use, function, node.func)
            )
            return named and _all_fit(use, pattern.args, node.args) and bool(pattern.keywords) >= bool(node.keywords)
        case [*patterns], [*nodes]:
            return _all_fit(use, patterns, nodes)
        case ast.AST(), ast.AST():
            fields = [name for name in pattern._fields if name not in ("ctx", "type_comment")]
            return type(pattern) is type(node) and all(
                _fits(use, getattr(pattern, name), getattr(node, name)) for name in fields
            )
    return pattern == node


def _all_fit(use: Use, patterns: Sequence[object], nodes: Sequence[object]) -> bool:
    if not patterns or not isinstance(rest := patterns[-1], ast.Starred):
        return len(patterns) == len(nodes) and all(map(_fits, [use] * len(nodes), patterns, nodes))
    first = len(patterns) - 1
    return _all_fit(use, patterns[:first], nodes[:first]) and all(
        _fits(use, rest.value, node) for node in nodes[first:]
    )

"""Conditions on calls: what they depend on, and whether anything uses their result. Nothing here imports torch."""

from __future__ import annotations

import ast

from compile_bench.catalogue.conditions.condition import Condition, condition, with_arguments
from compile_bench.catalogue.purity import is_quiet
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use

LOOPS = (ast.For, ast.While, ast.AsyncFor)
_INDEPENDENT = "it depends on nothing that the function gets or computes"


@condition("the statement is this call alone, and its arguments change nothing")
def unused(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    call = statement.value
    return all(map(is_quiet, [*call.args, *(word.value for word in call.keywords)]))


@with_arguments
def independent(*names: str) -> Condition:
    """The calls with these names, or the statement, depend on nothing that the function gets or computes."""

    def holds(use: Use) -> bool:
        nodes: list[ast.AST] = [*use.calls(*names)] if names else [use.node] if use.node is not None else []
        return bool(nodes) and not any(map(use.varies, nodes))

    return Condition(_INDEPENDENT, holds)


@condition(_INDEPENDENT)
def statement_independent(use: Use) -> bool:
    return isinstance(use.statement, (ast.Expr, ast.With, ast.Assign, ast.ClassDef)) and not any(
        use.varies(node) for node in _values(use.statement)
    )


def _values(statement: ast.stmt) -> list[ast.AST]:
    match statement:
        case ast.Assign(value=value):
            return [value]
        case ast.With(items=items):
            return [item.context_expr for item in items]
        case ast.ClassDef(body=body):
            return [*body]
    return [statement]


@condition("it runs once in every call: no loop and no branch is around it")
def once_a_call(use: Use) -> bool:
    return use.statement is not None and not any(
        isinstance(outer, (*LOOPS, ast.If, ast.Try)) for outer in statements_around(use)
    )


def statements_around(use: Use) -> list[ast.AST]:
    """The statements around the line, within its function."""
    around: list[ast.AST] = []
    for outer in use.syntax.above(use.statement) if use.statement is not None else ():
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        around.append(outer)
    return around


@with_arguments
def of_argument(*names: str) -> Condition:
    """What the call is applied to is an argument of the function, or made from one by a method."""

    def holds(use: Use) -> bool:
        calls = use.calls(*names)
        return bool(calls) and all(comes_from_outside(use, _subject(call)) for call in calls)

    return Condition("it is applied to an argument or an attribute, not to what the function computes", holds)


def _subject(call: ast.Call) -> ast.expr:
    """What a method is called on, or the first argument of a function of a module."""
    first = next(iter(call.args), call.func)
    if not isinstance(call.func, ast.Attribute):
        return first
    inside = call.func.value
    return first if dotted(inside).partition(".")[0] in ("torch", "copy", "np", "nn", "F") else inside


def comes_from_outside(use: Use, node: ast.expr) -> bool:
    """Whether a value is an argument or an attribute, or made from one by methods."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute) or any(use.varies(argument) for argument in node.args):
                return False
            node = node.func.value
        else:
            node = node.value
    return isinstance(node, ast.Name) and (node.id == "self" or use.is_parameter(node.id) or not use.varies(node))


@with_arguments
def has_keyword(call: str, keyword: str, *, given: bool = True) -> Condition:
    """A call has a keyword argument, or lacks it."""

    def holds(use: Use) -> bool:
        calls = use.calls(call)
        return bool(calls) and all((keyword in [word.arg for word in node.keywords]) is given for node in calls)

    return Condition(f"{keyword} is {'given' if given else 'not given'}", holds)

"""Conditions on branches and loops that a value decides: what their sides do. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable

from compile_bench.catalogue.conditions.condition import condition
from compile_bench.catalogue.conditions.of_calls import LOOPS, statements_around
from compile_bench.catalogue.purity import is_elementwise
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import KEEPING, Use, UsedAs, assigned_in, is_constant, name_of, parameters

WRITING = frozenset(
    ("print", "pprint", "warn", "write", "flush", "debug", "info", "warning", "error", "critical", "exception", "log")
)
# Calls that read a value, write, or keep something.
_EFFECTS = WRITING | KEEPING | frozenset(("add", "item", "tolist", "numpy", "cpu", "data_ptr"))


def value_of(statement: ast.stmt) -> ast.expr | None:
    """What a statement assigns to one local name, or returns; None if it does anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=ast.expr() as value):
            return value
    return None


def _only_values(use: Use, accepts: Callable[[ast.expr], bool]) -> bool:
    """Whether the statement is an ``if`` whose sides give values that are accepted, without an ``elif``."""
    statement = use.statement
    if not isinstance(statement, ast.If) or isinstance(next(iter(statement.orelse), None), ast.If):
        return False
    sides = [statement.body, statement.orelse]
    values = [value_of(statement) for side in sides for statement in side]
    if any(value is None for value in values) or not _gives_both(use, sides):
        return False
    return all(value is not None and accepts(value) for value in values)


def _gives_both(use: Use, sides: list[list[ast.stmt]]) -> bool:
    """Whether both sides return, or both only assign names that exist without them."""
    returns = [any(isinstance(inner, ast.Return) for inner in side) for side in sides]
    if not any(returns):
        targets = set[str]().union(*(assigned_in(inner) for side in sides for inner in side))
        function, branch = use.function, use.statement
        assert branch is not None
        if all(targets == set().union(*(assigned_in(inner) for inner in side)) for side in sides):
            return True
        before = {
            node.id
            for node in use.within
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < branch.lineno
        }
        return targets <= before | (parameters(function) if function is not None else set())
    if all(returns):
        return True
    statement = use.statement
    assert statement is not None
    block = use.syntax.block(statement)
    following = block[block.index(statement) + 1 :]
    return returns[0] and not sides[1] and len(following) == 1 and isinstance(following[0], ast.Return)


def changes_nothing(node: ast.AST) -> bool:
    """Whether an expression only computes: no method in place, nothing that writes, no assignment inside."""
    for part in ast.walk(node):
        match part:
            case ast.Call(func=function):
                name = name_of(function)
                if name in _EFFECTS or (name.endswith("_") and not name.endswith("__")):
                    return False
            case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return False
    return True


@condition("both sides only assign the same local names, or return, and compute elementwise")
def elementwise_sides(use: Use) -> bool:
    return _only_values(use, is_elementwise)


@condition(
    "both sides only assign the same local names, or return, and change nothing else; they must give tensors of the "
    "same shapes"
)
def pure_sides(use: Use) -> bool:
    return _only_values(use, lambda value: changes_nothing(value) and not is_constant(value))


@condition("the result is part of a tensor, and no `if` or `while` tests it")
def not_a_test(use: Use) -> bool:
    return isinstance(use.node, ast.expr) and _outermost_use(use) <= {UsedAs.ARITHMETIC}


@condition("one value is compared twice")
def chained(use: Use) -> bool:
    return any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in use.nodes)


def _outermost_use(use: Use) -> frozenset[UsedAs]:
    node = use.node
    assert isinstance(node, ast.expr)
    while isinstance(around := use.syntax.parents.get(node), (ast.BoolOp, ast.Compare)):
        node = around
    return use.used_as(node) or frozenset((UsedAs.BRANCH,))


@condition("both values are numbers or elementwise, and the result goes into arithmetic with tensors")
def choice_of_numbers(use: Use) -> bool:
    chosen = [node for node in use.nodes if isinstance(node, ast.IfExp)]
    return bool(chosen) and all(
        is_elementwise(node.body) and is_elementwise(node.orelse) and use.used_as(node) <= {UsedAs.ARITHMETIC}
        for node in chosen
    )


def _writes_only(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and name_of(statement.value.func) in WRITING
    )


@condition("the body only prints, warns or logs, and there is no else")
def body_writes(use: Use) -> bool:
    return isinstance(use.statement, ast.If) and not use.statement.orelse and all(map(_writes_only, use.statement.body))


@condition("the branch does nothing but raise, and the function does not catch the error")
def raises_uncaught(use: Use) -> bool:
    statement = use.statement
    is_check = isinstance(statement, ast.Assert) or (
        isinstance(statement, ast.If)
        and not statement.orelse
        and len(statement.body) == 1
        and isinstance(statement.body[0], ast.Raise)
    )
    return is_check and not any(isinstance(outer, ast.Try) and outer.handlers for outer in statements_around(use))


@condition("the loop only assigns local names, elementwise, and a largest number of iterations is known")
def repeats_elementwise(use: Use) -> bool:
    statement = use.statement
    around = [statement, *statements_around(use)]
    loop = next((outer for outer in around if isinstance(outer, LOOPS)), None)
    if loop is None or loop.orelse:
        return False
    return all(
        (value := value_of(inner)) is not None and is_elementwise(value)
        for inner in loop.body
        if not (inner is statement and _leaves(inner))
    )


def _leaves(statement: ast.stmt) -> bool:
    """Whether an ``if`` leaves the loop, after elementwise assignments alone."""
    return (
        isinstance(statement, ast.If)
        and not statement.orelse
        and all(
            isinstance(inner, (ast.Break, ast.Continue))
            or ((value := value_of(inner)) is not None and is_elementwise(value))
            for inner in statement.body
        )
    )


@condition("the layer's result is added to its input")
def residual(use: Use) -> bool:
    statement = use.statement
    if not isinstance(statement, ast.If) or statement.orelse or len(statement.body) != 1:
        return False
    match statement.body[0]:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            return name in (dotted(left), dotted(right))
        case ast.AugAssign(target=ast.Name(), op=ast.Add()):
            return True
    return False

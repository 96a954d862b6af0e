"""Conditions on where a line is: in a loop, in a hook, in a block. Nothing here imports torch."""

from __future__ import annotations

import ast

from compile_bench.catalogue.conditions.condition import Condition, condition, with_arguments
from compile_bench.catalogue.conditions.of_branches import WRITING, changes_nothing
from compile_bench.catalogue.conditions.of_calls import LOOPS, statements_around
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, name_of


def _is_inside(use: Use, *kinds: type[ast.AST]) -> bool:
    """Whether a statement of one of these kinds is around the line, within its function."""
    return any(isinstance(statement, kinds) for statement in statements_around(use))


@condition("a loop is around the line")
def in_loop(use: Use) -> bool:
    return _is_inside(use, *LOOPS)


@condition("a `try` is around the line")
def in_try(use: Use) -> bool:
    return _is_inside(use, ast.Try)


@condition("a `with` is around the line")
def in_with(use: Use) -> bool:
    return _is_inside(use, ast.With)


@condition("the line is in forward() or backward() of an autograd.Function")
def in_autograd_function(use: Use) -> bool:
    return use.owner is not None and any(name_of(base) == "Function" for base in use.owner.bases)


@condition("the hook only writes, and neither keeps nor changes anything")
def hook_that_writes(use: Use) -> bool:
    hooks = use.calls("register_forward_hook", "register_forward_pre_hook")
    bodies = [argument.body for hook in hooks for argument in hook.args if isinstance(argument, ast.Lambda)]
    return bool(bodies) and all(isinstance(body, ast.Call) and name_of(body.func) in WRITING for body in bodies)


@condition("the block is not in a loop or branch, and its value is not used")
def around_call(use: Use) -> bool:
    statement, function = use.statement, use.function
    if not isinstance(statement, ast.With) or not isinstance(function, ast.FunctionDef):
        return False
    return statement in function.body and not any(isinstance(item.optional_vars, ast.Name) for item in statement.items)


@condition("the block is all that the function does")
def whole_function(use: Use) -> bool:
    return (
        around_call.holds(use) and isinstance(use.function, ast.FunctionDef) and use.function.body[-1] is use.statement
    )


@condition("the file takes this lock nowhere else")
def taken_once(use: Use) -> bool:
    if not isinstance(use.statement, ast.With):
        return False
    taken = [dotted(item.context_expr) for item in use.statement.items]
    every = [
        dotted(item.context_expr)
        for node in ast.walk(use.syntax.tree)
        if isinstance(node, ast.With)
        for item in node.items
    ]
    return all(name and every.count(name) == 1 for name in taken)


@with_arguments
def without_calls(*names: str, text: str, part: bool = False) -> Condition:
    """The function calls nothing with these names; with ``part``, nothing whose name contains one of these."""

    def holds(use: Use) -> bool:
        called = {name_of(call.func).lower() for call in use.within if isinstance(call, ast.Call)}
        met = any(name in function for name in names for function in called) if part else bool(called & {*names})
        return use.function is not None and not met

    return Condition(text, holds)


@condition("the function only computes: it reads no value, and writes or keeps nothing")
def traceable_body(use: Use) -> bool:
    """Whether the functions that the line calls are in the file, and none that is kept out has effects or reads."""
    nodes = list(ast.walk(use.statement)) if use.statement is not None else []
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    disabled = [
        node
        for node in ast.walk(use.syntax.tree)
        if isinstance(node, ast.FunctionDef)
        and node.name in called
        and any("disable" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    return bool(disabled) and all(
        changes_nothing(statement) and not isinstance(statement, (ast.Global, ast.With, ast.Try))
        for function in disabled
        for statement in function.body
    )

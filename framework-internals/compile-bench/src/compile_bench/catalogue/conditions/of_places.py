"""Conditions on where a line is: in a loop, in a hook, in a block. Nothing here imports torch."""

from __future__ import annotations

import ast

from compile_bench.catalogue.conditions.condition import Condition
from compile_bench.catalogue.conditions.of_branches import WRITING, changes_nothing
from compile_bench.catalogue.conditions.of_calls import LOOPS, statements_around
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import Use, name_of


def inside(*kinds: type[ast.AST], text: str) -> Condition:
    """A statement of one of these kinds is around the line, within its function."""
    return Condition(text, lambda use: any(isinstance(each, kinds) for each in statements_around(use)))


IN_LOOP = inside(*LOOPS, text="a loop is around the line")


IN_TRY = inside(ast.Try, text="a `try` is around the line")


IN_WITH = inside(ast.With, text="a `with` is around the line")


def _in_autograd_function(use: Use) -> bool:
    return use.owner is not None and any(name_of(base) == "Function" for base in use.owner.bases)


IN_AUTOGRAD_FUNCTION = Condition(
    "the line is in forward() or backward() of an autograd.Function", _in_autograd_function
)


def _prints_in_hook(use: Use) -> bool:
    hooks = use.calls("register_forward_hook", "register_forward_pre_hook")
    bodies = [each.body for hook in hooks for each in hook.args if isinstance(each, ast.Lambda)]
    return bool(bodies) and all(isinstance(body, ast.Call) and name_of(body.func) in WRITING for body in bodies)


HOOK_THAT_WRITES = Condition("the hook only writes, and neither keeps nor changes anything", _prints_in_hook)


def covers_the_function(use: Use) -> bool:
    """Whether the line is a `with` at the top level of its function whose value is not used."""
    statement, function = use.statement, use.function
    if not isinstance(statement, ast.With) or not isinstance(function, ast.FunctionDef):
        return False
    return statement in function.body and not any(isinstance(item.optional_vars, ast.Name) for item in statement.items)


AROUND_CALL = Condition("the block is not in a loop or branch, and its value is not used", covers_the_function)


WHOLE_FUNCTION = Condition(
    "the block is all that the function does",
    lambda use: (
        covers_the_function(use)
        and isinstance(use.function, ast.FunctionDef)
        and use.function.body[-1] is use.statement
    ),
)


def _taken_once(use: Use) -> bool:
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


TAKEN_ONCE = Condition("the file takes this lock nowhere else", _taken_once)


def without_calls(*names: str, text: str, part: bool = False) -> Condition:
    """The function calls nothing with these names.

    Args:
        names: The names.
        text: The condition as a clause.
        part: Whether a name that contains one of these counts, too.
    """

    def holds(use: Use) -> bool:
        nodes = ast.walk(use.function) if use.function is not None else ()
        called = {name_of(each.func).lower() for each in nodes if isinstance(each, ast.Call)}
        met = any(name in each for name in names for each in called) if part else bool(called & {*names})
        return use.function is not None and not met

    return Condition(text, holds)


def _body_is_traceable(use: Use) -> bool:
    """Whether the functions that the line calls are in the file, and none that is kept out has effects or reads."""
    nodes = list(ast.walk(use.statement)) if use.statement is not None else []
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    disabled = [
        each
        for each in ast.walk(use.syntax.tree)
        if isinstance(each, ast.FunctionDef)
        and each.name in called
        and any("disable" in ast.unparse(decorator) for decorator in each.decorator_list)
    ]
    return bool(disabled) and all(
        changes_nothing(statement) and not isinstance(statement, (ast.Global, ast.With, ast.Try))
        for function in disabled
        for statement in function.body
    )


TRACEABLE_BODY = Condition(
    "the function only computes: it reads no value, and writes or keeps nothing", _body_is_traceable
)

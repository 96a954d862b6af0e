"""Conditions on what a guard checked, and on functions that run eagerly silently. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable

from compile_bench.catalogue.conditions.condition import condition
from compile_bench.catalogue.conditions.of_constructs import written_in_place
from compile_bench.catalogue.conditions.of_values import only
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import KEEPING, Use, is_constant, name_of, parameters


@condition("it is an argument of the function")
def is_argument(use: Use) -> bool:
    name = use.value.partition(".")[0].partition("[")[0]
    return use.function is not None and bool(name) and name in parameters(use.function) - {"self"}


@condition("the function does not write into it")
def not_written(use: Use) -> bool:
    return not written_in_place(use, use.value)


@condition("both dtypes are floating-point")
def floating(use: Use) -> bool:
    return all(
        name in ("Float", "Double", "Half", "BFloat16")
        for name in use.guard.rpartition(". ")[2].replace(",", "").split()[1::2]
    )


def _size_decides(use: Use) -> bool:
    """Whether a size of the guarded tensor is a count or a condition in the function."""
    for load in use.loads:
        above = list(use.syntax.above(load))
        measured = any(
            (isinstance(outer, ast.Attribute) and outer.attr in ("shape", "size"))
            or (isinstance(outer, ast.Call) and name_of(outer.func) == "len")
            for outer in above[:1]
        )
        for around in above if measured else ():
            if isinstance(around, (ast.If, ast.While, ast.Assert, ast.IfExp)) or (
                isinstance(around, ast.Call) and name_of(around.func) in ("range", "int")
            ):
                return True
            if isinstance(around, ast.stmt):
                break
    return False


@condition("it is an argument of the function, and no branch and no range() there depends on its size")
def free_size(use: Use) -> bool:
    return is_argument.holds(use) and not use.static_shapes and not _size_decides(use)


@condition("the model is compiled with dynamic=False")
def static_shapes(use: Use) -> bool:
    return use.static_shapes and is_argument.holds(use)


@condition("one of the two sizes is 0 or 1")
def one_or_none(use: Use) -> bool:
    return "<=" in use.guard or any(size in ("0", "1") for size in _sizes(use.guard))


def _sizes(guard: str) -> list[str]:
    return [part.rpartition(" ")[2] for part in guard.rpartition(". ")[2].split(", ")]


@condition("the code tests the remainder of a size, and raises nothing there")
def remainder_tested(use: Use) -> bool:
    return ("%" in use.guard or "Mod(" in use.guard) and not (
        isinstance(use.statement, ast.If) and any(isinstance(inner, ast.Raise) for inner in use.statement.body)
    )


@condition("it is an argument of the function, which does not ask for its number of dimensions")
def same_rank_code(use: Use) -> bool:
    return is_argument.holds(use) and not any(
        isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in ("dim", "ndim")
        for load in use.loads
    )


@condition("only the keys of autograd differ: the device is the same")
def autograd_keys(use: Use) -> bool:
    return len({keys.split("(")[-1].split(",")[0] for keys in use.guard.split("DispatchKeySet")[1:]}) == 1


def _joined_by(*names: str) -> Callable[[Use], bool]:
    """Whether every read of the guarded value is an argument of one of these functions."""

    def holds(use: Use) -> bool:
        calls = [
            next((outer for outer in use.syntax.above(load) if isinstance(outer, ast.Call)), None) for load in use.loads
        ]
        return bool(calls) and all(call is not None and name_of(call.func) in names for call in calls)

    return holds


@condition("the function reads it only to put it behind another tensor")
def joined(use: Use) -> bool:
    return _joined_by("cat", "concat", "hstack", "vstack")(use)


@condition("it is an argument that is only stacked or summed")
def stacked(use: Use) -> bool:
    return is_argument.holds(use) and _joined_by("stack", "cat", "sum")(use)


@condition("the model only appends to it")
def appended_only(use: Use) -> bool:
    return bool(use.loads) and all(
        isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in KEEPING for load in use.loads
    )


@condition("it is an argument of the function, which only calls it")
def called_argument(use: Use) -> bool:
    return is_argument.holds(use) and only("called").holds(use)


@condition("it is an argument that is tested for None, and otherwise goes into arithmetic")
def neutral_possible(use: Use) -> bool:
    return is_argument.holds(use) and only("none_test", "arithmetic").holds(use)


@condition("the class sets it to a value that does not depend on what is passed in")
def set_once(use: Use) -> bool:
    values = [assignment.value for assignment in use.assignments if isinstance(assignment, (ast.Assign, ast.AnnAssign))]
    return bool(values) and all(value is not None and not use.varies(value) for value in values)


@condition("it only selects branches")
def selects(use: Use) -> bool:
    return only("branch").holds(use)


@condition("the lines before the break computed the value")
def across_break(use: Use) -> bool:
    return use.guard.startswith("___stack")


@condition("the class adds a constant to it")
def counted(use: Use) -> bool:
    return any(
        isinstance(assignment, ast.AugAssign)
        and isinstance(assignment.op, (ast.Add, ast.Sub))
        and is_constant(assignment.value)
        for assignment in use.assignments
    )


@condition("the function has a branch, on one side of which it computes with tensors")
def has_branch(use: Use) -> bool:
    return any(isinstance(node, (ast.If, ast.IfExp)) for node in use.within)


@condition("its class has a forward(), which does not call it")
def apart_from_forward(use: Use) -> bool:
    methods = (
        {member.name: member for member in use.owner.body if isinstance(member, ast.FunctionDef)} if use.owner else {}
    )
    forward, function = methods.get("forward"), use.function
    if forward is None or not isinstance(function, ast.FunctionDef) or function.name == "forward":
        return False
    calls = (node for node in ast.walk(forward) if isinstance(node, ast.Call))
    return f"self.{function.name}" not in (dotted(call.func) for call in calls)

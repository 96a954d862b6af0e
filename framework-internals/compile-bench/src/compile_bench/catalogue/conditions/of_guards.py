"""Conditions on what a guard checked, and on functions that run eagerly silently. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable

from compile_bench.catalogue.conditions.condition import Condition
from compile_bench.catalogue.conditions.of_constructs import written_in_place
from compile_bench.catalogue.conditions.of_values import STATE_OF_MODULE, only
from compile_bench.catalogue.syntax import dotted
from compile_bench.catalogue.use import KEEPING, Use, UsedAs, is_constant, name_of, parameters


def _is_argument(use: Use) -> bool:
    name = use.value.partition(".")[0].partition("[")[0]
    return use.function is not None and bool(name) and name in parameters(use.function) - {"self"}


IS_ARGUMENT = Condition("it is an argument of the function", _is_argument)


NOT_WRITTEN = Condition("the function does not write into it", lambda use: not written_in_place(use, use.value))


FLOATING = Condition(
    "both dtypes are floating-point",
    lambda use: all(
        name in ("Float", "Double", "Half", "BFloat16")
        for name in use.guard.rpartition(". ")[2].replace(",", "").split()[1::2]
    ),
)


def _size_decides(use: Use) -> bool:
    """Whether a size of the guarded tensor is a count or a condition in the function."""
    for load in use.loads:
        above = list(use.syntax.above(load))
        measured = any(
            (isinstance(each, ast.Attribute) and each.attr in ("shape", "size"))
            or (isinstance(each, ast.Call) and name_of(each.func) == "len")
            for each in above[:1]
        )
        for around in above if measured else ():
            if isinstance(around, (ast.If, ast.While, ast.Assert, ast.IfExp)) or (
                isinstance(around, ast.Call) and name_of(around.func) in ("range", "int")
            ):
                return True
            if isinstance(around, ast.stmt):
                break
    return False


FREE_SIZE = Condition(
    "it is an argument of the function, and no branch and no range() there depends on its size",
    lambda use: _is_argument(use) and not use.static_shapes and not _size_decides(use),
)


STATIC_SHAPES = Condition(
    "the model is compiled with dynamic=False", lambda use: use.static_shapes and _is_argument(use)
)


ONE_OR_NONE = Condition(
    "one of the two sizes is 0 or 1",
    lambda use: "<=" in use.guard or any(size in ("0", "1") for size in _sizes(use.guard)),
)


def _sizes(guard: str) -> list[str]:
    return [part.rpartition(" ")[2] for part in guard.rpartition(". ")[2].split(", ")]


REMAINDER_TESTED = Condition(
    "the code tests the remainder of a size, and raises nothing there",
    lambda use: (
        ("%" in use.guard or "Mod(" in use.guard)
        and not (isinstance(use.statement, ast.If) and any(isinstance(each, ast.Raise) for each in use.statement.body))
    ),
)


SAME_RANK_CODE = Condition(
    "it is an argument of the function, which does not ask for its number of dimensions",
    lambda use: (
        _is_argument(use)
        and not any(
            isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in ("dim", "ndim")
            for load in use.loads
        )
    ),
)


AUTOGRAD_KEYS = Condition(
    "only the keys of autograd differ: the device is the same",
    lambda use: len({each.split("(")[-1].split(",")[0] for each in use.guard.split("DispatchKeySet")[1:]}) == 1,
)


def _joined_by(*names: str) -> Callable[[Use], bool]:
    """Whether every read of the guarded value is an argument of one of these functions."""

    def holds(use: Use) -> bool:
        calls = [
            next((each for each in use.syntax.above(load) if isinstance(each, ast.Call)), None) for load in use.loads
        ]
        return bool(calls) and all(call is not None and name_of(call.func) in names for call in calls)

    return holds


JOINED = Condition(
    "the function reads it only to put it behind another tensor", _joined_by("cat", "concat", "hstack", "vstack")
)


STACKED = Condition(
    "it is an argument that is only stacked or summed",
    lambda use: _is_argument(use) and _joined_by("stack", "cat", "sum")(use),
)


APPENDED_ONLY = Condition(
    "the model only appends to it",
    lambda use: (
        bool(use.loads)
        and all(
            isinstance(around := use.syntax.parents[load], ast.Attribute) and around.attr in KEEPING
            for load in use.loads
        )
    ),
)


CALLED_ARGUMENT = Condition(
    "it is an argument of the function, which only calls it",
    lambda use: _is_argument(use) and only(UsedAs.CALLED).holds(use),
)


NEUTRAL_POSSIBLE = Condition(
    "it is an argument that is tested for None, and otherwise goes into arithmetic",
    lambda use: _is_argument(use) and only(UsedAs.NONE_TEST, UsedAs.ARITHMETIC).holds(use),
)


def _set_once(use: Use) -> bool:
    values = [each.value for each in use.assignments if isinstance(each, (ast.Assign, ast.AnnAssign))]
    return bool(values) and all(value is not None and not use.varies(value) for value in values)


SET_ONCE = Condition("the class sets it to a value that does not depend on what is passed in", _set_once)


SELECTS = Condition("it only selects branches", only(UsedAs.BRANCH).holds)


ACROSS_BREAK = Condition("the lines before the break computed the value", lambda use: use.guard.startswith("___stack"))


def _counted(use: Use) -> bool:
    return any(
        isinstance(each, ast.AugAssign) and isinstance(each.op, (ast.Add, ast.Sub)) and is_constant(each.value)
        for each in use.assignments
    )


COUNTED = Condition("the class adds a constant to it", _counted) & STATE_OF_MODULE


HAS_BRANCH = Condition(
    "the function has a branch, on one side of which it computes with tensors",
    lambda use: (
        use.function is not None and any(isinstance(node, (ast.If, ast.IfExp)) for node in ast.walk(use.function))
    ),
)


def _is_apart_from_forward(use: Use) -> bool:
    methods = {each.name: each for each in use.owner.body if isinstance(each, ast.FunctionDef)} if use.owner else {}
    forward, function = methods.get("forward"), use.function
    if forward is None or not isinstance(function, ast.FunctionDef) or function.name == "forward":
        return False
    calls = (node for node in ast.walk(forward) if isinstance(node, ast.Call))
    return f"self.{function.name}" not in (dotted(call.func) for call in calls)


APART_FROM_FORWARD = Condition("its class has a forward(), which does not call it", _is_apart_from_forward)

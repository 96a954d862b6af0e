"""Conditions on what becomes of a value, on what a guard checked, and on slices with bounds that are values."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from compile_bench.catalogue.conditions.condition import Condition, condition, with_arguments
from compile_bench.catalogue.conditions.constructs import reduced, written_in_place
from compile_bench.catalogue.source import dotted
from compile_bench.catalogue.use import KEEPING, Use, UsedAs, is_constant, name_of, nodes_of, parameters


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


def _of_numpy(use: Use, node: ast.AST) -> bool:
    """Whether what is read comes from NumPy or Python's math, perhaps through a local name, and is no tensor."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    local = [
        part.value
        for part in use.within
        if isinstance(part, ast.Assign)
        and any(isinstance(name, ast.Name) and name.id in names for name in part.targets)
    ]
    parts = (part for around in (node, *local) for part in ast.walk(around))
    return any(isinstance(part, ast.Name) and part.id in ("np", "numpy", "math") for part in parts)


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
        return bool(used) and used <= _ways(ways)[0] and not any(_of_numpy(use, node) for node in reads)

    return Condition(text, holds)


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


@condition("no branch and no range() there depends on its size")
def free_size(use: Use) -> bool:
    return not use.static_shapes and not _size_decides(use)


@condition("the model is compiled with dynamic=False")
def static_shapes(use: Use) -> bool:
    return use.static_shapes


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


@condition("the function does not ask for its number of dimensions")
def rank_is_free(use: Use) -> bool:
    around = [use.syntax.parents[load] for load in use.loads]
    return not any(isinstance(outer, ast.Attribute) and outer.attr in ("dim", "ndim") for outer in around)


@condition("only the keys of autograd differ: the device is the same")
def autograd_keys(use: Use) -> bool:
    return len({keys.split("(")[-1].split(",")[0] for keys in use.guard.split("DispatchKeySet")[1:]}) == 1


@with_arguments
def argument_of(*names: str, text: str) -> Condition:
    """Every read of the guarded value is an argument of one of these functions."""

    def holds(use: Use) -> bool:
        around = [list(use.syntax.above(load)) for load in use.loads]
        calls = [next((outer for outer in above if isinstance(outer, ast.Call)), None) for above in around]
        return bool(calls) and all(call is not None and name_of(call.func) in names for call in calls)

    return Condition(text, holds)


@condition("the model only appends to it")
def appended_only(use: Use) -> bool:
    return bool(use.loads) and all(_is_appended_to(use, load) for load in use.loads)


def _is_appended_to(use: Use, load: ast.expr) -> bool:
    """Whether a load is for appending a tensor, and not a number, in a function that can return the tensor instead."""
    around = list(use.syntax.above(load))
    if not (isinstance(around[0], ast.Attribute) and around[0].attr in KEEPING):
        return False
    calls = (part for part in ast.walk(around[1]) if isinstance(part, ast.Call))
    numbers = any(name_of(call.func) in ("item", "tolist", "float", "int") for call in calls)
    return not numbers and not any(isinstance(outer, ast.Lambda) for outer in around)


@condition("the class sets it to a value that does not depend on what is passed in")
def set_once(use: Use) -> bool:
    values = [assignment.value for assignment in use.assignments if isinstance(assignment, (ast.Assign, ast.AnnAssign))]
    return bool(values) and all(value is not None and not use.varies(value) for value in values)


@condition("the lines before the break computed the value")
def across_break(use: Use) -> bool:
    return use.guard.startswith("___stack")


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


def _slices(use: Use, context: type[ast.expr_context]) -> list[ast.Slice]:
    """The slices with a bound that is not constant, in subscripts that are read, or written."""
    inside = [node for node in use.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, context)]
    slices = [node for subscript in inside for node in ast.walk(subscript.slice) if isinstance(node, ast.Slice)]
    return [part for part in slices if not all(end is None or is_constant(end) for end in (part.lower, part.upper))]


def _known_length(part: ast.Slice) -> bool:
    """Whether a slice is written ``start : start + length``."""
    match part:
        case ast.Slice(lower=ast.expr() as lower, upper=ast.BinOp(op=ast.Add(), left=left, right=length), step=None):
            return ast.unparse(lower) == ast.unparse(left) and not any(map(is_read, ast.walk(length)))
    return False


@condition("the slice begins at 0, ends at a value, and only its sum is used")
def maskable_slice(use: Use) -> bool:
    slices = _slices(use, ast.Load)
    from_zero = all(part.lower is None and part.upper is not None for part in slices)
    to_values = all(any(map(is_read, ast.walk(part.upper))) for part in slices if part.upper is not None)
    return bool(slices) and from_zero and to_values and reduced("Subscript").holds(use)


@condition("the slice is assigned to, begins at a value, and has a length that is no value: start : start + length")
def written_slice(use: Use) -> bool:
    slices = _slices(use, ast.Store)
    return isinstance(use.statement, ast.Assign) and bool(slices) and all(map(_known_length, slices))


@condition("the slice is read, begins at a value, and has a length that is no value: start : start + length")
def read_slice(use: Use) -> bool:
    slices = _slices(use, ast.Load)
    return bool(slices) and all(map(_known_length, slices)) and not value_reads(use)

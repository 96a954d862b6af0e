"""Which expressions a rewrite may leave out, or compute where they were not computed before."""

from __future__ import annotations

import ast
import struct

# Calls without side effects: a print() whose arguments call nothing else may be left out.
_QUIET_FUNCTIONS = frozenset(
    [
        "abs",
        "bool",
        "dict",
        "enumerate",
        "float",
        "format",
        "id",
        "int",
        "isinstance",
        "len",
        "list",
        "max",
        "min",
        "range",
        "repr",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "zip",
    ]
)
_QUIET_METHODS = frozenset(
    [
        "abs",
        "all",
        "any",
        "argmax",
        "cpu",
        "detach",
        "dim",
        "element_size",
        "float",
        "format",
        "get",
        "isfinite",
        "isinf",
        "isnan",
        "item",
        "items",
        "join",
        "keys",
        "max",
        "mean",
        "min",
        "monotonic",
        "nelement",
        "norm",
        "numel",
        "perf_counter",
        "size",
        "std",
        "sum",
        "time",
        "tolist",
        "values",
        "var",
    ]
)
# Elementwise functions: computing them needlessly does no harm, and the result has the shape of the argument. Functions
# that are not differentiable or not finite everywhere are verified like the others.
_ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "atan",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "clone",
        "contiguous",
        "cos",
        "detach",
        "div",
        "erf",
        "exp",
        "expm1",
        "floor",
        "gelu",
        "leaky_relu",
        "log1p",
        "mul",
        "nan_to_num",
        "neg",
        "negative",
        "ones_like",
        "relu",
        "round",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "softplus",
        "sub",
        "tanh",
        "zeros_like",
    ]
)
# Reductions to a tensor without dimensions, which broadcasts.
_REDUCTIONS = frozenset(("max", "mean", "min", "norm", "std", "sum", "var"))


def is_quiet(node: ast.expr) -> bool:
    """Whether an expression has no side effects, so that it may be left out."""
    for each in ast.walk(node):
        if isinstance(each, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
        if isinstance(each, ast.Call):
            name = each.func.id if isinstance(each.func, ast.Name) else ""
            method = each.func.attr if isinstance(each.func, ast.Attribute) else ""
            if name not in _QUIET_FUNCTIONS and method not in _QUIET_METHODS:
                return False
    return True


def is_elementwise(node: ast.expr) -> bool:
    """Whether an expression consists of arithmetic and elementwise functions of plain names."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return True
    if isinstance(node, ast.Attribute):
        return is_elementwise(node.value)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.USub, ast.UAdd)) and is_elementwise(node.operand)
    if isinstance(node, ast.BinOp):
        known = isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow))
        return known and is_elementwise(node.left) and is_elementwise(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_elementwise_call(node, node.func)
    return False


def _is_elementwise_call(node: ast.Call, function: ast.Attribute) -> bool:
    arguments = [*node.args, *(word.value for word in node.keywords)]
    if function.attr in _REDUCTIONS:
        return not arguments and is_elementwise(function.value)
    return function.attr in _ELEMENTWISE and is_elementwise(function.value) and all(map(is_elementwise, arguments))


def is_exact_in_float32(node: ast.expr) -> bool:
    """Whether float32 represents a number exactly."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, (int, float)):
        return False
    return bool(struct.unpack("f", struct.pack("f", node.value))[0] == node.value)

"""Tells which expressions a rewrite may leave out, or compute where the unchanged code does not."""

from __future__ import annotations

import ast
import struct

from compile_bench.catalogue.syntax import FUNCTIONS

# Reductions to a tensor without dimensions, which broadcasts.
_REDUCTIONS = frozenset(("max", "mean", "min", "norm", "std", "sum", "var"))


def is_quiet(node: ast.expr) -> bool:
    """Whether an expression has no side effects, so that it may be left out."""
    for part in ast.walk(node):
        match part:
            case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                return False
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS["quiet_functions"]:
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in FUNCTIONS["quiet_methods"]:
                pass
            case ast.Call():
                return False
    return True


def is_elementwise(node: ast.expr) -> bool:
    """Whether an expression consists of arithmetic and elementwise functions of plain names."""
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()) | ast.Name():
            return True
        case ast.Attribute(value=inner) | ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return is_elementwise(inner)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), left=left, right=right):
            return is_elementwise(left) and is_elementwise(right)
        case ast.Call(func=ast.Attribute(attr=name, value=tensor), args=args, keywords=keywords):
            if name in _REDUCTIONS:
                return not args and not keywords and is_elementwise(tensor)
            parts = [tensor, *args, *(word.value for word in keywords)]
            return name in FUNCTIONS["elementwise"] and all(map(is_elementwise, parts))
    return False


def is_exact_in_float32(node: ast.expr) -> bool:
    """Whether float32 represents a number exactly."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    return False

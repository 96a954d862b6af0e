"""Conditions on slices whose bounds are values of tensors. Nothing here imports torch."""

from __future__ import annotations

import ast

from compile_bench.catalogue.conditions.condition import condition
from compile_bench.catalogue.conditions.of_constructs import reduced
from compile_bench.catalogue.conditions.of_values import is_read, value_reads
from compile_bench.catalogue.use import Use, is_constant


def _slices(use: Use, context: type[ast.expr_context]) -> list[ast.Slice]:
    """The slices with a bound that is not constant, in subscripts that are read, or written."""
    inside = [node for node in use.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, context)]
    slices = [node for each in inside for node in ast.walk(each.slice) if isinstance(node, ast.Slice)]
    return [each for each in slices if not all(part is None or is_constant(part) for part in (each.lower, each.upper))]


def _known_length(part: ast.Slice) -> bool:
    """Whether a slice is written ``start : start + length``."""
    match part:
        case ast.Slice(lower=ast.expr() as lower, upper=ast.BinOp(op=ast.Add(), left=left, right=length), step=None):
            return ast.unparse(lower) == ast.unparse(left) and not any(map(is_read, ast.walk(length)))
    return False


@condition("the slice begins at 0, ends at a value, and only its sum is used")
def maskable_slice(use: Use) -> bool:
    return (
        bool(slices := _slices(use, ast.Load))
        and all(
            part.lower is None and part.upper is not None and any(map(is_read, ast.walk(part.upper))) for part in slices
        )
        and reduced("Subscript").holds(use)
    )


@condition("the slice is assigned to, begins at a value, and has a length that is no value: start : start + length")
def written_slice(use: Use) -> bool:
    return (
        isinstance(use.statement, ast.Assign)
        and bool(slices := _slices(use, ast.Store))
        and all(map(_known_length, slices))
    )


@condition("the slice is read, begins at a value, and has a length that is no value: start : start + length")
def read_slice(use: Use) -> bool:
    return bool(slices := _slices(use, ast.Load)) and all(map(_known_length, slices)) and not value_reads(use)

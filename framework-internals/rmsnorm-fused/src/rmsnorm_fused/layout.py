"""Any tensor as a matrix of rows, in place where two strides can describe it."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as (outer, inner, N) with adjacent columns: the layout that every kernel of this package takes.

    Row r of M = outer * inner is then [r // inner, r % inner]. One stride between rows is outer = 1. Two are what
    slices of a fused projection have: q of (B, T, 3 * H * D) as (B, T, H, D) is (B * T, H, D).

    Args:
        x: (..., N) with at least one element.

    Returns:
        A view of ``x``, or of a contiguous copy of it where its columns are not adjacent or its rows need more strides.
    """
    columns = x.shape[-1]
    if columns > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    dimensions = _merged(x)
    if len(dimensions) > 2:
        x = x.contiguous()
        dimensions = _merged(x)
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(dimensions)) + dimensions
    return x.as_strided((outer, inner, columns), (outer_stride, inner_stride, 1))


def _merged(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions before the last one, outermost first, neighbours merged where they can be."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged

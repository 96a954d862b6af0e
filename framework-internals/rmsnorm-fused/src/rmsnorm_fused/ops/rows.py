"""The operators on Triton's kernels, which take matrices of rows at one or two strides, and shape the results back.

``csrc/operators.h`` does the same for the C++ and CUDA C++ kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from rmsnorm_fused.ops import fakes
from rmsnorm_fused.ops.operators import LIBRARY
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import functionalisation, reshaped


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as (outer, inner, N) with adjacent columns, the layout that every kernel of this package takes.

    Row r of M = outer * inner is then [r // inner, r % inner]. Rows at one stride have outer = 1. Slices of a fused
    projection have two strides: q, a slice of (B, T, 3 * H * D) seen as (B, T, H, D), becomes (B * T, H, D).

    Returns:
        A view of ``x``, or of a contiguous copy if its columns are not adjacent or its rows need more strides.
    """
    columns = x.shape[-1]
    if x.is_contiguous():
        return x.view(1, -1, columns)
    if columns > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    dimensions = _merged(x)
    if len(dimensions) > 2:
        x = x.contiguous()
        dimensions = _merged(x)
    (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(dimensions)) + dimensions
    return x.as_strided((outer, inner, columns), (outer_stride, inner_stride, 1))


def _merged(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the dimensions before the last one, outermost first, with mergeable neighbours merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


class _TritonOperators:
    """The operators by name; the first call imports the kernels.

    They take x, residual, dy, ds and s as (outer, inner, N), of which residual and ds may be None. Their y, s, dx and
    dresidual are (M, N) and contiguous, row_scales (M,), kept (M,) or (M, 2), dparameters (N,) or (2, N), and None
    where one was not asked for.
    """

    @functools.cached_property
    def _kernels(self) -> ModuleType:
        return _triton()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the kernels can read a tensor where it is, and it has elements."""
        return (x.is_cuda or (x.is_cpu and self._kernels.interpreted())) and x.numel() > 0

    def normalise(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Y, s (x without a residual) and what the backward pass needs of each row."""
        if x.numel() == 0:
            s = x if residual is None else fakes.contiguous_like(residual)
            return fakes.contiguous_like(x), s, fakes.kept_of(x, options.centred).zero_()
        y, s, kept = self._kernels.forward(as_rows(x), _optional_rows(residual), weight, bias, options)
        kept = reshaped(kept, (*x.shape[:-1], *kept.shape[1:]))
        return reshaped(y, x.shape), x if s is None else reshaped(s, x.shape), kept

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, kept = self.normalise(x, None, weight, bias, Options(*options))
        return y, kept

    def forward_add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.normalise(x, residual, weight, bias, Options(*options))

    def backward(
        self,
        dy: torch.Tensor,
        ds: torch.Tensor | None,
        s: torch.Tensor,
        weight: torch.Tensor | None,
        kept: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if s.numel() == 0:
            dx, dresidual, dparameters = fakes.backward(dy, ds, s, weight, kept, *rest)
            return dx, dresidual, dparameters.zero_()
        dx, dresidual, dparameters = self._kernels.backward(
            as_rows(dy), _optional_rows(ds), as_rows(s), weight, kept.contiguous().view(-1), *rest
        )
        return (
            reshaped(dx, s.shape),
            s.new_empty(0) if dresidual is None else reshaped(dresidual, s.shape),
            s.new_empty(0) if dparameters is None else dparameters,
        )

    def quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        scale: torch.Tensor | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        empty = fakes.quantize(x, residual, weight, scale, *rest)
        if x.numel() == 0:
            return empty[0], empty[1], empty[2].fill_(1.0)
        *options, dtype = rest
        y, s, row_scales = self._kernels.quantize(
            as_rows(x), _optional_rows(residual), weight, scale, Options(*options), dtype
        )
        return (
            reshaped(y, x.shape),
            empty[1] if s is None else reshaped(s, x.shape),
            empty[2] if row_scales is None else reshaped(row_scales, empty[2].shape),
        )


def _optional_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else as_rows(x)


def _triton() -> ModuleType:
    from rmsnorm_fused.impl import triton

    return triton


TRITON = _TritonOperators()


def _can_open(x: torch.Tensor) -> bool:
    # A tiling is for a number of columns, and Triton's interpreter has no kernel to show.
    return x.device.type == "cuda" and isinstance(x.shape[-1], int) and not _triton().interpreted()


def _open_to_compilers() -> None:
    """Let a compiler see the launches of Triton's kernels instead of the operators.

    This does for operators with a derivative and rules for vmap what ``torch.library.triton_op`` does for new ones.
    Inductor then launches a kernel from the code that it writes, without a call of the operator from Python.
    """

    def opened(run: Callable[..., Any], mode: Any, operator: Any, types: Any, arguments: Any, named: Any) -> Any:
        if not _can_open(arguments[0]):
            return mode.__torch_dispatch__(operator, types, arguments, named)
        from rmsnorm_fused.impl.triton_launch import recorded

        with mode, recorded():
            return run(*arguments, **named)

    for name in fakes.FAKES:
        run = functools.partial(opened, getattr(TRITON, name))
        torch.library.register_torch_dispatch(f"rmsnorm_fused::triton_{name}", functionalisation(), run, lib=LIBRARY)


for _name in fakes.FAKES:
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(f"triton_{_name}", getattr(TRITON, _name), _key)
_open_to_compilers()

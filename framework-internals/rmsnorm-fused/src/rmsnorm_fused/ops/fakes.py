"""Fake kernels: the shapes, dtypes and strides of the operators' results, without computing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rmsnorm_fused.validation import wide_dtype


def contiguous_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous tensor of the shape of ``x``, in its dtype or another."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def kept_of(x: torch.Tensor, centred: bool) -> torch.Tensor:
    """An uninitialised tensor for rstd, or mean and rstd, of each row of ``x``, in the accumulating dtype."""
    return x.new_empty((*x.shape[:-1], 2) if centred else x.shape[:-1], dtype=wide_dtype(x.dtype))


def forward(
    x: torch.Tensor, weight: object, bias: object, eps: float, weight_offset: float, llama: bool, centred: bool
) -> tuple[torch.Tensor, ...]:
    """(y, kept)."""
    return contiguous_like(x), kept_of(x, centred)


def forward_add(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """(y, s, kept)."""
    y, kept = forward(x, *rest)
    return y, contiguous_like(x, residual.dtype), kept


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    kept: torch.Tensor,
    weight_offset: float,
    llama: bool,
    centred: bool,
    needs_dparameters: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """(dx, dresidual, dparameters); dresidual is empty unless s is wider than dy."""
    dresidual = s.new_empty(0) if dy.dtype == s.dtype else contiguous_like(s)
    dparameters = s.new_empty(0)
    if needs_dparameters and (centred or weight is not None):
        dtype = kept.dtype if weight is None else weight.dtype
        dparameters = s.new_empty((2, s.shape[-1]) if centred else s.shape[-1:], dtype=dtype)
    return contiguous_like(s, dy.dtype), dresidual, dparameters


def quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    llama: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """(y, s, row_scales); s is empty without a residual, row_scales is empty with a static scale."""
    s = x.new_empty(0) if residual is None else contiguous_like(x)
    row_scales = x.new_empty((*x.shape[:-1], 1) if scale is None else (0,), dtype=torch.float32)
    return contiguous_like(x, dtype), s, row_scales


FAKES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "forward": forward,
    "forward_add": forward_add,
    "backward": backward,
    "quantize": quantize,
}

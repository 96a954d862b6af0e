"""Fake kernels: the shapes, dtypes and strides of the operators' results, without computing them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rmsnorm_fused.validation import wide_dtype


def contiguous_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised contiguous tensor of the shape of ``x``, in its dtype or another."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def rstd_like(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor for one number per row of ``x``, in the accumulating dtype."""
    return x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


def forward(x: torch.Tensor, weight: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, ...]:
    """(y, rstd)."""
    return contiguous_like(x), rstd_like(x)


def forward_add(x: torch.Tensor, residual: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    """(y, s, rstd)."""
    return contiguous_like(x), contiguous_like(x, residual.dtype), rstd_like(x)


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    llama: bool,
    needs_dweight: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """(dx, dweight); dweight is empty unless ``needs_dweight``, because a schema cannot return an optional tensor."""
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else s.new_empty(0)
    return contiguous_like(s), dweight


def backward_add(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    needs_dweight: bool,
) -> tuple[torch.Tensor, ...]:
    """(dx, dresidual, dweight)."""
    dresidual, dweight = backward(dy, ds, s, weight, rstd, weight_offset, False, needs_dweight, True)
    return contiguous_like(dy), dresidual, dweight


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


def layer_forward(x: torch.Tensor, residual: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, ...]:
    """(y, s, moments); s is empty without a residual, moments are the mean and rstd of each row."""
    s = x.new_empty(0) if residual is None else contiguous_like(x)
    return contiguous_like(x), s, x.new_empty((*x.shape[:-1], 2), dtype=wide_dtype(x.dtype))


def layer_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    needs_dparameters: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """(dx, dparameters): dweight and dbias as one tensor (2, N), which is empty unless it is needed."""
    if not needs_dparameters:
        return contiguous_like(s), s.new_empty(0)
    return contiguous_like(s), s.new_empty((2, s.shape[-1]), dtype=moments.dtype if weight is None else weight.dtype)


FAKES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "forward": forward,
    "forward_add": forward_add,
    "backward": backward,
    "backward_add": backward_add,
    "quantize": quantize,
    "layer_forward": layer_forward,
    "layer_backward": layer_backward,
}

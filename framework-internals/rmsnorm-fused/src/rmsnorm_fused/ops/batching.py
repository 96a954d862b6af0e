"""Batching rules of the operators for ``torch.vmap``: the mapped dimension becomes one more dimension of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rmsnorm_fused.impl import reference
from rmsnorm_fused.ops.fakes import FAKES
from rmsnorm_fused.options import Options
from rmsnorm_fused.validation import wide_dtype

Dim = int | None


def register(library: torch.library.Library, operator: Callable[[str], Any]) -> None:
    """Register the batching rules of one family of operators."""
    rules = _Rules(operator)
    for name in FAKES:
        torch.library.register_vmap(operator(name).default, getattr(rules, name), lib=library)


class _Rules:
    """The batching rule of each operator: (info, mapped dimensions, *arguments) -> (results, mapped dimensions)."""

    def __init__(self, operator: Callable[[str], Any]) -> None:
        self._operator = operator

    def forward(self, info: Any, dims: tuple[Dim, ...], x: Any, weight: Any, *options: Any) -> Any:
        x = _first(x, dims[0], info.batch_size)
        if dims[1] is None:
            return self._operator("forward")(x, weight, *options), (0, 0)
        return _by_formula(x, _broadcastable(x, weight, dims[1]), Options(*options)), (0, 0)

    def forward_add(self, info: Any, dims: tuple[Dim, ...], x: Any, residual: Any, weight: Any, *options: Any) -> Any:
        x, residual = _first(x, dims[0], info.batch_size), _first(residual, dims[1], info.batch_size)
        if dims[2] is None:
            return self._operator("forward_add")(x, residual, weight, *options), (0, 0, 0)
        s = x + residual
        y, rstd = _by_formula(s, _broadcastable(s, weight, dims[2]), Options(*options))
        return (y, s, rstd), (0, 0, 0)

    def backward(
        self, info: Any, dims: tuple[Dim, ...], dy: Any, ds: Any, s: Any, weight: Any, rstd: Any, *rest: Any
    ) -> Any:
        weight_offset, llama, needs_dweight, deterministic = rest
        dy, s, rstd = (_first(t, dim, info.batch_size) for t, dim in ((dy, dims[0]), (s, dims[2]), (rstd, dims[4])))
        ds = None if ds is None else _first(ds, dims[1], info.batch_size)
        backward = self._operator("backward")
        if dims[3] is None:
            dx = backward(dy, ds, s, weight, rstd, weight_offset, llama, False, deterministic)[0]
        else:
            dx = _dx_with_mapped_weight(backward, dy, ds, s, _broadcastable(s, weight, dims[3]), rstd, *rest)
        if not needs_dweight:
            return (dx, s.new_empty(0)), (0, None)
        wide = rstd.dtype
        normalised = _rounded(s.to(wide) * rstd.unsqueeze(-1), s.dtype, llama)
        terms = dy.to(wide) * normalised
        dweight = terms.flatten(1, -2).sum(1) if terms.dim() > 2 else terms
        return (dx, dweight.to(weight.dtype)), (0, 0)

    def backward_add(
        self, info: Any, dims: tuple[Dim, ...], dy: Any, ds: Any, s: Any, weight: Any, rstd: Any, *rest: Any
    ) -> Any:
        weight_offset, needs_dweight = rest
        dims = (*dims[:5], None, None, None, None)
        rest = (weight_offset, False, needs_dweight, True)
        (dresidual, dweight), (_, dweight_dim) = self.backward(info, dims, dy, ds, s, weight, rstd, *rest)
        return (dresidual.to(dy.dtype), dresidual, dweight), (0, 0, dweight_dim)

    def quantize(
        self, info: Any, dims: tuple[Dim, ...], x: Any, residual: Any, weight: Any, scale: Any, *rest: Any
    ) -> Any:
        if dims[2] is not None or dims[3] is not None:
            raise NotImplementedError(
                "rms_norm(out_dtype=...) under vmap: expected one weight and one scale for the whole batch"
            )
        x = _first(x, dims[0], info.batch_size)
        residual = None if residual is None else _first(residual, dims[1], info.batch_size)
        y, s, row_scales = self._operator("quantize")(x, residual, weight, scale, *rest)
        return (y, s, row_scales), (0, None if residual is None else 0, None if scale is not None else 0)

    def layer_forward(
        self, info: Any, dims: tuple[Dim, ...], x: Any, residual: Any, weight: Any, bias: Any, eps: float
    ) -> Any:
        x = _first(x, dims[0], info.batch_size)
        residual = None if residual is None else _first(residual, dims[1], info.batch_size)
        of_results = (0, None if residual is None else 0, 0)
        if dims[2] is None and dims[3] is None:
            return self._operator("layer_forward")(x, residual, weight, bias, eps), of_results
        s = x if residual is None else x + residual
        weight, bias = (
            t if t is None or dim is None else _broadcastable(x, t, dim)
            for t, dim in ((weight, dims[2]), (bias, dims[3]))
        )
        moments = self._operator("layer_forward")(s, None, None, None, eps)[2]
        y = reference.layer_norm(s, None, weight, bias, eps)
        return (y, x.new_empty(0) if residual is None else s, moments), of_results

    def layer_backward(
        self, info: Any, dims: tuple[Dim, ...], dy: Any, ds: Any, s: Any, weight: Any, moments: Any, *rest: Any
    ) -> Any:
        needs_dparameters, deterministic = rest
        dy, s, moments = (_first(t, d, info.batch_size) for t, d in ((dy, dims[0]), (s, dims[2]), (moments, dims[4])))
        ds = None if ds is None else _first(ds, dims[1], info.batch_size)
        backward, wide = self._operator("layer_backward"), moments.dtype
        if dims[3] is None:
            dx = backward(dy, ds, s, weight, moments, False, deterministic)[0]
        else:  # dy · weight without a weight, in the accumulating dtype, so that dx is rounded once
            g = dy.to(wide) * _broadcastable(s, weight, dims[3]).to(wide)
            ds = None if ds is None else ds.to(wide)
            dx = backward(g, ds, s.to(wide), None, moments, False, deterministic)[0].to(s.dtype)
        if not needs_dparameters:
            return (dx, s.new_empty(0)), (0, None)
        mean, rstd = moments.unsqueeze(-2).unbind(-1)
        terms = torch.stack([dy.to(wide) * ((s.to(wide) - mean) * rstd), dy.to(wide)], 1)
        dparameters = terms.flatten(2, -2).sum(2) if terms.dim() > 3 else terms
        return (dx, dparameters if weight is None else dparameters.to(weight.dtype)), (0, 0)


def _first(x: torch.Tensor, dim: Dim, size: int) -> torch.Tensor:
    """X with the mapped dimension first; expanded if it is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _broadcastable(x: torch.Tensor, weight: torch.Tensor, dim: Dim) -> torch.Tensor:
    """A mapped weight, reshaped from (B, N) to (B, 1, ..., 1, N), which broadcasts to x (B, ..., N)."""
    weight = weight.movedim(dim or 0, 0)
    return weight.reshape(weight.shape[0], *(1,) * (x.dim() - 2), weight.shape[-1])


def _dx_with_mapped_weight(
    backward: Any,
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    weight_offset: float,
    llama: bool,
    _needs_dweight: bool,
    deterministic: bool,
) -> torch.Tensor:
    """Dx if the weight is mapped: the operator gets dy·weight and no weight.

    It gets dy·weight and ds in the accumulating dtype, so that dx is rounded once.
    """
    wide = rstd.dtype
    g = _rounded(dy.to(wide) * (weight.to(wide) + weight_offset), s.dtype, llama)
    ds = None if ds is None else ds.to(wide)
    return backward(g, ds, s.to(wide), None, rstd, 0.0, False, False, deterministic)[0].to(s.dtype)


def _rounded(values: torch.Tensor, dtype: torch.dtype, llama: bool) -> torch.Tensor:
    """Round to the dtype of x and back, if the kernel rounds there."""
    return values.to(dtype).to(values.dtype) if llama else values


def _by_formula(s: torch.Tensor, weight: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Y and rstd if the weight is mapped, which the kernels do not support."""
    y = reference.rms_norm(s, None, weight, options)
    assert isinstance(y, torch.Tensor)
    wide = s.to(wide_dtype(s.dtype))
    return y, torch.rsqrt(wide.square().mean(-1) + options.eps)

"""Batching rules of the operators for ``torch.vmap``: the mapped dimension becomes one more dimension of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rmsnorm_fused.impl import reference
from rmsnorm_fused.ops.fakes import FAKES
from rmsnorm_fused.options import Options

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

    def forward(self, info: Any, dims: tuple[Dim, ...], x: Any, weight: Any, bias: Any, *options: Any) -> Any:
        x = _first(x, dims[0], info.batch_size)
        if dims[1] is None and dims[2] is None:
            return self._operator("forward")(x, weight, bias, *options), (0, 0)
        return self._by_formula(x, (weight, bias), dims[1:3], Options(*options)), (0, 0)

    def forward_add(
        self, info: Any, dims: tuple[Dim, ...], x: Any, residual: Any, weight: Any, bias: Any, *options: Any
    ) -> Any:
        x, residual = _first(x, dims[0], info.batch_size), _first(residual, dims[1], info.batch_size)
        if dims[2] is None and dims[3] is None:
            return self._operator("forward_add")(x, residual, weight, bias, *options), (0, 0, 0)
        s = x + residual
        y, kept = self._by_formula(s, (weight, bias), dims[2:4], Options(*options))
        return (y.to(x.dtype), s, kept), (0, 0, 0)

    def _by_formula(
        self, s: torch.Tensor, parameters: tuple[Any, Any], dims: tuple[Dim, ...], options: Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Y and what is kept of the rows if the weight or the bias is mapped, which the kernels do not support."""
        weight, bias = (
            parameter if dim is None else _broadcastable(s, parameter, dim)
            for parameter, dim in zip(parameters, dims, strict=True)
        )
        y = reference.normalise(s, None, weight, bias, options)
        assert isinstance(y, torch.Tensor)
        return y, self._operator("forward")(s, None, None, *options)[1]

    def backward(
        self, info: Any, dims: tuple[Dim, ...], dy: Any, ds: Any, s: Any, weight: Any, kept: Any, *rest: Any
    ) -> Any:
        weight_offset, llama, centred, needs_dparameters, deterministic = rest
        dy, s, kept = (_first(t, dim, info.batch_size) for t, dim in ((dy, dims[0]), (s, dims[2]), (kept, dims[4])))
        ds = None if ds is None else _first(ds, dims[1], info.batch_size)
        backward, wide, nothing = self._operator("backward"), kept.dtype, s.new_empty(0)
        if dims[3] is None:
            dx, dresidual, _ = backward(dy, ds, s, weight, kept, weight_offset, llama, centred, False, deterministic)
        else:  # dy·weight without a weight, in the accumulating dtype, so that dx is rounded once
            g = _rounded(dy.to(wide) * (_broadcastable(s, weight, dims[3]).to(wide) + weight_offset), s.dtype, llama)
            ds = None if ds is None else ds.to(wide)
            sum_gradient = backward(g, ds, s.to(wide), None, kept, 0.0, False, centred, False, deterministic)[0]
            dx, dresidual = sum_gradient.to(dy.dtype), nothing if dy.dtype == s.dtype else sum_gradient.to(s.dtype)
        of_residual = None if dy.dtype == s.dtype else 0
        if not needs_dparameters:
            return (dx, dresidual, nothing), (0, of_residual, None)
        mean, rstd = kept.unsqueeze(-2).unbind(-1) if centred else (0.0, kept.unsqueeze(-1))
        terms = dy.to(wide) * _rounded((s.to(wide) - mean) * rstd, s.dtype, llama)
        if centred:
            terms = torch.stack([terms, dy.to(wide)], 1)
        row = 2 if centred else 1  # the first dimension of the rows
        dparameters = terms.flatten(row, -2).sum(row) if terms.dim() > row + 1 else terms
        return (dx, dresidual, dparameters.to(wide if weight is None else weight.dtype)), (0, of_residual, 0)

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


def _first(x: torch.Tensor, dim: Dim, size: int) -> torch.Tensor:
    """X with the mapped dimension first; expanded if it is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _broadcastable(x: torch.Tensor, weight: torch.Tensor, dim: Dim) -> torch.Tensor:
    """A mapped weight, reshaped from (B, N) to (B, 1, ..., 1, N), which broadcasts to x (B, ..., N)."""
    weight = weight.movedim(dim or 0, 0)
    return weight.reshape(weight.shape[0], *(1,) * (x.dim() - 2), weight.shape[-1])


def _rounded(values: torch.Tensor, dtype: torch.dtype, llama: bool) -> torch.Tensor:
    """Round to the dtype of x and back, if the kernel rounds there."""
    return values.to(dtype).to(values.dtype) if llama else values

"""Both norms as formulas in plain PyTorch: the reference for the kernels, and the back end that runs on any device."""

from __future__ import annotations

import torch

from rmsnorm_fused.options import LARGEST_FLOAT8, Options
from rmsnorm_fused.validation import wide_dtype


def normalise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: Options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """C / sqrt(mean(c²) + eps) · (weight + offset) + bias over the last dimension; autograd differentiates each step.

    C is s, or s - mean(s) if centred.

    Returns:
        y (..., N), contiguous, in the dtype of ``x``; with a residual (y, s).
    """
    s = x if residual is None else x + residual
    y = _normalised(s, weight, bias, options).to(x.dtype).contiguous()
    return y if residual is None else (y, s)


def _normalised(
    s: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: Options
) -> torch.Tensor:
    """Y in the accumulating dtype."""
    y, _ = _without_weight(s, options)
    if options.llama:
        y = y.to(s.dtype).to(y.dtype)
    if weight is not None:
        w = weight.to(y.dtype)
        y = y * (w + options.weight_offset if options.weight_offset else w)
    return y if bias is None else y + bias.to(y.dtype)


def _without_weight(s: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """C · rstd and rstd (..., 1) in the accumulating dtype."""
    wide = s.to(wide_dtype(s.dtype))
    c = wide - wide.mean(-1, keepdim=True) if options.centred else wide
    rstd = torch.rsqrt(c.square().mean(-1, keepdim=True) + options.eps)
    return c * rstd, rstd


def quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised rows divided by a scale and rounded to float8.

    Returns:
        y (..., N), contiguous, in ``dtype``; s (x itself without a residual); and the float32 scales (..., 1) that were
        used.
    """
    s = x if residual is None else x + residual
    y = _normalised(s, weight, None, options)
    scale = row_scales(y) if scale is None else scale.reshape(())
    return (y / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(dtype).contiguous(), s, scale


def row_scales(y: torch.Tensor) -> torch.Tensor:
    """Each row's largest |y| / 448, (..., 1); 1 for a row of zeros, NaN for a row with a NaN."""
    if y.shape[-1] == 0:
        return y.new_ones((*y.shape[:-1], 1))
    scales = y.abs().amax(-1, keepdim=True) / LARGEST_FLOAT8
    return torch.where(scales == 0, 1.0, scales)


def gradients(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of y with respect to s and the parameters, as a formula that autograd can differentiate again.

    With r = rstd, n = c·r and g = dy · (weight + offset): dx = r·(g - n·mean(g·n)) + ds, and r·(g - mean(g) -
    n·mean(g·n)) + ds if centred; dweight is the sum over the rows of dy·n, dbias of dy. With ``options.llama``, g and
    the n of dweight are rounded to the dtype of s, as the kernels and autograd round them. Higher derivatives treat a
    rounding as the identity, as autograd treats the one in y.

    Returns:
        dx like s; dweight in the dtype of the weight, None without one; dbias in that or the accumulating dtype, None
        unless centred.
    """
    n, rstd = _without_weight(s, options)
    wide = n.dtype
    dy_ = dy.to(wide)
    g = dy_ if weight is None else dy_ * (weight.to(wide) + options.weight_offset)
    if options.llama:
        g = g.to(s.dtype).to(wide)
    inner = g - g.mean(-1, keepdim=True) if options.centred else g
    dx = (rstd * (inner - n * (g * n).mean(-1, keepdim=True))).to(s.dtype)
    dx = dx if ds is None else dx + ds
    terms = dy_ * (n.to(s.dtype).to(wide) if options.llama else n)
    dweight = None if weight is None else _over_rows(terms).to(weight.dtype)
    dbias = _over_rows(dy_).to(wide if weight is None else weight.dtype) if options.centred else None
    return dx, dweight, dbias


def _over_rows(terms: torch.Tensor) -> torch.Tensor:
    return terms.flatten(0, -2).sum(0) if terms.dim() > 1 else terms

"""Both norms as formulas in plain PyTorch: the reference for the kernels, and the back end that runs on any device."""

from __future__ import annotations

import torch

from rmsnorm_fused.options import LARGEST_FLOAT8, Options
from rmsnorm_fused.validation import wide_dtype


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, options: Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """S / sqrt(mean(s²) + eps) · (weight + offset) over the last dimension; autograd differentiates each operation.

    Returns:
        y (..., N), contiguous, in the dtype of ``x``; with a residual (y, s).
    """
    s = x if residual is None else x + residual
    y = _normalised(s, weight, options).to(x.dtype).contiguous()
    return y if residual is None else (y, s)


def _normalised(s: torch.Tensor, weight: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Y in the accumulating dtype."""
    wide = s.to(wide_dtype(s.dtype))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + options.eps)
    if options.llama:
        y = y.to(s.dtype).to(wide.dtype)
    if weight is not None:
        w = weight.to(y.dtype)
        y = y * (w + options.weight_offset if options.weight_offset else w)
    return y


def layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """(s - mean(s)) / sqrt(var(s) + eps) · weight + bias over the last dimension, differentiated as above.

    Returns:
        y (..., N), contiguous, in the dtype of ``x``; with a residual (y, s).
    """
    s = x if residual is None else x + residual
    y, _ = _standardised(s, eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    y = y.to(x.dtype).contiguous()
    return y if residual is None else (y, s)


def _standardised(s: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(s - mean) · rstd and rstd in the accumulating dtype."""
    wide = s.to(wide_dtype(s.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


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
    y = _normalised(s, weight, options)
    if scale is None:
        scale = row_scales(y)
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of y with respect to s and weight, as a formula that autograd can differentiate again.

    With r = rstd, n = s·r and g = dy · (weight + offset): dx = r·(g - n·mean(g·n)) + ds, and dweight is the sum over
    the rows of dy·n. With ``options.llama``, g and the n of dweight are rounded to the dtype of s, as the kernels and
    autograd round them. Higher derivatives treat a rounding as the identity, as autograd treats the one in y.

    Returns:
        dx like s, and dweight (None without a weight).
    """
    wide = wide_dtype(s.dtype)
    s_, dy_ = s.to(wide), dy.to(wide)
    rstd = torch.rsqrt(s_.square().mean(-1, keepdim=True) + options.eps)
    normalised = s_ * rstd
    g = dy_ if weight is None else dy_ * (weight.to(wide) + options.weight_offset)
    if options.llama:
        g = g.to(s.dtype).to(wide)
    dx = (rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))).to(s.dtype)
    dx = dx if ds is None else dx + ds
    if weight is None:
        return dx, None
    terms = dy_ * (normalised.to(s.dtype).to(wide) if options.llama else normalised)
    return dx, _over_rows(terms).to(weight.dtype)


def layer_gradients(
    dy: torch.Tensor, ds: torch.Tensor | None, s: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for :func:`layer_norm`: dx = r·(g - mean(g) - n·mean(g·n)) + ds, and the gradients of both parameters.

    Returns:
        dx like s, and dweight and dbias in the dtype of the weight, or the accumulating one.
    """
    n, rstd = _standardised(s, eps)
    dy_ = dy.to(n.dtype)
    g = dy_ if weight is None else dy_ * weight.to(n.dtype)
    dx = (rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))).to(s.dtype)
    dtype = n.dtype if weight is None else weight.dtype
    return dx if ds is None else dx + ds, _over_rows(dy_ * n).to(dtype), _over_rows(dy_).to(dtype)


def _over_rows(terms: torch.Tensor) -> torch.Tensor:
    return terms.flatten(0, -2).sum(0) if terms.dim() > 1 else terms

"""RMSNorm as a formula in plain PyTorch: what the kernels are held against, and the back end that runs anywhere."""

from __future__ import annotations

import torch

from rmsnorm_fused.options import LARGEST_FLOAT8, Options
from rmsnorm_fused.validation import wide_dtype


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, options: Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """S / sqrt(mean(s²) + eps) · (weight + offset) over the last dimension; autograd differentiates each operation.

    Args:
        x: (..., N).
        residual: like x, or None; s is x + residual in the dtype of x, or x.
        weight: (N,) or None.
        options: eps, the weight's offset, and where to round.

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


def quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The normalised rows divided by a scale and rounded to float8.

    Args:
        x: (..., N).
        residual: like x, or None.
        weight: (N,) or None.
        scale: float32, one element; None: each row's own, its largest |y| / 448 (1 for a row of zeros).
        options: eps, the weight's offset, and where to round before.
        dtype: ``torch.float8_e4m3fn``.

    Returns:
        y (..., N), contiguous, of ``dtype``, s (x itself without a residual), and the scales (..., 1) float32 that were
        used.
    """
    s = x if residual is None else x + residual
    y = _normalised(s, weight, options)
    if scale is None:
        largest = y.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / LARGEST_FLOAT8, 1.0)
    return (y / scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(dtype).contiguous(), s, scale


def second_gradients(
    u: torch.Tensor | None,
    v: torch.Tensor | None,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of L = Σ u · dx + Σ v · dweight with respect to dy, x and weight: what double backward needs.

    With r = rstd (a function of x: ∂r/∂x = -r³x/N), g = dy · (weight + offset) and brackets for sums over a row, a row
    adds L = r⟨u,g⟩ - r³⟨u,x⟩⟨g,x⟩/N + r⟨v·dy,x⟩.

    Args:
        u: gradient of dx, (..., N); None is zero.
        v: gradient of dweight, (N,); None is zero.
        dy: gradient of y, (..., N).
        x: (..., N).
        weight: (N,) or None.
        rstd: (...), from the forward pass.
        weight_offset: added to the weight.

    Returns:
        Gradients of dy, of x and, unless there is none, of weight.
    """
    wide = rstd.dtype
    n = x.shape[-1]
    r, x_, dy_ = rstd.unsqueeze(-1), x.to(wide), dy.to(wide)
    u_ = torch.zeros_like(x_) if u is None else u.to(wide)
    v_ = torch.zeros_like(x_[..., :1]) if v is None else v.to(wide)
    w = torch.ones_like(x_[..., :1]) if weight is None else weight.to(wide) + weight_offset
    g = dy_ * w
    ug, ux, gx, vdyx = ((a * b).sum(-1, keepdim=True) for a, b in ((u_, g), (u_, x_), (g, x_), (v_ * dy_, x_)))
    along_g = r * u_ - r**3 * ux * x_ / n
    for_dy = along_g * w + r * v_ * x_
    for_x = r * v_ * dy_ - r**3 * (u_ * gx + g * ux) / n + x_ * (3 * r**5 * ux * gx / n**2 - r**3 * (ug + vdyx) / n)
    for_weight = None if weight is None else (along_g * dy_).flatten(0, -2).sum(0).to(weight.dtype)
    return for_dy.to(dy.dtype), for_x.to(x.dtype), for_weight

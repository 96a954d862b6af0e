"""RMSNorm as a formula in plain PyTorch: what the kernels are held against, and the back end that runs anywhere."""

from __future__ import annotations

import torch

from rmsnorm_fused.validation import wide_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """X / sqrt(mean(x²) + eps) · weight over the last dimension; autograd differentiates each operation.

    Args:
        x: (..., N).
        weight: (N,) or None.
        eps: added to the mean square.

    Returns:
        (..., N) in the dtype of ``x``, rounded to it once.
    """
    wide = x.to(wide_dtype(x.dtype))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)


def second_gradients(
    u: torch.Tensor | None,
    v: torch.Tensor | None,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of L = Σ u · dx + Σ v · dweight with respect to dy, x and weight: what double backward needs.

    With r = rstd (a function of x: ∂r/∂x = -r³x/N), g = dy · weight and brackets for sums over a row, a row adds
    L = r⟨u,g⟩ - r³⟨u,x⟩⟨g,x⟩/N + r⟨v·dy,x⟩.

    Args:
        u: gradient of dx, (..., N); None is zero.
        v: gradient of dweight, (N,); None is zero.
        dy: gradient of y, (..., N).
        x: (..., N).
        weight: (N,) or None.
        rstd: (...), from the forward pass.

    Returns:
        Gradients of dy, of x and, unless there is none, of weight.
    """
    wide = rstd.dtype
    n = x.shape[-1]
    r, x_, dy_ = rstd.unsqueeze(-1), x.to(wide), dy.to(wide)
    u_ = torch.zeros_like(x_) if u is None else u.to(wide)
    v_ = torch.zeros_like(x_[..., :1]) if v is None else v.to(wide)
    w = torch.ones_like(x_[..., :1]) if weight is None else weight.to(wide)
    g = dy_ * w
    ug, ux, gx, vdyx = ((a * b).sum(-1, keepdim=True) for a, b in ((u_, g), (u_, x_), (g, x_), (v_ * dy_, x_)))
    along_g = r * u_ - r**3 * ux * x_ / n
    for_dy = along_g * w + r * v_ * x_
    for_x = r * v_ * dy_ - r**3 * (u_ * gx + g * ux) / n + x_ * (3 * r**5 * ux * gx / n**2 - r**3 * (ug + vdyx) / n)
    for_weight = None if weight is None else (along_g * dy_).flatten(0, -2).sum(0).to(weight.dtype)
    return for_dy.to(dy.dtype), for_x.to(x.dtype), for_weight

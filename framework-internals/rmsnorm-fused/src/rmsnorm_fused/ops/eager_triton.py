"""Entry points of Triton's kernels for ordinary eager calls, as the compiled extension has them.

They pass the dispatcher by: with kernels and a derivative that are registered from Python, it takes longer than all
else in a call of a small batch. A call that a mode, a transform, a subclass or a compiler could see is not ordinary.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rmsnorm_fused.ops import operators
from rmsnorm_fused.ops.rows import TRITON
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import nothing_watches
from rmsnorm_fused.validation import resolve_eps

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(
    x: Any, residual: Any, weight: Any, eps: Any, weight_offset: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """The result of :func:`rmsnorm_fused.rms_norm`; None for arguments that are not ordinary."""
    if not _is_ordinary(x, residual, (weight,), eps) or type(weight_offset) is not float:
        return None
    if not math.isfinite(weight_offset):
        return None
    return _call(x, residual, weight, None, Options(resolve_eps(eps, x.dtype), weight_offset))


def layer_norm(
    x: Any, residual: Any, weight: Any, bias: Any, eps: Any
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """The result of :func:`rmsnorm_fused.layer_norm`; None for arguments that are not ordinary."""
    if not _is_ordinary(x, residual, (weight, bias), eps):
        return None
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return None
    return _call(x, residual, weight, bias, Options(1e-5 if eps is None else eps, centred=True))


def _is_ordinary(x: Any, residual: Any, parameters: tuple[Any, ...], eps: Any) -> bool:
    if type(x) not in _PLAIN or not (eps is None or (type(eps) is float and 0 <= eps < math.inf)):
        return False
    if x.layout != torch.strided or x.dim() == 0 or x.dtype not in _DTYPES or not TRITON.takes(x):
        return False
    if residual is not None and (
        type(residual) not in _PLAIN or residual.dtype != x.dtype or residual.shape != x.shape
    ):
        return False
    for parameter in parameters:
        if parameter is not None and (
            type(parameter) not in _PLAIN or parameter.dtype not in _DTYPES or parameter.shape != x.shape[-1:]
        ):
            return False
    others = (residual, *parameters)
    if x.is_neg() or any(other is not None and (other.is_neg() or other.device != x.device) for other in others):
        return False  # a kernel would read what lies in memory; the dispatcher negates it first
    return nothing_watches()


def _call(x: Any, residual: Any, weight: Any, bias: Any, options: Options) -> Any:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight, bias)):
        return _Norm.apply(x, residual, weight, bias, options)  # type: ignore[no-untyped-call]
    y, s, _ = TRITON.normalise(x, residual, weight, bias, options)
    return y if residual is None else (y, s)


class _Norm(torch.autograd.Function):
    """Both norms, with the derivatives of their operators."""

    @staticmethod
    def forward(ctx: Any, x: Any, residual: Any, weight: Any, bias: Any, options: Options) -> Any:
        y, s, kept = TRITON.normalise(x, residual, weight, bias, options)
        ctx.options, ctx.dtype = options, x.dtype
        ctx.save_for_backward(s, weight, kept)
        ctx.set_materialize_grads(False)
        return y if residual is None else (y, s)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None = None) -> tuple[Any, ...]:
        results = operators.gradients("triton", ctx, dy, ds, any(ctx.needs_input_grad[2:4]))
        needed = ctx.needs_input_grad[:4]
        return *(result if wanted else None for result, wanted in zip(results, needed, strict=True)), None

"""The cross-entropy of a linear classifier, whose logits are replaced in place by their gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators import calls
from custom_ops.operators.checks import check_cross_entropy, check_linear_cross_entropy, wide
from custom_ops.operators.registration import Rules, to_lower

Reduction = Literal["mean", "sum", "none"]
Mode = Literal["fast", "least_memory"]

# A 16-bit matrix product on a GPU is slow if a row of its result is not aligned to 16 bytes. Such a row is padded to a
# multiple of this many classes.
_PADDING = 64

# The smallest chunk of "least_memory" in rows, so that its matrix products still fill the machine.
_SMALLEST_CHUNK = 1024


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    mode: Mode = "fast",
) -> Tensor:
    """Compute the cross-entropy of the logits x·Wᵀ + b, and with it the gradient of the logits.

    loss_n = log Σ_v exp(logits_nv) − logits_n,target, averaged over the rows that are not ignored. If a gradient is
    needed, one kernel computes the losses of the logits and writes softmax(logits) − onehot(target) over them, so the
    backward pass is two matrix products. The logits have the dtype of ``x`` and are computed with in float32 (float64
    for float64); they exist once, and never in float32 beside their own dtype.

    The function is ``torch.nn.functional.linear_cross_entropy`` for class indices. It takes any number of leading
    dimensions, returns the loss in float32 where torch rounds it to the dtype of the logits, and compiles into one
    graph. Under autocast, the floating-point operands are cast to its dtype. A second derivative recomputes the logits
    with torch's operators.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16.
        weight: (V, C), with the dtype and device of ``x``.
        targets: (...), int64 or int32; each is a class from 0 to V − 1, or ``ignore_index``. Any other target is an
            error on a CPU, and on a GPU makes the loss and the gradients NaN.
        bias: (V,), like ``weight``.
        ignore_index: Rows with this target have no loss and no gradient, and do not count in the mean.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"``, or ``"none"``.
        mode: ``"fast"`` keeps N·V logits until the backward pass. ``"least_memory"`` computes loss and gradients in
            the forward pass, in chunks of max(C, 1024) rows, and keeps the gradients of x and weight instead, the
            latter in float32; it adds to that gradient once per chunk, which takes longer.

    Returns:
        The loss in nats, float32, or float64 if ``x`` is: a scalar, or with ``"none"`` of the shape of ``targets``.

    Raises:
        ValueError: If the devices or shapes do not match, a target is not a class (on a CPU), or the mode or reduction
            is unknown; and for ``"none"`` with ``"least_memory"``, whose gradients are sums over rows.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = to_lower(x, dtype), to_lower(weight, dtype)
        bias = None if bias is None else to_lower(bias, dtype)
    check_linear_cross_entropy(x, weight, targets, bias, reduction, mode)
    x_NC, targets_N = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    operands = x_NC, weight, bias
    if torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands):
        function = _Fast if mode == "fast" else _LeastMemory
        loss = function.apply(*operands, targets_N, ignore_index, reduction)  # type: ignore[no-untyped-call]
    else:
        rows = len(targets_N) if mode == "fast" else _chunk_rows(weight)
        chunks = zip(_chunks(x_NC, rows), _chunks(targets_N, rows), strict=True)
        losses = [_rows(F.linear(part, weight, bias), chosen, len(weight), ignore_index) for part, chosen in chunks]
        loss = _reduce(torch.cat(losses), _count(targets_N, ignore_index), reduction)
    return loss.reshape(targets.shape) if reduction == "none" else loss


class _Fast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        ignore_index: int,
        reduction: Reduction,
    ) -> Tensor:
        padded_PC, padded_bias_P = _padded(weight_VC, bias_V)
        # Nobody else holds the logits, so the kernel may replace them, and autograd need not hear of it.
        gradient_NP = F.linear(x_NC, padded_PC, padded_bias_P)
        losses_N = _rows(gradient_NP, targets_N, len(weight_VC), ignore_index, replace=True)
        count = _count(targets_N, ignore_index)
        ctx.save_for_backward(x_NC, weight_VC, bias_V, targets_N, gradient_NP, padded_PC, count)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return _reduce(losses_N, count, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_VC, bias_V, targets_N, gradient_NP, padded_PC, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _gradients_with_graph(ctx, grad, x_NC, weight_VC, bias_V, targets_N)
        dx_NC = dweight_VC = dbias_V = None
        # The kernel's gradient is that of a row's own loss: divided by the count, small ones would vanish in float16.
        scale = grad / count if ctx.reduction == "mean" else grad.unsqueeze(-1) if ctx.reduction == "none" else grad
        if ctx.needs_input_grad[0]:
            dx_NC = ((gradient_NP @ padded_PC).to(scale.dtype) * scale).to(x_NC.dtype)
        if ctx.needs_input_grad[1]:
            scaled_NC = (x_NC.to(scale.dtype) * scale).to(x_NC.dtype)
            dweight_VC = (gradient_NP.t() @ scaled_NC)[: len(weight_VC)]
        if bias_V is not None and ctx.needs_input_grad[2]:
            dbias_V = (gradient_NP[:, : len(weight_VC)].to(scale.dtype) * scale).sum(0).to(bias_V.dtype)
        return dx_NC, dweight_VC, dbias_V, None, None, None


class _LeastMemory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        ignore_index: int,
        reduction: Reduction,
    ) -> Tensor:
        padded_PC, padded_bias_P = _padded(weight_VC, bias_V)
        rows, sum_dtype = _chunk_rows(weight_VC), wide(x_NC.dtype)
        losses, dx = [], []
        dweight_PC = torch.zeros_like(padded_PC, dtype=sum_dtype)
        dbias_P = torch.zeros(len(padded_PC) if bias_V is not None else 0, dtype=sum_dtype, device=x_NC.device)
        for part_NC, chosen_N in zip(_chunks(x_NC, rows), _chunks(targets_N, rows), strict=True):
            gradient_NP = F.linear(part_NC, padded_PC, padded_bias_P)
            losses.append(_rows(gradient_NP, chosen_N, len(weight_VC), ignore_index, replace=True))
            dx.append(gradient_NP @ padded_PC)
            dweight_PC += gradient_NP.t() @ part_NC
            if bias_V is not None:
                dbias_P += gradient_NP.sum(0, dtype=sum_dtype)
        count = _count(targets_N, ignore_index)
        dx_NC = torch.cat(dx)
        ctx.save_for_backward(x_NC, weight_VC, bias_V, targets_N, dx_NC, dweight_PC, dbias_P, count)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return _reduce(torch.cat(losses), count, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_VC, bias_V, targets_N, dx_NC, dweight_PC, dbias_P, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _gradients_with_graph(ctx, grad, x_NC, weight_VC, bias_V, targets_N)
        scale = grad / count if ctx.reduction == "mean" else grad
        classes = len(weight_VC)
        return (
            (dx_NC.to(scale.dtype) * scale).to(x_NC.dtype),
            (dweight_PC[:classes] * scale).to(weight_VC.dtype),
            None if bias_V is None else (dbias_P[:classes] * scale).to(bias_V.dtype),
            None,
            None,
            None,
        )


def reference(
    x_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Compute the same with torch's operators; differentiable any number of times."""
    logits_NV = F.linear(x_NC, weight_VC, bias_V).to(wide(x_NC.dtype))
    return F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction=reduction)


def _gradients_with_graph(
    ctx: Any, grad: Tensor, x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> tuple[Tensor | None, ...]:
    # Separate views: if one operand is computed from another, autograd would add its gradient to that of the other.
    operands = [None if operand is None else operand.view_as(operand) for operand in (x_NC, weight_VC, bias_V)]
    x, weight, bias = operands
    assert x is not None
    assert weight is not None
    loss = reference(x, weight, targets_N, bias, ctx.ignore_index, ctx.reduction)
    needed = ctx.needs_input_grad[:3]
    asked = [operand for operand, wanted in zip(operands, needed, strict=True) if operand is not None and wanted]
    found = iter(torch.autograd.grad(loss, asked, grad, create_graph=True))
    return *(next(found) if wanted else None for wanted in needed), None, None, None


def _rows(logits: Tensor, targets: Tensor, classes: int, ignore_index: int, *, replace: bool = False) -> Tensor:
    """The loss of each row; with ``replace``, the logits become their gradient."""
    name = "cross_entropy_gradient_" if replace else "cross_entropy"
    operator = getattr(torch.ops.custom_ops, name).default if is_dynamo_compiling() else getattr(calls, name)
    return operator(logits, targets, classes, ignore_index)


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum()


def _reduce(losses: Tensor, count: Tensor, reduction: Reduction) -> Tensor:
    return losses if reduction == "none" else losses.sum() / count if reduction == "mean" else losses.sum()


def _padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    missing = -len(weight) % _PADDING
    if not weight.is_cuda or weight.element_size() > 2 or len(weight) * weight.element_size() % 16 == 0:
        return weight, bias
    return F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


def _chunk_rows(weight: Tensor) -> int:
    """As many rows as the model is wide: their logits then take the bytes of the weight."""
    return max(weight.shape[1], _SMALLEST_CHUNK)


def _chunks(tensor: Tensor, rows: int) -> list[Tensor]:
    return [tensor[first : first + rows] for first in range(0, max(len(tensor), 1), max(rows, 1))]


def _fake(logits: Tensor, targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    check_cross_entropy(logits, targets, classes, ignore_index)
    return logits.new_empty(logits.shape[:1], dtype=wide(logits.dtype))


RULES = (Rules("cross_entropy", _fake), Rules("cross_entropy_gradient_", _fake))

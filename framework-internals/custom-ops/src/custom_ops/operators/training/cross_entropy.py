"""The cross-entropy of a linear classifier, whose logits are replaced in place by their gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators.calls import calls
from custom_ops.operators.checks import check_classes, check_cross_entropy, check_linear_cross_entropy, explain, wide
from custom_ops.operators.registration import Rules, to_lower
from native_build.derivatives import has_tangent

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

    The function is ``torch.nn.functional.linear_cross_entropy`` for class indices, without class weights and label
    smoothing. It takes any number of leading dimensions, returns the loss in float32 where torch rounds it to the
    dtype of the logits, and compiles into one graph for every number of rows. Under autocast, the floating-point
    operands are cast to its dtype. Forward mode, second derivatives and those of ``torch.func`` recompute the logits
    with torch's operators.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16.
        weight: (V, C), with the dtype and device of ``x``.
        targets: (...), int64 or int32; each is a class from 0 to V − 1, or ``ignore_index``. Any other target is an
            error on a CPU, and on a GPU makes the loss and the gradients NaN.
        bias: (V,), like ``weight``.
        ignore_index: Rows with this target have no loss and no gradient, and do not count in the mean. A mean over no
            rows is NaN, as torch's, and its gradient 0.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"``, or ``"none"``.
        mode: ``"fast"`` keeps N·V logits until the backward pass. ``"least_memory"`` computes loss and gradients in
            the forward pass, in chunks of max(C, 1024) rows, and keeps the gradients of x and weight instead, the
            latter in float32; it adds to that gradient once per chunk, which takes longer.

    Returns:
        The loss in nats, float32, or float64 if ``x`` is: a scalar, or with ``"none"`` of the shape of ``targets``.

    Raises:
        ValueError: If the devices or shapes do not match, a target is not a class (on a CPU; under torch.compile a
            RuntimeError with the same words), or the mode or reduction is unknown; and for ``"none"`` with
            ``"least_memory"``, whose gradients are sums over rows.
        TypeError: If the dtypes differ or have no kernel, or an operand is a DTensor (under FSDP2, compute the loss in
            the forward of the module that owns the weight, where it is gathered).
        NotImplementedError: If the build in use has no kernels for the device.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = to_lower(x, dtype), to_lower(weight, dtype)
        bias = None if bias is None else to_lower(bias, dtype)
    check_linear_cross_entropy(x, weight, targets, bias, reduction, mode)
    x_NC, targets_N = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1).long()
    arguments = x_NC, weight, bias, targets_N, ignore_index
    # Dynamo traces no forward mode; elsewhere torch's operators carry tangents, and those of tangents.
    tangents = not is_dynamo_compiling() and has_tangent(x, weight, bias)
    if mode == "fast" or tangents:
        losses_N = (_by_formula if tangents else _losses)(*arguments)
        if reduction == "none":
            return losses_N.reshape(targets.shape)
        total = losses_N.sum()
    else:
        total = _total(*arguments)
    return total if reduction == "sum" else total / (targets_N != ignore_index).sum()


def _losses(x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int) -> Tensor:
    if not _need_gradient(x_NC, weight_VC, bias_V):
        return _rows(F.linear(x_NC, weight_VC, bias_V), targets_N, len(weight_VC), ignore_index)
    losses_N: Tensor = _Losses.apply(x_NC, weight_VC, bias_V, targets_N, ignore_index)[0]  # type: ignore[no-untyped-call]
    return losses_N


def _total(x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int) -> Tensor:
    if not _need_gradient(x_NC, weight_VC, bias_V):
        return _chunked(x_NC, weight_VC, bias_V, targets_N, ignore_index, False)[0]
    total: Tensor = _Total.apply(x_NC, weight_VC, bias_V, targets_N, ignore_index)[0]  # type: ignore[no-untyped-call]
    return total


def _need_gradient(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


class _Losses(torch.autograd.Function):
    """The loss of each row. The other results, without derivatives, are kept for the backward pass.

    They are the gradients of the logits, and the weight as it was padded for them, empty if it was not.
    """

    @staticmethod
    def forward(
        x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        padded_PC, padded_bias_P = _padded(weight_VC, bias_V)
        # Nobody else holds the logits, so the kernel may replace them, and autograd need not hear of it.
        gradient_NP = F.linear(x_NC, padded_PC, padded_bias_P)
        losses_N = _rows(gradient_NP, targets_N, len(weight_VC), ignore_index, replace=True)
        return losses_N, gradient_NP, weight_VC.new_empty(0) if padded_PC is weight_VC else padded_PC

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_N is None:
            return None, None, None, None, None
        x_NC, weight_VC, bias_V, targets_N, gradient_NP, padded_PC = ctx.saved_tensors
        # A row that is ignored has no gradient, even of a mean over no rows, which is 0 / 0.
        scale_N1 = torch.where(targets_N != ctx.ignore_index, grad_N, 0)[:, None]
        if torch.is_grad_enabled():  # create_graph=True
            return _gradients_with_graph(ctx, scale_N1, x_NC, weight_VC, bias_V, targets_N)
        padded_PC = weight_VC if padded_PC.numel() == 0 else padded_PC
        dx_NC = dweight_VC = dbias_V = None
        # The kernel's gradient is that of a row's own loss: divided by the count, small ones would vanish in float16.
        if ctx.needs_input_grad[0]:
            dx_NC = ((gradient_NP @ padded_PC).to(scale_N1.dtype) * scale_N1).to(x_NC.dtype)
        if ctx.needs_input_grad[1]:
            scaled_NC = (x_NC.to(scale_N1.dtype) * scale_N1).to(x_NC.dtype)
            dweight_VC = (gradient_NP.t() @ scaled_NC)[: len(weight_VC)]
        if bias_V is not None and ctx.needs_input_grad[2]:
            dbias_V = (gradient_NP[:, : len(weight_VC)].to(scale_N1.dtype) * scale_N1).sum(0).to(bias_V.dtype)
        return dx_NC, dweight_VC, dbias_V, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        samples, targets = arguments[0], arguments[3]
        if dims[1] is not None or dims[2] is not None:
            return _each_sample(_Losses, info, dims, arguments)
        x_BNC, targets_BN = (_to_front(x, dim, info) for x, dim in ((samples, dims[0]), (targets, dims[3])))
        x_NC, targets_N = x_BNC.flatten(0, 1), targets_BN.flatten()  # samples are rows
        losses, gradient, padded = _Losses.apply(x_NC, *arguments[1:3], targets_N, arguments[4])  # type: ignore[no-untyped-call]
        return (losses.view(targets_BN.shape), gradient.unflatten(0, targets_BN.shape), padded), (0, 0, None)


class _Total(torch.autograd.Function):
    """The sum of the losses. The other results, without derivatives, are the gradients, which wait for a factor."""

    @staticmethod
    def forward(
        x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _chunked(x_NC, weight_VC, bias_V, targets_N, ignore_index, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        x_NC, weight_VC, bias_V, targets_N, dx_NC, dweight_VC, dbias_V = ctx.saved_tensors
        counted_N = targets_N != ctx.ignore_index
        scale_N1 = torch.where(counted_N, grad, 0)[:, None]
        if torch.is_grad_enabled():  # create_graph=True
            return _gradients_with_graph(ctx, scale_N1, x_NC, weight_VC, bias_V, targets_N)
        scale = torch.where(counted_N.any(), grad, 0)
        return (
            (dx_NC.to(scale.dtype) * scale_N1).to(x_NC.dtype),
            (dweight_VC * scale).to(weight_VC.dtype),
            None if bias_V is None else (dbias_V * scale).to(bias_V.dtype),
            None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        return _each_sample(_Total, info, dims, arguments)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the operands and all results but the first."""
    *operands, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # as large as the logits
    ctx.save_for_backward(*operands, *output[1:])


def _to_front(x: Tensor, dim: int | None, info: Any) -> Tensor:
    return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def _each_sample(function: Any, info: Any, dims: Any, arguments: Sequence[Any]) -> Any:
    samples = [
        function.apply(*(x if dim is None else x.select(dim, index) for x, dim in zip(arguments, dims, strict=True)))
        for index in range(info.batch_size)
    ]
    results = tuple(map(torch.stack, zip(*samples, strict=True)))
    return results, (0,) * len(results)


def _chunked(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loop over chunks; one node of a graph, in which the number of chunks may then change."""
    if is_dynamo_compiling():
        return torch.ops.custom_ops.linear_cross_entropy_in_chunks.default(*arguments)
    return _in_chunks(*arguments)


def _in_chunks(
    x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the losses and, with ``gradient``, those of x, of the weight and of the bias, the last two wide."""
    rows, dtype = _chunk_rows(weight_VC), wide(x_NC.dtype)
    chunks = list(zip(_chunks(x_NC, rows), _chunks(targets_N, rows), strict=True))
    classes = len(weight_VC)
    if not gradient:
        losses = [_rows(F.linear(part, weight_VC, bias_V), chosen, classes, ignore_index) for part, chosen in chunks]
        none = x_NC.new_empty(0)
        return torch.cat(losses).sum(), none, none.clone(), none.clone()
    padded_PC, padded_bias_P = _padded(weight_VC, bias_V)
    losses, dx = [], []
    dweight_PC = torch.zeros_like(padded_PC, dtype=dtype)
    dbias_P = torch.zeros(len(padded_PC) if bias_V is not None else 0, dtype=dtype, device=x_NC.device)
    for part_NC, chosen_N in chunks:
        gradient_NP = F.linear(part_NC, padded_PC, padded_bias_P)
        losses.append(_rows(gradient_NP, chosen_N, classes, ignore_index, replace=True))
        dx.append(gradient_NP @ padded_PC)
        dweight_PC += gradient_NP.t() @ part_NC
        if bias_V is not None:
            dbias_P += gradient_NP.sum(0, dtype=dtype)
    return torch.cat(losses).sum(), torch.cat(dx), dweight_PC[:classes], dbias_P[:classes]


def _fake_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = wide(x.dtype)
    total = x.new_empty((), dtype=dtype)
    if not gradient:
        return total, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    classes = len(weight) if bias is not None else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, dx, weight.new_empty(weight.shape, dtype=dtype), x.new_empty(classes, dtype=dtype)


def _gradient_of_logits(
    x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int
) -> Tensor:
    """Compute softmax(logits) − onehot(target), 0 in rows that are ignored, with torch's operators."""
    logits_NV = F.linear(x_NC, weight_VC, bias_V).to(wide(x_NC.dtype))
    chosen_NV = torch.arange(weight_VC.shape[0], device=x_NC.device) == targets_N[:, None]
    gradient_NV = logits_NV.softmax(-1) - chosen_NV.to(logits_NV.dtype)
    return torch.where((targets_N != ignore_index)[:, None], gradient_NV, 0)


def _gradients_with_graph(
    ctx: Any, scale_N1: Tensor, x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by torch's operators, which can be differentiated again and transformed."""
    gradient_NV = _gradient_of_logits(x_NC, weight_VC, bias_V, targets_N, ctx.ignore_index) * scale_N1
    narrow_NV = gradient_NV.to(x_NC.dtype)
    needs = ctx.needs_input_grad
    return (
        narrow_NV @ weight_VC if needs[0] else None,
        narrow_NV.t() @ x_NC if needs[1] else None,
        gradient_NV.sum(0).to(bias_V.dtype) if bias_V is not None and needs[2] else None,
        None,
        None,
    )


def _by_formula(x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int) -> Tensor:
    """The loss of each row by torch's operators, which every transformation knows."""
    logits_NV = F.linear(x_NC, weight_VC, bias_V).to(wide(x_NC.dtype))
    counted_N = targets_N != ignore_index
    chosen_N = torch.where(counted_N, targets_N, 0)
    try:
        losses_N = logits_NV.logsumexp(-1) - logits_NV.gather(-1, chosen_N[:, None])[:, 0]
    except RuntimeError as error:
        explain(error, check_classes, targets_N, weight_VC.shape[0], ignore_index)
    return torch.where(counted_N, losses_N, 0)


def _rows(logits: Tensor, targets: Tensor, classes: int, ignore_index: int, *, replace: bool = False) -> Tensor:
    """The loss of each row; with ``replace``, the logits become their gradient."""
    name = "cross_entropy_gradient_" if replace else "cross_entropy"
    if is_dynamo_compiling():
        return getattr(torch.ops.custom_ops, name).default(logits, targets, classes, ignore_index)
    operator: Callable[..., Tensor] = getattr(calls, name)
    try:
        return operator(logits, targets, classes, ignore_index)
    except RuntimeError as error:
        explain(error, check_classes, targets, classes, ignore_index)


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


RULES = (
    Rules("cross_entropy", _fake),
    Rules("cross_entropy_gradient_", _fake),
    Rules(
        "linear_cross_entropy_in_chunks",
        _fake_in_chunks,
        schema="linear_cross_entropy_in_chunks(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
        "int ignore_index, bool gradient) -> (Tensor total, Tensor dx, Tensor dweight, Tensor dbias)",
        kernel=_in_chunks,
    ),
)

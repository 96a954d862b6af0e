"""The cross-entropy of a linear classifier, whose logits are replaced in place by their gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators.calls import calls
from custom_ops.operators.checks import (
    check_classes,
    check_cross_entropy,
    check_kinds,
    check_linear_cross_entropy,
    check_loss_parts,
    explain,
    plain_number,
    wide,
)
from custom_ops.operators.linear import has_narrow_kernel, matmul
from custom_ops.operators.registration import Rules, as_autocast, each_sample, without_autocast
from custom_ops.operators.training import loss_parts
from custom_ops.operators.training.loss_parts import Parts
from native_build.derivatives import has_tangent, is_mapped

Reduction = Literal["mean", "sum", "none"]
Mode = Literal["fast", "least_memory"]

# A 16-bit matrix product on a GPU is slow if a row of its result is not aligned to 16 bytes. Such a row is padded to a
# multiple of this many classes.
_PADDING = 64

# The logits of a block of "least_memory" have at least this many bytes: its products still fill the machine.
_SMALLEST_BLOCK = {"cpu": 4 << 20, "cuda": 64 << 20}


class CrossEntropyOutput(NamedTuple):
    """What :func:`linear_cross_entropy` returns if more than the loss is asked for.

    Attributes:
        loss: The loss, the penalty included.
        z_loss: The penalty alone, without a gradient; None if it was not asked for.
        token_accuracy: The share of the counted rows whose target is the first class with the highest logit, or with
            the reduction ``"none"`` 1 or 0 for each row; without a gradient. None if it was not asked for.
    """

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None


@overload
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", mode: Mode = "fast", class_weight: Tensor | None = None,
    label_smoothing: float = 0, z_loss: float = 0, softcap: float | None = None,
    return_z_loss: Literal[False] = False, return_token_accuracy: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", mode: Mode = "fast", class_weight: Tensor | None = None,
    label_smoothing: float = 0, z_loss: float = 0, softcap: float | None = None,
    return_z_loss: bool = False, return_token_accuracy: bool = False,
) -> Tensor | CrossEntropyOutput: ...  # fmt: skip
def linear_cross_entropy(  # label_smoothing and z_loss are whole: Dynamo takes 0.0 for a symbol, and traces twice
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    reduction: Reduction = "mean", mode: Mode = "fast", class_weight: Tensor | None = None,
    label_smoothing: float = 0, z_loss: float = 0, softcap: float | None = None,
    return_z_loss: bool = False, return_token_accuracy: bool = False,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """Compute the cross-entropy of the logits x·Wᵀ + b, and with it the gradient of the logits.

    loss_n = log Σ_v exp(logits_nv) − logits_n,target, averaged over the rows that are not ignored. If a gradient is
    needed, one kernel computes the losses of the logits and writes softmax(logits) − onehot(target) over them, so the
    backward pass is two matrix products. The logits have the dtype of ``x`` and are computed with in float32 (float64
    for float64); they exist once, and never in float32 beside their own dtype.

    More can be in the loss: with l = softcap·tanh(logits / softcap), or the logits, n_n = log Σ_v exp(l_nv), class
    weights w and smoothing ε, a row has

    loss_n = (1 − ε)·w_target·(n_n − l_n,target) + ε/V·Σ_v w_v·(n_n − l_nv) + z_loss·n_n²

    The same kernel computes it in the same pass over the logits. Without these arguments nothing of it is computed.

    The function is ``torch.nn.functional.linear_cross_entropy`` for class indices. It takes any number of leading
    dimensions, returns the loss in float32 where torch rounds it to the dtype of the logits, and compiles into one
    graph for every number of rows. Under autocast, the floating-point operands are cast to its dtype. Forward mode,
    second derivatives and those of ``torch.func`` recompute the logits with torch's operators.

    Args:
        x: (..., C), float32, float64, float16 or bfloat16.
        weight: (V, C), with the dtype and device of ``x``.
        targets: (...), int64 or int32; each is a class from 0 to V − 1, or ``ignore_index``. Any other target is an
            error on a CPU, and on a GPU makes the loss and the gradients NaN.
        bias: (V,), like ``weight``.
        ignore_index: Rows with this target have no loss and no gradient, and do not count in the mean. A mean over no
            rows is NaN, as torch's, and its gradient 0.
        reduction: ``"mean"`` over the rows that are not ignored, ``"sum"``, or ``"none"``.
        mode: ``"fast"`` keeps N·V logits until the backward pass, which is two matrix products. ``"least_memory"``
            keeps two numbers for each row. Both passes go over blocks of the logits, and the backward pass computes
            them again: four products instead of three. The blocks are of classes if V ≥ N, else of rows; the gradient
            of the other operand is summed in float32. A block has the bytes of weight or x, in the backward pass a
            quarter of them, and at least 64 MiB on a GPU, 4 MiB on a CPU: with fewer logits, ``"fast"`` needs no more.
        class_weight: (V,), ``weight`` of torch's function: any floating-point dtype, on the device of ``x``, without a
            gradient. A mean is divided by the sum of the targets' weights, as torch's.
        label_smoothing: ε, from 0 to 1.
        z_loss: The factor of the penalty on n², which keeps the normaliser near 0 (Chowdhery et al., arXiv:2204.02311).
            It knows no class weights; in a mean it is averaged over the rows that are not ignored.
        softcap: The bound of the logits, above 0; None leaves them as they are.
        return_z_loss: Whether to return the penalty too.
        return_token_accuracy: Whether to return the share of right predictions too.

    Returns:
        A :class:`CrossEntropyOutput` if one of the last two is true, else the loss alone.
        The loss is in nats, float32, or float64 if ``x`` is: a scalar, or with ``"none"`` of the shape of ``targets``.

    Raises:
        ValueError: If the devices or shapes do not match, a target is not a class (on a CPU; under torch.compile a
            RuntimeError with the same words for ``"fast"``), the mode or reduction is unknown, or a number is out of
            its range.
        TypeError: If the dtypes differ or have no kernel, or an operand is a DTensor (under FSDP2, compute the loss in
            the forward of the module that owns the weight, where it is gathered).
        NotImplementedError: If the build in use has no kernels for the device.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    op = "linear_cross_entropy"
    check_kinds(op, "Tensor", x=x, weight=weight, targets=targets)
    check_kinds(op, "Tensor | None", bias=bias, class_weight=class_weight)
    check_kinds(op, "int", ignore_index=ignore_index)
    x, weight, bias = as_autocast(x, weight, bias)
    check_linear_cross_entropy(x, weight, targets, bias, reduction, mode)
    label_smoothing = plain_number(op, "label_smoothing", label_smoothing)
    z_loss, softcap = plain_number(op, "z_loss", z_loss), plain_number(op, "softcap", softcap)
    check_loss_parts(weight, class_weight, label_smoothing, z_loss, softcap)
    if class_weight is None and not (label_smoothing or z_loss or softcap or return_z_loss or return_token_accuracy):
        return _plain(x, weight, targets, bias, ignore_index, reduction, mode)
    results = _with_parts(
        x, weight, targets, bias, ignore_index, reduction, mode, class_weight, label_smoothing=label_smoothing,
        z_loss=z_loss, softcap=softcap, accuracy=return_token_accuracy,
    )  # fmt: skip
    if not (return_z_loss or return_token_accuracy):
        return results[0]
    loss, penalty, accuracy = results
    return CrossEntropyOutput(loss, penalty if return_z_loss else None, accuracy if return_token_accuracy else None)


def _form(x: Tensor, weight: Tensor, bias: Tensor | None, mode: Mode) -> Callable[..., tuple[Tensor, ...]]:
    """The form of the loss: torch's operators carry tangents and theirs.

    They also take what a compiled program maps over: Dynamo traces no ``autograd.Function`` under ``torch.vmap``, and
    no forward mode.
    """
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    if any(map(is_mapped, operands)) if is_dynamo_compiling() else has_tangent(*operands):
        return _by_formula
    return _losses if mode == "fast" else _losses_in_blocks


def _plain(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int, reduction: str, mode: Mode
) -> Tensor:
    x_NC, targets_N = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(targets.numel()).long().contiguous()
    losses_N = _form(x, weight, bias, mode)(x_NC, weight, bias, targets_N, ignore_index, *_PLAIN)[0]
    if reduction == "none":
        return losses_N.reshape(targets.shape)
    total = losses_N.sum()
    return total if reduction == "sum" else total / (targets_N != ignore_index).sum()


def _with_parts(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, ignore_index: int, reduction: str, mode: Mode,
    class_weight: Tensor | None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """The loss, the penalty in it, and the token accuracy."""
    x_NC, targets_N = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(targets.numel()).long().contiguous()
    counted_N = targets_N != ignore_index
    weights_N = loss_parts.weights_of_rows(class_weight, targets_N, counted_N, wide(x.dtype))
    parts = loss_parts.parts_of(
        weights_N, counted_N, class_weight, weight.shape[0], mean=reduction == "mean", **options
    )
    losses_N, statistics_N2 = _form(x, weight, bias, mode)(x_NC, weight, bias, targets_N, ignore_index, *parts)
    assert parts.factors_N3 is not None
    normaliser_N = statistics_N2[:, 0]  # a square of its own might be infinite, times no penalty
    penalties_N = torch.where(counted_N, parts.factors_N3[:, 2] * normaliser_N * normaliser_N, 0)
    hits_N = statistics_N2[:, 1]
    if reduction == "none":
        return [value_N.reshape(targets.shape) for value_N in (losses_N, penalties_N, hits_N)]
    rows = weights_N.sum() if reduction == "mean" else 1
    return [losses_N.sum() / rows, penalties_N.sum() / rows, hits_N.sum() / counted_N.sum()]


_PLAIN = Parts()


def _losses(*arguments: Any) -> tuple[Tensor, ...]:
    """The loss of each row and, unless the parts are plain, its statistics (N, 2)."""
    x_NC, weight_VC, bias_V, targets_N, *options = arguments
    if not _need_gradient(x_NC, weight_VC, bias_V):
        return _rows(matmul(x_NC, weight_VC.t(), bias_V), targets_N, len(weight_VC), *options)
    losses_N, _, _, *statistics = _Losses.apply(*arguments)  # type: ignore[no-untyped-call]
    return losses_N, *statistics


def _losses_in_blocks(*arguments: Any) -> tuple[Tensor, ...]:
    if is_dynamo_compiling() and not _need_gradient(*arguments[:3]):  # else the function has the rule of torch.vmap
        losses_N, sums = _forward_in_blocks(*arguments)
    else:
        losses_N, sums = _LossesInBlocks.apply(*arguments)  # type: ignore[no-untyped-call]
    if sums.shape[-1] == 2:
        return (losses_N,)
    return losses_N, loss_parts.statistics_of(sums[:, 0], sums[:, 1], sums[:, 4])


def _need_gradient(*operands: Tensor | None) -> bool:
    """Whether a gradient may be needed; a tensor that ``torch.vmap`` maps over does not tell."""
    given = [operand for operand in operands if operand is not None]
    return torch.is_grad_enabled() and any(operand.requires_grad or is_mapped(operand) for operand in given)


class _Losses(torch.autograd.Function):
    """The loss of each row. The other results have no derivatives.

    They are the gradients of the logits, the weight as it was padded for them, empty if it was not, and the statistics.
    """

    @staticmethod
    def forward(
        x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        padded_PC, padded_bias_P = _padded(weight_VC, bias_V)
        # Nobody else holds the logits, so the kernel may replace them, and autograd need not hear of it.
        gradient_NP = matmul(x_NC, padded_PC.t(), padded_bias_P)
        losses_N, *statistics = _rows(gradient_NP, targets_N, len(weight_VC), *options, replace=True)
        return losses_N, gradient_NP, weight_VC.new_empty(0) if padded_PC is weight_VC else padded_PC, *statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_N, _from_logits)

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        return _mapped(_Losses, info, dims, arguments)


class _LossesInBlocks(torch.autograd.Function):
    """The loss of each row, and its sums, (N, 2) or with parts (N, 5), which are kept for the backward pass."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return _forward_in_blocks(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad_N, _from_blocks)

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        return _mapped(_LossesInBlocks, info, dims, arguments)


_ARGUMENTS = 5 + len(_PLAIN)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the operands, the results but the first, and the tensors of the parts.

    Activation checkpointing lets ``ctx.saved_tensors`` be read once in a backward pass.
    """
    *operands, ctx.ignore_index = inputs[:5]
    parts = Parts(*inputs[5:])
    ctx.rest = parts[2:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # as large as the logits
    ctx.save_for_backward(*operands, *output[1:3], *parts[:2])


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Those of x, weight and bias."""


def _gradients(ctx: Any, grad_N: Tensor | None, by_kernels: Callable[..., _Gradients]) -> tuple[Tensor | None, ...]:
    """What a backward pass returns; by torch's operators where it is differentiated again or mapped over."""
    if grad_N is None:
        return (None,) * _ARGUMENTS
    saved = ctx.saved_tensors
    operands, kept, targets_N = saved[:4], saved[4:], saved[3]
    # A row that is ignored has no gradient, even of a mean over no rows, which is 0 / 0.
    scale_N1 = torch.where(targets_N != ctx.ignore_index, grad_N, 0)[:, None]
    transformed = torch.is_grad_enabled() or is_mapped(grad_N)  # create_graph=True, is_grads_batched=True
    with without_autocast(grad_N):
        gradients = (_with_graph if transformed else by_kernels)(ctx, kept, scale_N1, *operands)
    return *gradients, *(None,) * (_ARGUMENTS - 3)


def _from_logits(
    ctx: Any, kept: Sequence[Any], scale_N1: Tensor, x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, _: Tensor
) -> _Gradients:
    gradient_NP, padded_PC, *_of_parts = kept
    padded_PC = weight_VC if padded_PC.numel() == 0 else padded_PC
    dx_NC = dweight_VC = dbias_V = None
    # The kernel's gradient is that of a row's own loss: divided by the count, small ones would vanish in float16.
    # In place, each of the two factors is one kernel that computes in the dtype of the losses.
    if ctx.needs_input_grad[0]:
        dx_NC = matmul(gradient_NP, padded_PC).mul_(scale_N1)
    if ctx.needs_input_grad[1]:
        dweight_VC = matmul(gradient_NP.t(), x_NC.clone().mul_(scale_N1))[: len(weight_VC)]
    if bias_V is not None and ctx.needs_input_grad[2]:
        dbias_V = (gradient_NP[:, : len(weight_VC)].to(scale_N1.dtype) * scale_N1).sum(0).to(bias_V.dtype)
    return dx_NC, dweight_VC, dbias_V


def _from_blocks(ctx: Any, kept: Sequence[Any], scale_N1: Tensor, *operands: Any) -> _Gradients:
    sums, *of_parts = kept
    needed = list(ctx.needs_input_grad[:3])
    gradients = _backward_in_blocks(scale_N1, *operands, sums, ctx.ignore_index, needed, *of_parts, *ctx.rest)
    dx_NC, dweight_VC, dbias_V = (x if wanted else None for x, wanted in zip(gradients, needed, strict=True))
    return dx_NC, dweight_VC, dbias_V


def _to_front(x: Tensor, dim: int | None, info: Any) -> Tensor:
    return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)


def _mapped(function: Any, info: Any, dims: Any, arguments: Sequence[Any]) -> Any:
    """The rule of ``torch.vmap`` of a function whose results, but the padded weight, have an element for each row."""
    parts = Parts(*arguments[5:])
    if dims[1] is not None or dims[2] is not None or dims[6] is not None:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, dims, strict=True)]
        results = each_sample(function.apply, moved, [dim is not None for dim in dims], info.batch_size)
        return results, (0,) * len(results)
    x_BNC, targets_BN = (_to_front(arguments[index], dims[index], info) for index in (0, 3))
    if parts.factors_N3 is not None:
        parts = parts._replace(factors_N3=_to_front(parts.factors_N3, dims[5], info).flatten(0, 1))
    rows = x_BNC.flatten(0, 1), *arguments[1:3], targets_BN.flatten(), arguments[4], *parts  # samples are rows
    by_row = targets_BN.shape
    losses, kept, *others = function.apply(*rows)
    padded, statistics = others[:1], [other.unflatten(0, by_row) for other in others[1:]]
    results = losses.view(by_row), kept.unflatten(0, by_row), *padded, *statistics
    return results, (0, 0, *(None for _ in padded), *(0 for _ in statistics))


def _forward_in_blocks(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The loop over blocks; one node of a graph, in which the number of blocks may then change."""
    if torch.compiler.is_compiling():
        return torch.ops.custom_ops.linear_cross_entropy_in_blocks.default(*arguments)
    return _in_blocks(*arguments)


def _backward_in_blocks(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return torch.ops.custom_ops.linear_cross_entropy_in_blocks_backward.default(*arguments)
    return _gradients_in_blocks(*arguments)


def _in_blocks(
    x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int, *options: Any
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its sums: highest logit, sum of exp(logit − highest), those of the parts."""
    parts = Parts(*options)
    plain = parts.factors_N3 is None
    if targets_N.is_cpu:
        check_classes(targets_N, len(weight_VC), ignore_index)
    dtype = wide(x_NC.dtype)
    sums = x_NC.new_zeros(len(x_NC), 2 if plain else 5, dtype=dtype)
    sums[:, 0] = torch.finfo(dtype).min
    chosen_N = sums.new_full(targets_N.shape, float("nan"))  # of a target that is no class
    for rows, classes in _blocks(x_NC, weight_VC, share=1):  # there are no gradients yet
        padded_PC, padded_bias_P = _padded(weight_VC[classes], None if bias_V is None else bias_V[classes])
        logits_NP = matmul(x_NC[rows], padded_PC.t(), padded_bias_P)
        block = logits_NP, targets_N[rows], classes.start, classes.stop - classes.start, ignore_index
        if plain:
            calls.cross_entropy_block_sums_(*block, sums[rows], chosen_N[rows])
        else:
            calls.general_cross_entropy_block_sums_(*block, *parts[1:], sums[rows], chosen_N[rows])
        del logits_NP, block  # before the next block's
    highest_N, sum_N = sums[:, 0], sums[:, 1]
    if plain:
        losses_N = sum_N.log() + (highest_N - chosen_N)
    else:
        losses_N = loss_parts.losses_of(parts, sum_N.log(), highest_N, chosen_N, sums[:, 2])
    losses_N = torch.where(targets_N == ignore_index, 0, losses_N)
    sums[:, 1].masked_fill_(chosen_N.isnan(), float("nan"))  # and with it the gradients: the target is no class
    return losses_N, sums


def _gradients_in_blocks(
    scale_N1: Tensor, x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, sums: Tensor,
    ignore_index: int, needed: Sequence[bool], *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias, empty where they are not needed."""
    parts = Parts(*options)
    scales_N3 = None if parts.factors_N3 is None else loss_parts.scales_of(parts, sums[:, 0], sums[:, 1])
    scaled_NC = x_NC.clone().mul_(scale_N1) if needed[1] else x_NC
    dx = _Product(x_NC if needed[0] else x_NC[:0])
    dweight = _Product(weight_VC if needed[1] else weight_VC[:0])
    dbias_V = scale_N1.new_zeros(len(weight_VC) if bias_V is not None and needed[2] else 0)
    for rows, classes in _blocks(x_NC, weight_VC, share=4):
        first, count = classes.start, classes.stop - classes.start
        padded_PC, padded_bias_P = _padded(weight_VC[classes], None if bias_V is None else bias_V[classes])
        gradient_NP = matmul(x_NC[rows], padded_PC.t(), padded_bias_P)
        block = gradient_NP, targets_N[rows], first, count, ignore_index
        if scales_N3 is None:
            calls.cross_entropy_block_gradient_(*block, sums[rows])
        else:
            calls.general_cross_entropy_block_gradient_(*block, *parts[1:4], scales_N3[rows])
        if needed[0]:
            dx.add(rows, gradient_NP, padded_PC, whole=count == len(weight_VC))
        if needed[1]:
            dweight.add(classes, gradient_NP.t()[:count], scaled_NC[rows], whole=len(gradient_NP) == len(x_NC))
        if len(dbias_V):
            dbias_V[classes] += gradient_NP[:, :count].to(dbias_V.dtype).mul_(scale_N1[rows]).sum(0)
        del gradient_NP, block
    del scaled_NC
    dx_NC = dx.total.mul_(scale_N1).to(x_NC.dtype) if needed[0] else dx.total
    return dx_NC, dweight.total.to(weight_VC.dtype), dbias_V.to(x_NC.dtype)


class _Product:
    """A matrix (rows, C) that products of blocks fill, or add up to.

    Attributes:
        total: The matrix, in the dtype of the operand or, if a part of it is a sum of several products, of the losses.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.is_sum = False

    def add(self, part: slice, left: Tensor, right: Tensor, *, whole: bool) -> None:
        """Fill the part with left·right if this is its whole product, else add it."""
        if not (whole or self.is_sum):
            self.total = torch.zeros_like(self.total, dtype=wide(self.like.dtype))
            self.is_sum = True
        total = self.total[part]
        if has_narrow_kernel(left, right):  # it returns a new tensor: a few rows at a time need little memory
            step = max(_SMALLEST_BLOCK["cpu"] // max(total[:1].nbytes, 1), _PADDING)
            for rows, sums in zip(left.split(step), total.split(step), strict=True):
                product = calls.mm(rows, right)
                _ = sums.copy_(product) if whole else sums.add_(product)
        elif whole:
            torch.mm(left, right, out=total)
        elif total.dtype == left.dtype:
            total.addmm_(left, right)
        elif total.is_cuda:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
        else:
            total += left @ right


def _blocks(x: Tensor, weight: Tensor, share: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of the logits as slices of rows and classes: all rows of some classes, or all classes of some rows.

    Args:
        x: (N, C).
        weight: (V, C).
        share: Which part of the bytes of the larger operand the logits of a block take.
    """
    rows, classes = len(x), len(weight)
    by_class = classes >= rows
    smallest = _SMALLEST_BLOCK.get(x.device.type, _SMALLEST_BLOCK["cuda"])
    size = max(max(classes, rows) * x.shape[1] * x.element_size() // share, smallest)
    line = max(min(classes, rows), 1) * x.element_size()
    step = max(size // line // _PADDING * _PADDING, _PADDING)
    for first in range(0, classes if by_class else rows, step):
        if by_class:
            yield slice(0, rows), slice(first, min(first + step, classes))
        else:
            yield slice(first, min(first + step, rows)), slice(0, classes)


def _fake_in_blocks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int,
    factors: Tensor | None = None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = wide(x.dtype)
    return x.new_empty(x.shape[:1], dtype=dtype), x.new_empty((x.shape[0], 2 if factors is None else 5), dtype=dtype)


def _fake_gradients_in_blocks(
    scale: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, sums: Tensor, ignore_index: int,
    needed: Sequence[bool], *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    classes = weight.shape[0] if bias is not None and needed[2] else 0
    dx, dweight = (
        torch.empty_like(like if wanted else like[:0], memory_format=torch.contiguous_format)
        for like, wanted in zip((x, weight), needed, strict=False)
    )
    return dx, dweight, x.new_empty(classes)


def _with_graph(
    ctx: Any, kept: Sequence[Any], scale_N1: Tensor, x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None,
    targets_N: Tensor,
) -> _Gradients:  # fmt: skip
    """The gradients by torch's operators, which can be differentiated again and transformed."""
    logits_NV = matmul(x_NC, weight_VC.t(), bias_V, differentiable=True)
    parts = Parts(*kept[-2:], *ctx.rest)
    gradient_NV = loss_parts.gradient_by_formula(logits_NV, targets_N, ctx.ignore_index, parts) * scale_N1
    narrow_NV = gradient_NV.to(x_NC.dtype)
    needs = ctx.needs_input_grad
    return (
        matmul(narrow_NV, weight_VC, differentiable=True) if needs[0] else None,
        matmul(narrow_NV.t(), x_NC, differentiable=True) if needs[1] else None,
        gradient_NV.sum(0).to(bias_V.dtype) if bias_V is not None and needs[2] else None,
    )


def _by_formula(
    x_NC: Tensor, weight_VC: Tensor, bias_V: Tensor | None, targets_N: Tensor, ignore_index: int, *options: Any
) -> tuple[Tensor, ...]:
    logits_NV = matmul(x_NC, weight_VC.t(), bias_V, differentiable=True)
    return loss_parts.losses_by_formula(logits_NV, targets_N, ignore_index, Parts(*options))


def _rows(
    logits: Tensor, targets: Tensor, classes: int, ignore_index: int, *options: Any, replace: bool = False
) -> tuple[Tensor, ...]:
    """The loss of each row and, with parts, its statistics; with ``replace``, the logits become their gradient."""
    name = "cross_entropy_gradient_" if replace else "cross_entropy"
    arguments: tuple[Any, ...] = logits, targets, classes, ignore_index
    if options[0] is not None:
        name, arguments = f"general_{name}", (*arguments, *options)
    if is_dynamo_compiling():
        results = getattr(torch.ops.custom_ops, name).default(*arguments)
    else:
        operator: Callable[..., Any] = getattr(calls, name)
        try:
            results = operator(*arguments)
        except RuntimeError as error:
            explain(error, check_classes, targets, classes, ignore_index)
    return results if isinstance(results, tuple) else (results,)


def _padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    missing = -len(weight) % _PADDING
    if not weight.is_cuda or weight.element_size() > 2 or len(weight) * weight.element_size() % 16 == 0:
        return weight, bias
    return F.pad(weight, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


def _fake(logits: Tensor, targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    check_cross_entropy(logits, targets, classes, ignore_index)
    return logits.new_empty(logits.shape[:1], dtype=wide(logits.dtype))


def _fake_general(
    logits: Tensor, targets: Tensor, classes: int, ignore_index: int, *options: Any
) -> tuple[Tensor, Tensor]:
    losses = _fake(logits, targets, classes, ignore_index)
    return losses, losses.new_empty((losses.shape[0], 2))


def _fake_block_sums(*arguments: Any) -> None:
    """Nothing is returned; only :func:`_in_blocks` calls this kernel, and traces do not see into it."""


# Those of Parts.
_OPTIONS = "Tensor? factors=None, Tensor? class_weight=None, float share=0., float softcap=0., bool accuracy=False"

RULES = (
    Rules("cross_entropy", _fake),
    Rules("cross_entropy_gradient_", _fake),
    Rules("cross_entropy_block_sums_", _fake_block_sums),
    Rules("cross_entropy_block_gradient_", _fake_block_sums),
    Rules("general_cross_entropy", _fake_general),
    Rules("general_cross_entropy_gradient_", _fake_general),
    Rules("general_cross_entropy_block_sums_", _fake_block_sums),
    Rules("general_cross_entropy_block_gradient_", _fake_block_sums),
    Rules(
        "linear_cross_entropy_in_blocks",
        _fake_in_blocks,
        schema="linear_cross_entropy_in_blocks(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
        f"int ignore_index, {_OPTIONS}) -> (Tensor losses, Tensor sums)",
        kernel=_in_blocks,
    ),
    Rules(
        "linear_cross_entropy_in_blocks_backward",
        _fake_gradients_in_blocks,
        schema="linear_cross_entropy_in_blocks_backward(Tensor scale, Tensor x, Tensor weight, Tensor? bias, "
        f"Tensor targets, Tensor sums, int ignore_index, bool[3] needed, {_OPTIONS}) -> "
        "(Tensor dx, Tensor dweight, Tensor dbias)",
        kernel=_gradients_in_blocks,
    ),
)

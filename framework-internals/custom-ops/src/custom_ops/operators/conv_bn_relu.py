"""A convolution, batch-norm and ReLU for inference: one kernel follows the convolution instead of two.

:func:`fuse` replaces these modules in a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_conv_bn_relu, explain, wide
from custom_ops.operators.registration import Autograd, Rules, as_autocast, to_lower, without_autocast
from lowering import Lowering, check_lowering


def conv_bn_relu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    lowering: Lowering | None = None,
) -> Tensor:
    """Convolve, then scale, shift and clip each channel: ``relu(scale·conv2d(x, weight) + shift)``.

    The convolution is torch's. One kernel then works in place on its result, in float32 for every dtype except
    float64. In evaluation, a batch-norm is such a scale and shift; :func:`fold_batch_norm` computes them.

    Under autocast, ``x`` and ``weight`` are cast to its dtype.

    Args:
        x: (B, C, H, W), contiguous or channels-last, float32, float64, float16 or bfloat16.
        weight: (K, C / groups, R, S), with the dtype and device of ``x``.
        scale: Tensor of shape (K,), float32, or float64 if ``x`` is.
        shift: Tensor like ``scale``.
        stride: Stride of the convolution, one number or one each for height and width.
        padding: Zeros around the image, in the same form.
        dilation: Spacing between the elements of the weight, in the same form.
        groups: Number of independent groups of channels.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).

    Returns:
        (B, K, H', W'), in the memory format that torch's convolution returns.

    Raises:
        ValueError: If the devices differ, or the shapes do not match.
        TypeError: If the dtypes do not match or have no kernel, or if stride, padding or dilation is not one or two
            integers.
        RuntimeError: If torch's convolution refuses the arguments.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode or ``torch.func``,
            for which there is no derivative.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    geometry = (_pair(stride, "stride"), _pair(padding, "padding"), _pair(dilation, "dilation"), groups)
    if is_dynamo_compiling():
        x, weight = as_autocast(x, weight)
        sizes = (("elements", x.numel()), ("channels", weight.shape[0]), ("width", x.shape[-1]))
        return lower("conv_bn_relu", lowering, _formula, _kernel, x, weight, scale, shift, *geometry, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.conv_bn_relu(x, weight, scale, shift, *geometry)
    except (RuntimeError, AttributeError) as error:
        explain(error, _check_with_convolution, x, weight, scale, shift, *geometry)


def _formula(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *geometry: Any) -> Tensor:
    check_conv_bn_relu(x, weight, scale, shift)
    convolved = torch.nn.functional.conv2d(x, weight, None, *geometry).to(scale.dtype)
    return torch.relu(convolved * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def _kernel(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *geometry: Any) -> Tensor:
    return torch.ops.custom_ops.conv_bn_relu.default(x, weight, scale, shift, *geometry)


def fold_batch_norm(norm: nn.BatchNorm2d, conv_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the scale and shift that a batch-norm applies in evaluation, including the bias of the convolution.

    scale = γ/√(var + ε), shift = β + (bias − mean)·scale (Ioffe and Szegedy, arXiv:1502.03167, section 3.1).

    Args:
        norm: Batch-norm with running statistics.
        conv_bias: Bias of the convolution, (K,).

    Returns:
        scale and shift, (K,), float32, or float64 if the statistics are float64.

    Raises:
        ValueError: If the batch-norm has no running statistics.
    """
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            "fold_batch_norm: argument 'norm': expected running statistics (track_running_stats=True), got none"
        )
    dtype = wide(norm.running_var.dtype)
    scale = torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    bias = 0 if conv_bias is None else conv_bias.to(dtype)
    shift = (bias - norm.running_mean.to(dtype)) * scale
    return scale, shift if norm.bias is None else shift + norm.bias.to(dtype)


class ConvBnRelu2d(nn.Module):
    """:func:`conv_bn_relu` as a module for inference, made from a trained convolution and batch-norm.

    Attributes:
        weight: Weight of the convolution.
        scale: Buffer (K,) with the factor of each channel.
        shift: Buffer (K,) with the summand of each channel.
    """

    weight: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
            raise ValueError(
                "ConvBnRelu2d: argument 'conv': expected padding with zeros by numbers, got "
                f"padding={conv.padding!r}, padding_mode={conv.padding_mode!r}"
            )
        scale, shift = fold_batch_norm(norm, conv.bias)
        self.register_buffer("weight", conv.weight.detach())
        self.register_buffer("scale", scale.detach())
        self.register_buffer("shift", shift.detach())
        stride, padding, dilation = (_pair(getattr(conv, name), name) for name in ("stride", "padding", "dilation"))
        self.geometry = (stride, padding, dilation, conv.groups)

    def forward(self, x: Tensor) -> Tensor:
        """``relu(bn(conv(x)))``."""
        return conv_bn_relu(x, self.weight, self.scale, self.shift, *self.geometry)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConvBnRelu2d:
        """Apply ``.to()`` and similar methods; scale and shift keep the dtype in which the weight is computed."""
        before = {name: getattr(self, name) for name in ("scale", "shift")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        dtype = wide(self.weight.dtype)
        for name, exact in before.items():
            cast = getattr(self, name)
            if cast.dtype != dtype:  # start from the uncast value: the cast has lost digits
                setattr(self, name, exact.to(cast.device, dtype))
        return self

    def extra_repr(self) -> str:
        """Shapes, for ``print``."""
        stride, padding, dilation, groups = self.geometry
        return f"{tuple(self.weight.shape)}, {stride=}, {padding=}, {dilation=}, {groups=}"


def fuse(model: nn.Module, *, on_skip: Callable[[str], object] | None = None) -> tuple[nn.Module, int]:
    """Copy a model for inference and replace each consecutive ``Conv2d, BatchNorm2d, ReLU`` by one module.

    Consecutive means adjacent in an ``nn.Sequential``. Modules that a custom ``forward`` calls one after another are
    not found; use :class:`ConvBnRelu2d` there. Three modules stay as they are if the batch-norm is in training mode,
    or if one of them has hooks, parametrizations or a ``forward`` set on the instance, which would no longer run.
    Modules inside the model that are in training mode (a dropout that samples) stay in it.

    Call such an ``nn.Sequential`` only as a whole. Its first of the three modules computes everything, and the other
    two become ``nn.Identity``. A ``forward`` that indexes or slices it (``self.features[:2]``) gets other results.

    Args:
        model: Model in evaluation mode.
        on_skip: Called with a sentence for each three modules of these kinds that stay as they are, and why: ``print``.

    Returns:
        The copy, and the number of replacements.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If the model is in training mode, in which batch-norms depend on the batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: argument 'model': expected a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise ValueError("fuse: argument 'model': expected a model in evaluation mode, got training (call .eval())")
    fused = copy.deepcopy(model)
    count = 0
    for name, sequence in list(fused.named_modules()):
        if not _calls_in_a_row(sequence):
            continue
        layers = list(sequence)  # not named_children, which leaves out a module's second place
        for first in range(len(layers) - 2):
            conv, norm, relu = layers[first : first + 3]
            if not (isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and isinstance(relu, nn.ReLU)):
                continue
            if (reason := _unfit(conv, norm, relu)) is None:
                for index, module in enumerate((ConvBnRelu2d(conv, norm), nn.Identity(), nn.Identity()), first):
                    sequence[index] = module.eval()
                count += 1
            elif on_skip is not None:
                place = f"{name}.{first}" if name else str(first)
                on_skip(f"{place} to {first + 2}: Conv2d, BatchNorm2d and ReLU stay: {reason}")
    return fused, count


def _calls_in_a_row(module: nn.Module) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and module.forward == nn.Sequential.forward.__get__(module)


def _unfit(conv: nn.Conv2d, norm: nn.BatchNorm2d, relu: nn.ReLU) -> str | None:
    """Why the three modules cannot become one; None if they can."""
    for module, kind in ((conv, nn.Conv2d), (norm, nn.BatchNorm2d), (relu, nn.ReLU)):
        if type(module) is not kind:  # a subclass may compute something else; parametrizing a module gives it one
            return f"{type(module).__name__} is a subclass of {kind.__name__}, or has a parametrization"
        if _has_hooks(module):
            return f"{kind.__name__} has hooks, which would no longer run"
        if "forward" in vars(module):
            return f"{kind.__name__} has a forward of its own, which would no longer run"
    if norm.running_mean is None:
        return "BatchNorm2d has no running statistics"
    if norm.training:
        return "BatchNorm2d is in training mode"
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return f"Conv2d has padding {conv.padding!r} in mode {conv.padding_mode!r}; only numbers of zeros are supported"
    return None


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name) for name in hooks)


def _pair(value: Any, name: str) -> list[int]:
    sizes = [value, value] if isinstance(value, Integral) else value
    known = isinstance(sizes, Sequence) and len(sizes) in (1, 2) and all(isinstance(size, Integral) for size in sizes)
    if not known:
        raise TypeError(
            f"conv_bn_relu: argument '{name}': expected one whole number, or one for each of height and width, "
            f"got {value!r}"
        )
    return [int(size) for size in sizes]


def _check_with_convolution(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, *geometry: Any) -> None:
    """Check everything, the convolution too: the stable ABI does not pass on the message of torch's convolution."""
    check_conv_bn_relu(x, weight, scale, shift)
    with torch.no_grad():
        torch.nn.functional.conv2d(x, weight, None, *geometry)


_check_with_convolution.__name__ = check_conv_bn_relu.__name__  # messages name the operator


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    check_conv_bn_relu(x, weight, scale, shift)
    return torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, scale, shift, *ctx.geometry = inputs
    ctx.save_for_backward(x, weight, scale, shift, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight, scale, _, y = ctx.saved_tensors
    stride, padding, dilation, groups = ctx.geometry
    needs_x, needs_weight, needs_scale, needs_shift, *_ = ctx.needs_input_grad
    clipped = torch.where(y <= 0, 0, gradient).to(scale.dtype)  # a NaN in y lets the gradient pass, as torch's ReLU
    # The kernel overwrote the convolution's result, so the gradient of the scale computes it again.
    with without_autocast(x):
        again = torch.nn.functional.conv2d(x, weight, None, *ctx.geometry).to(scale.dtype) if needs_scale else None
    of_conv = (clipped * scale.view(-1, 1, 1)).to(x.dtype)
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        of_conv, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [needs_x, needs_weight, False]
    )
    dscale = None if again is None else (clipped * again).sum((0, 2, 3))
    dshift = clipped.sum((0, 2, 3)) if needs_shift else None
    return dx if needs_x else None, dweight if needs_weight else None, dscale, dshift, None, None, None, None


def _lower(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    x, weight, *rest = arguments
    return [to_lower(x, dtype), to_lower(weight, dtype), *rest]


RULES = (Rules("conv_bn_relu", _fake, Autograd(_backward, _setup), _lower),)

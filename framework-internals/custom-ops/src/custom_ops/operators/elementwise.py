"""Elementwise sums and products: ``vector_add``, ``axpb`` and ``scale``.

The operands have equal shape, dtype and device. Operands that are not contiguous are copied first, but for a transposed
matrix on a GPU; the result is contiguous. There are kernels for the four dtypes of
:data:`custom_ops.operators.checks.DTYPES`.

Under torch.compile each function has two lowerings (:mod:`lowering`). Eager calls always run the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import (
    check_axpb,
    check_number,
    check_scale,
    check_vector_add,
    explain,
    plain_number,
    wide,
)
from custom_ops.operators.registration import Autograd, Rules, autocast_dtype, elementwise_batched, to_widest
from lowering import Lowering, check_lowering


def vector_add(a: Tensor, b: Tensor, *, lowering: Lowering | None = None) -> Tensor:
    """Add two tensors: ``a + b``, rounded once, and therefore bit-equal to :func:`torch.add`.

    Args:
        a: Tensor of any shape, float32, float64, float16 or bfloat16.
        b: Tensor with the shape, dtype and device of ``a``.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).

    Returns:
        The sum, contiguous, of the shape and dtype of ``a``.

    Raises:
        ValueError: If the devices or shapes differ.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        a, b = _operands(a, b)
        return lower("vector_add", lowering, _add_formula, _add_kernel, a, b, sizes=(("elements", a.numel()),))
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.vector_add(a, b)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_vector_add, a, b)


def axpb(x: Tensor, b: Tensor, alpha: float, *, lowering: Lowering | None = None) -> Tensor:
    """Scale and add in one kernel: ``alpha * x + b``, a fused multiply-add in float32 (float64 for float64).

    Two separate operators read x, write alpha·x, read it back with b and write the sum. That is five passes over
    memory; one kernel needs three.

    Args:
        x: Tensor of any shape, float32, float64, float16 or bfloat16.
        b: Tensor with the shape, dtype and device of ``x``.
        alpha: Factor, rounded to float32 unless ``x`` is float64; not differentiated.
        lowering: Same as for :func:`vector_add`. The formula rounds the product too.

    Returns:
        The result, contiguous, of the shape and dtype of ``x``.

    Raises:
        ValueError: If the devices or shapes differ, or ``alpha`` needs a gradient.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        x, b = _operands(x, b)
        sizes = (("elements", x.numel()),)
        return lower("axpb", lowering, _axpb_formula, _axpb_kernel, x, b, alpha, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    check_number("axpb", "alpha", alpha)
    try:
        return calls.axpb(x, b, alpha)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_axpb, x, b, alpha)


def scale(x: Tensor, alpha: float = 1.23, *, lowering: Lowering | None = None) -> Tensor:
    """Multiply by a number: ``alpha * x``, computed in float32 for the 16-bit dtypes and rounded once.

    Args:
        x: Tensor of any shape, float32, float64, float16 or bfloat16.
        alpha: Factor, rounded to float32 unless ``x`` is float64; not differentiated.
        lowering: Same as for :func:`vector_add`.

    Returns:
        The product, contiguous, of the shape and dtype of ``x``.

    Raises:
        ValueError: If ``alpha`` needs a gradient.
        TypeError: If the dtype has no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        sizes = (("elements", x.numel()),)
        return lower("scale", lowering, _scale_formula, _scale_kernel, x, alpha, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    check_number("scale", "alpha", alpha)
    try:
        return calls.scale(x, alpha)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_scale, x, alpha)


def _operands(*tensors: Tensor) -> Sequence[Tensor]:
    """The operands as autocast's rule of these operators casts them."""
    return tensors if autocast_dtype(tensors[0]) is None else to_widest(*tensors)


def _add_formula(a: Tensor, b: Tensor) -> Tensor:
    check_vector_add(a, b)
    return (a + b).contiguous()


def _add_kernel(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.custom_ops.vector_add.default(a, b)


def _axpb_formula(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    check_axpb(x, b, alpha)
    dtype = wide(x.dtype)
    return (alpha * x.to(dtype) + b.to(dtype)).to(x.dtype).contiguous()


def _axpb_kernel(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    return torch.ops.custom_ops.axpb.default(x, b, plain_number("axpb", "alpha", alpha))


def _scale_formula(x: Tensor, alpha: float) -> Tensor:
    check_scale(x, alpha)
    return (alpha * x.to(wide(x.dtype))).to(x.dtype).contiguous()


def _scale_kernel(x: Tensor, alpha: float) -> Tensor:
    return torch.ops.custom_ops.scale.default(x, plain_number("scale", "alpha", alpha))


def _fake(check: Callable[..., None]) -> Callable[..., Tensor]:
    def fake(x: Tensor, *rest: Any) -> Tensor:
        check(x, *rest)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    return fake


def _vector_add_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


def _keep_alpha(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.alpha = inputs[-1]


def _axpb_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return torch.ops.custom_ops.scale.default(gradient, ctx.alpha), gradient, None


def _scale_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.custom_ops.scale.default(gradient, ctx.alpha), None


def _widest(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    return [*to_widest(*arguments[:2]), *arguments[2:]]


RULES = (
    Rules("vector_add", _fake(check_vector_add), Autograd(_vector_add_backward), _widest, batched=elementwise_batched),
    Rules("axpb", _fake(check_axpb), Autograd(_axpb_backward, _keep_alpha), _widest, batched=elementwise_batched),
    Rules("scale", _fake(check_scale), Autograd(_scale_backward, _keep_alpha), batched=elementwise_batched),
)

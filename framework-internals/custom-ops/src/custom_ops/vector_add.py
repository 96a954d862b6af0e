"""The first rung: element-wise sums, registered from Python with schema, fake kernel and autograd.

Operands are of equal shape, dtype and device; those that are not contiguous are copied first, and the result is
contiguous. The four floating dtypes of :data:`custom_ops.checks.DTYPES` have kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from custom_ops.builds import extension
from custom_ops.checks import check_operands

# The tag is a promise that torch.compile may put the operator into its graphs; opcheck holds us to it.
torch.library.define("custom_ops::vector_add", "(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
torch.library.define(
    "custom_ops::axpb", "(Tensor x, Tensor b, float alpha) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def vector_add(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors: ``a + b``, rounded once, so that the result is bit-equal to :func:`torch.add`.

    Args:
        a: any shape, float32, float64, float16 or bfloat16.
        b: of the shape, dtype and device of ``a``.

    Returns:
        The sum, contiguous, of the shape and dtype of ``a``.

    Raises:
        ValueError: for different devices or shapes.
        TypeError: for different dtypes, or one that has no kernel.
        NotImplementedError: for a CUDA tensor where the build that serves has no CUDA kernels.
        native_build.BuildError: at the first call, when the kernels cannot be built.
    """
    return _VECTOR_ADD(a, b)


def axpb(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Scale and add in one kernel: ``alpha * x + b``, a fused multiply-add in float32 (float64 for float64).

    Two operators would read x, write alpha·x, read it back with b and write the sum: five passes over memory for three.

    Args:
        x: any shape, float32, float64, float16 or bfloat16.
        b: of the shape, dtype and device of ``x``.
        alpha: rounded to float32 unless ``x`` is float64.

    Returns:
        The result, contiguous, of the shape and dtype of ``x``.

    Raises:
        ValueError: for different devices or shapes.
        TypeError: for different dtypes, or one that has no kernel.
        NotImplementedError: for a CUDA tensor where the build that serves has no CUDA kernels.
        native_build.BuildError: at the first call, when the kernels cannot be built.
    """
    return _AXPB(x, b, alpha)


@torch.library.impl("custom_ops::vector_add", ("cpu", "cuda"))
def _vector_add(a: Tensor, b: Tensor) -> Tensor:
    return extension().vector_add(a, b)


@torch.library.impl("custom_ops::axpb", ("cpu", "cuda"))
def _axpb(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    return extension().axpb(x, b, alpha)


@torch.library.register_fake("custom_ops::vector_add")
def _vector_add_fake(a: Tensor, b: Tensor) -> Tensor:
    check_operands("vector_add", "a", a, b)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@torch.library.register_fake("custom_ops::axpb")
def _axpb_fake(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    check_operands("axpb", "x", x, b)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _vector_add_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


def _axpb_setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.alpha = inputs[2]


def _axpb_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient * ctx.alpha, gradient, None


torch.library.register_autograd("custom_ops::vector_add", _vector_add_backward)
torch.library.register_autograd("custom_ops::axpb", _axpb_backward, setup_context=_axpb_setup)

# The overload itself: calling the packet would look it up anew each time.
_VECTOR_ADD = torch.ops.custom_ops.vector_add.default
_AXPB = torch.ops.custom_ops.axpb.default

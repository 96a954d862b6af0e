"""Bias and GELU in one kernel, and their derivatives in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_bias_gelu, check_bias_gelu_backward, explain, wide
from custom_ops.operators.registration import Autograd, Rules, as_autocast, to_lower
from lowering import Lowering, check_lowering


def bias_gelu(x: Tensor, bias: Tensor, *, lowering: Lowering | None = None) -> Tensor:
    """Add a bias and apply GELU in its tanh approximation, in one pass over memory.

    u = x + bias, y = u/2 · (1 + tanh(√(2/π)·(u + 0.044715·u³))) (Hendrycks and Gimpel, arXiv:1606.08415). The kernel
    computes this as u · sigmoid(2z), which does not lose digits where 1 + tanh(z) cancels. The 16-bit dtypes are
    computed in float32 and rounded once. ``torch.nn.functional.gelu(x + bias, approximate="tanh")`` reads and writes
    twice as many bytes.

    Under autocast, both operands are cast to its dtype. The gradient of ``bias`` is summed in a fixed order.

    Args:
        x: (..., N), float32, float64, float16 or bfloat16.
        bias: Tensor of shape (N,), with the dtype and device of ``x``.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).

    Returns:
        y, contiguous, with the shape and dtype of ``x``.

    Raises:
        ValueError: If the devices differ, or the bias has another shape.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        x, bias = as_autocast(x, bias)
        sizes = (("rows", x.shape[:-1].numel()), ("columns", x.shape[-1]))
        return lower("bias_gelu", lowering, _formula, _kernel, x, bias, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.bias_gelu(x, bias)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_bias_gelu, x, bias)


def _formula(x: Tensor, bias: Tensor) -> Tensor:
    check_bias_gelu(x, bias)
    dtype = wide(x.dtype)
    return torch.nn.functional.gelu(x.to(dtype) + bias.to(dtype), approximate="tanh").to(x.dtype).contiguous()


def _kernel(x: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.custom_ops.bias_gelu.default(x, bias)


def _fake(x: Tensor, bias: Tensor, access: int = 0) -> Tensor:
    check_bias_gelu(x, bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor, *plan: int) -> tuple[Tensor, Tensor]:
    check_bias_gelu_backward(grad, x, bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, bias = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: torch's own operators have second derivatives
        dx = torch.ops.aten.gelu_backward(gradient, x + bias, approximate="tanh")
        return dx, dx.sum_to_size(bias.shape)
    return torch.ops.custom_ops.bias_gelu_backward.default(gradient, x, bias)


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], _size: int) -> Tensor | None:
    return None if mapped[1] else operator(*arguments)  # samples are rows, unless each has a bias of its own


def _lower(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    return [to_lower(tensor, dtype) for tensor in arguments]


RULES = (
    Rules("bias_gelu", _fake, Autograd(_backward, _setup), _lower, _batched),
    Rules("bias_gelu_backward", _fake_backward),
)

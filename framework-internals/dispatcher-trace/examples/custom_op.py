"""A custom operator to trace: ``dispatcher-trace run examples/custom_op.py:step --backward``."""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("dispatcher_trace_example::scaled_relu", mutates_args=())
def scaled_relu(x: Tensor, factor: float) -> Tensor:
    """Return max(x, 0) · factor."""
    return x.clamp(min=0) * factor


@scaled_relu.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    x, ctx.factor = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return gradient * (x > 0) * ctx.factor, None


scaled_relu.register_autograd(_backward, setup_context=_setup_context)


def step() -> Tensor:
    """Call the operator on a tensor that requires a gradient."""
    return scaled_relu(torch.linspace(-1, 1, 8, requires_grad=True), 2.0)

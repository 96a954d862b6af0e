"""Products of matrices on a CPU, and the linear layer made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_linear, check_mm, explain
from custom_ops.operators.registration import Autograd, Rules, autocast_dtype
from lowering import Lowering, check_lowering

# With fewer rows, a product waits for the weight's memory, and packing the weight would read it twice.
FEWEST_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lowering: Lowering | None = None) -> Tensor:
    """Compute x·Wᵀ + bias; on a CPU in float32 or float64 with the kernel of ``torch.ops.custom_ops.mm``.

    The gradients, grad·W and gradᵀ·x, are products of the same kernel and can be differentiated again. The kernel sums
    at most 176 products at a time, in a fixed order that does not depend on the number of threads.

    Elsewhere this is ``torch.nn.functional.linear``: on a GPU, in the 16-bit dtypes, under autocast and for fewer than
    16 rows, where the library's products are the fastest that are known.

    Args:
        x: (..., K), of any floating dtype.
        weight: (N, K), with the dtype and device of ``x``.
        bias: (N,), like ``weight``; added to the kernel's product, and a part of torch's.
        lowering: Under torch.compile, ``"formula"`` (``torch.nn.functional.linear``) or ``"kernel"``; None takes what
            was measured (:mod:`lowering`).

    Returns:
        y, (..., N), with the dtype of ``x``.

    Raises:
        ValueError: If the devices differ, or a size does not match.
        TypeError: If the dtypes differ.
        NotImplementedError: In forward mode, where the kernel is used.
        native_build.BuildError: At the first call, if the kernel cannot be built.
    """
    if is_dynamo_compiling():
        if not _has_kernel(x):
            return F.linear(x, weight, bias)
        sizes = (("rows", x.shape[:-1].numel()), ("columns", weight.shape[0]), ("depth", x.shape[-1]))
        return lower("linear", lowering, F.linear, _kernel, x, weight, bias, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    try:
        if not _has_kernel(x):
            return F.linear(x, weight, bias)
        product = calls.mm(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])
        if bias is None:
            return product
        check_linear(x, weight, bias)  # a sum would promote and broadcast it
        return product + bias
    except (RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:  # those of mm's fake too
        explain(error, check_linear, x, weight, bias)


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` by :func:`linear`: the same parameters, so it drops into a model.

    Args:
        lowering: See :func:`linear`. The other arguments are those of ``torch.nn.Linear``.
    """

    def __init__(self, *arguments: Any, lowering: Lowering | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.lowering = lowering

    def forward(self, input: Tensor) -> Tensor:
        """Return input·Wᵀ + bias."""
        return linear(input, self.weight, self.bias, lowering=self.lowering)


def _has_kernel(x: Tensor) -> bool:
    return (
        x.is_cpu
        and x.dim() > 1
        and x.dtype in (torch.float32, torch.float64)
        and math.prod(x.shape[:-1]) >= FEWEST_ROWS  # Size.numel() would fix a size of an exported program
        and autocast_dtype(x) is None
    )


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.custom_ops.mm.default(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


def _fake(a: Tensor, b: Tensor) -> Tensor:
    check_mm(a, b)
    return a.new_empty(a.shape[0], b.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    mm = torch.ops.custom_ops.mm.default
    da = mm(gradient, b.t()) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return da, None
    # The gradient of a transposed weight lies as the weight does.
    return da, mm(gradient.t(), a).t() if b.stride(0) == 1 else mm(a.t(), gradient)


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Tensor | None:
    a, b = arguments
    if mapped[1]:
        return None
    product: Tensor = operator(a.flatten(0, 1), b)  # samples are rows
    return product.unflatten(0, (size, -1))


RULES = (Rules("mm", _fake, Autograd(_backward, _setup), batched=_batched),)

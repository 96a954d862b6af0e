"""Products of matrices on a CPU, and the linear layer made of them."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_linear, check_mm, explain
from custom_ops.operators.registration import Autograd, Rules, as_autocast, autocast_dtype
from lowering import Lowering, check_lowering
from lowering.torch_private import constant_under_compile, exporting, onednn_multiplies
from native_build.derivatives import is_fake

# With fewer rows, a product waits for the weight's memory, and packing the weight would read it twice. Of 16-bit
# dtypes torch has vectorised sums for one row.
FEWEST_ROWS, FEWEST_ROWS_NARROW = 16, 2


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, lowering: Lowering | None = None) -> Tensor:
    """Compute x·Wᵀ + bias on a CPU with the kernel of ``torch.ops.custom_ops.mm``.

    The gradients, grad·W and gradᵀ·x, are products of the same kernel and can be differentiated again. The kernel sums
    at most 176 products at a time, in a fixed order that does not depend on the number of threads. 16-bit operands are
    widened to float32 as the kernel packs them, and a sum is rounded once.

    The kernel takes float32 and float64, and a 16-bit dtype on an x86 processor for which oneDNN has no products of it
    (bfloat16 without AVX-512, float16 without its float16 instructions), whose products torch sums in plain loops.
    Elsewhere this is ``torch.nn.functional.linear``: on a GPU, in the other 16-bit dtypes, under autocast to one of
    them, for fewer than 16 rows, in 16 bits for one row (an exported program has the kernel for any number), and for
    operands that are nested, sparse, or of a subclass of tensor, such as a DTensor or a quantised weight.

    Args:
        x: (..., K), of any floating dtype.
        weight: (N, K), with the dtype and device of ``x``.
        bias: (N,), like ``weight``.
        lowering: Under torch.compile, ``"formula"`` (``torch.nn.functional.linear``, of float32 in a 16-bit dtype that
            has the kernel) or ``"kernel"``; None takes what was measured (:mod:`lowering`), and without a measurement
            the kernel for 16-bit dtypes and the formula for the others.

    Returns:
        y, (..., N), with the dtype of ``x``, or under autocast with its dtype.

    Raises:
        ValueError: If the devices differ, or a size does not match.
        TypeError: If the dtypes differ.
        NotImplementedError: In forward mode, where the kernel is used.
        native_build.BuildError: At the first call, if the kernel cannot be built.
    """
    if is_dynamo_compiling():
        taken = _has_kernel(x, weight)
        return _lowered(lowering, *as_autocast(x, weight, bias)) if taken else F.linear(x, weight, bias)
    if lowering is not None:
        check_lowering(lowering)
    try:
        if not _has_kernel(x, weight):
            return F.linear(x, weight, bias)
        x, weight, bias = as_autocast(x, weight, bias)
        return calls.mm(x.flatten(0, -2), weight.t(), bias).view(*x.shape[:-1], weight.shape[0])
    except (RuntimeError, AttributeError, IndexError, TypeError, ValueError) as error:  # those of mm's fake too
        explain(error, check_linear, x, weight, bias)


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` by :func:`linear`: the same parameters, so it drops into a model.

    Args:
        lowering: See :func:`linear`. The other arguments are those of ``torch.nn.Linear``.
    """

    lowering: Lowering | None = None  # also of a module of torch that became one of this class

    def __init__(self, *arguments: Any, lowering: Lowering | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.lowering = lowering

    def forward(self, input: Tensor) -> Tensor:
        """Return input·Wᵀ + bias."""
        return linear(input, self.weight, self.bias, lowering=self.lowering)


_WIDE = (torch.float32, torch.float64)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, differentiable: bool = False) -> Tensor:
    """Compute a·b + bias of matrices for another operator: in 16 bits by the rule of :func:`linear`, else by torch.

    Args:
        a: (N, K).
        b: (K, M), with the dtype and device of ``a``.
        bias: (M,), like ``a``.
        differentiable: Whether the product must carry tangents and nested transforms. Those of float32 then take the
            place of the kernel, which has no forward mode.

    Returns:
        (N, M), with the dtype of ``a``, each element rounded once.
    """
    if not has_narrow_kernel(a, b):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    if differentiable:
        return _by_float32(a, b.t(), bias)
    product: Tensor = (torch.ops.custom_ops.mm.default if is_dynamo_compiling() else calls.mm)(a, b, bias)
    return product


def has_narrow_kernel(a: Tensor, b: Tensor) -> bool:
    """Whether :func:`matmul` takes the kernel for a·b."""
    return a.dtype not in _WIDE and _has_kernel(a, b)


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    if not (_is_ordinary(x) and _is_ordinary(weight) and x.is_cpu) or x.dim() < 2:
        return False
    dtype = x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype
    if dtype not in _WIDE and not _is_slow(dtype):
        return False
    fewest = FEWEST_ROWS if dtype in _WIDE else FEWEST_ROWS_NARROW
    return exporting() or math.prod(x.shape[:-1]) >= fewest  # a program that is exported takes any number of rows


def _is_ordinary(operand: Tensor) -> bool:
    """Whether a product is of the tensor's elements: not of a quantised, sharded, sparse or nested one."""
    known = type(operand) in (Tensor, torch.nn.Parameter) or is_fake(operand)
    if is_dynamo_compiling():  # in an autograd.Function it reads no layout
        return known and not (operand.is_sparse or operand.is_sparse_csr or operand.is_mkldnn or operand.is_nested)
    return known and operand.layout == torch.strided and not operand.is_nested


@constant_under_compile
def _is_slow(dtype: torch.dtype) -> bool:
    return dtype in slow_in_torch()


@functools.cache  # at the first use: oneDNN then reads its limit from the environment
def slow_in_torch() -> frozenset[torch.dtype]:
    """The 16-bit dtypes whose products torch sums in plain loops here: by its own condition, oneDNN has none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()  # torch has vectorised sums for arm64
    return frozenset(dtype for dtype in (torch.bfloat16, torch.float16) if not onednn_multiplies(dtype))


def _lowered(lowering: Lowering | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sizes = (("rows", x.shape[:-1].numel()), ("columns", weight.shape[0]), ("depth", x.shape[-1]))
    if x.dtype in _WIDE:
        return lower("linear", lowering, F.linear, _kernel, x, weight, bias, sizes=sizes)
    return lower("linear", lowering, _by_float32, _kernel, x, weight, bias, sizes=sizes, default="kernel")


def _by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.custom_ops.mm.default(x.flatten(0, -2), weight.t(), bias)
    return product.unflatten(0, x.shape[:-1])


def _fake(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    check_mm(a, b, bias)
    return a.new_empty(a.shape[0], b.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b, *of_bias = ctx.needs_input_grad  # a call without a bias may come without that argument
    mm = torch.ops.custom_ops.mm.default
    da = mm(gradient, b.t()) if needs_a else None
    dbias = [gradient.sum(0) if needed else None for needed in of_bias]
    if not needs_b:
        return da, None, *dbias
    # The gradient of a transposed weight lies as the weight does.
    return da, mm(gradient.t(), a).t() if b.stride(0) == 1 else mm(a.t(), gradient), *dbias


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Tensor | None:
    a, *others = arguments
    if any(mapped[1:]):
        return None
    product: Tensor = operator(a.flatten(0, 1), *others)  # samples are rows
    return product.unflatten(0, (size, -1))


RULES = (Rules("mm", _fake, Autograd(_backward, _setup), batched=_batched),)

"""The memory-bound operators to time: their operands, torch's equivalents, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
from custom_ops.bench import accounting
from custom_ops.bench.accounting import Traffic
from custom_ops.operators import rotary
from custom_ops.operators.calls import calls
from custom_ops.operators.checks import wide

OURS = "custom_ops"
COMPILED = "torch.compile"

# A number of three binary digits: its product with any float64 is exact in the reference's 64-bit mantissa.
ALPHA = 1.25

_HEAD_SIZE = 64  # of rotary; a token has as many heads as fit its columns


@dataclass(frozen=True)
class BenchmarkCase:
    """One operator and the functions to compare it with.

    Attributes:
        op: Name of the operator in tables.
        operands: Makes the operands of every form from (elements, columns, dtype, device).
        forms: Functions by name: :data:`OURS` is this package's, ``"torch"`` uses torch's operators without a compiler.
        traffic: Traffic of this package's form.
        unfused: Traffic of torch's operators, called one after another.
        limit: The measured memory limit with which the operator is compared.
        compiled: Function for ``torch.compile`` to fuse; None if there is nothing to fuse.
    """

    op: str
    operands: Callable[[int, int, torch.dtype, str], tuple[Tensor, ...]]
    forms: Mapping[str, Callable[..., Any]]
    traffic: Callable[..., Traffic]
    unfused: Callable[..., Traffic]
    limit: str
    compiled: Callable[..., Any] | None = None


def _vectors(number: int) -> Callable[[int, int, torch.dtype, str], tuple[Tensor, ...]]:
    def make(count: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return tuple(torch.randn(count, device=device).to(dtype) for _ in range(number))

    return make


def _matrices(number: int) -> Callable[[int, int, torch.dtype, str], tuple[Tensor, ...]]:
    def make(count: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return _rows(number)(count, columns, dtype, device)[:-1]

    return make


def _rows(number: int) -> Callable[[int, int, torch.dtype, str], tuple[Tensor, ...]]:
    def make(count: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        columns = min(columns, count)
        rows = tuple(torch.randn(count // columns, columns, device=device).to(dtype) for _ in range(number))
        return *rows, torch.randn(columns, device=device).to(dtype)

    return make


def _unfused_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _unfused_gelu_backward(grad: Tensor, saved: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.ops.aten.gelu_backward(grad, saved, approximate="tanh")
    return dx, dx.sum(0)


def _gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    dx = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
    return dx, dx.sum(0)


def _glu(
    op: str, activation: Callable[[Tensor], Tensor], derivative: Callable[[Tensor, Tensor], Tensor]
) -> tuple[BenchmarkCase, BenchmarkCase]:
    """A gated activation and its derivative; torch's own derivative has the activation saved."""

    def unfused(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    def unfused_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return derivative(grad * up, gate), grad * gate  # in place of the saved activation, a tensor of its size

    def formula_of_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return derivative(grad * up, gate), grad * activation(gate)

    backward = f"{op}_backward"
    return (
        BenchmarkCase(
            op, _matrices(2), {OURS: getattr(custom_ops, op), "torch": unfused}, accounting.glu_traffic,
            accounting.glu_unfused_traffic, "2 reads 1 write", unfused,
        ),
        BenchmarkCase(
            backward, _matrices(3),
            {OURS: lambda *operands: getattr(calls, backward)(*operands), "torch": unfused_backward},
            accounting.glu_backward_traffic, accounting.glu_backward_unfused_traffic, "2 reads 1 write",
            formula_of_backward,
        ),
    )  # fmt: skip


def _logits(count: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    columns = min(columns, count)
    rows = count // columns
    return torch.randn(rows, columns, device=device).to(dtype), torch.randint(columns, (rows,), device=device)


def _cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return calls.cross_entropy_gradient_(logits, targets, logits.shape[1], -100), logits


def _unfused_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    losses = F.cross_entropy(logits.to(wide(logits.dtype)), targets, reduction="none")
    return losses.detach(), torch.autograd.grad(losses, logits, torch.ones_like(losses))[0]


def _formula_of_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    wide_logits = logits.to(wide(logits.dtype))
    normaliser = wide_logits.logsumexp(1, keepdim=True)
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = (wide_logits - normaliser).exp() - chosen.to(wide_logits.dtype)
    return (normaliser - wide_logits.gather(1, targets[:, None]))[:, 0], gradient.to(logits.dtype)


def _heads(count: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    size = min(_HEAD_SIZE, columns)
    heads = columns // size
    tokens = count // (heads * size)
    x = torch.randn(1, tokens, heads, size, device=device).to(dtype)
    angles = torch.randn(tokens, size // 2, dtype=wide(dtype), device=device)
    return x, angles.cos(), angles.sin()


def benchmark_cases() -> Mapping[str, BenchmarkCase]:
    """All memory-bound operators that are a single kernel, by name."""
    cases = (
        BenchmarkCase(
            "vector_add", _vectors(2), {OURS: custom_ops.vector_add, "torch": torch.add},
            accounting.vector_add_traffic, lambda a, b: accounting.elementwise(a, inputs=2), "2 reads 1 write",
        ),
        BenchmarkCase(
            "axpb", _vectors(2),
            {OURS: lambda x, b: custom_ops.axpb(x, b, ALPHA), "torch": lambda x, b: ALPHA * x + b},
            accounting.axpb_traffic, lambda x, b: accounting.axpb_unfused_traffic(x), "2 reads 1 write",
            lambda x, b: ALPHA * x + b,
        ),
        BenchmarkCase(
            "scale", _vectors(1), {OURS: custom_ops.scale, "torch": lambda x: 1.23 * x},
            accounting.scale_traffic, accounting.scale_traffic, "1 read 1 write",
        ),
        BenchmarkCase(
            "bias_gelu", _rows(1), {OURS: custom_ops.bias_gelu, "torch": _unfused_gelu},
            accounting.bias_gelu_traffic, accounting.bias_gelu_unfused_traffic, "1 read 1 write", _unfused_gelu,
        ),
        BenchmarkCase(
            "bias_gelu_backward", _rows(2),
            {OURS: lambda *operands: calls.bias_gelu_backward(*operands), "torch": _unfused_gelu_backward},
            lambda grad, x, bias: accounting.bias_gelu_backward_traffic(x, bias),
            lambda grad, x, bias: accounting.bias_gelu_backward_unfused_traffic(x, bias), "2 reads 1 write",
            _gelu_backward,
        ),
        *_glu("swiglu", F.silu, torch.ops.aten.silu_backward),
        *_glu("geglu", F.gelu, torch.ops.aten.gelu_backward),
        BenchmarkCase(
            "cross_entropy", _logits, {OURS: _cross_entropy, "torch": _unfused_cross_entropy},
            accounting.cross_entropy_traffic, accounting.cross_entropy_unfused_traffic, "1 read 1 write",
            _formula_of_cross_entropy,
        ),
        BenchmarkCase(
            "rotary", _heads, {OURS: custom_ops.rotary, "torch": rotary.formula},
            accounting.rotary_traffic, accounting.rotary_unfused_traffic, "1 read 1 write", rotary.formula,
        ),
    )  # fmt: skip
    return {case.op: case for case in cases}

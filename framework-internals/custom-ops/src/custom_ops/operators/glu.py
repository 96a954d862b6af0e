"""Gated linear units, an activation of one tensor times another, in one kernel each way: ``swiglu`` and ``geglu``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_geglu, check_glu, check_glu_backward, check_swiglu, explain, wide
from custom_ops.operators.registration import Autograd, Rules, as_autocast, elementwise_batched, to_lower
from lowering import Lowering, check_lowering

Approximation = Literal["none", "tanh"]


def swiglu(gate: Tensor, up: Tensor | None = None, *, lowering: Lowering | None = None) -> Tensor:
    """Compute silu(gate)·up in one pass over memory (Shazeer, arXiv:2002.05202, without its products).

    y = gate·σ(gate)·up. The 16-bit dtypes are computed in float32 and rounded once. torch's two operators move 5 times
    the bytes of y, and the kernel 3 times. The backward pass is one kernel too: 3 reads and 2 writes.

    With two tensors, as of two projections, rows that lie at one distance are read in place, so those of
    ``x.chunk(2, -1)`` too. With one, as of a fused projection, its halves are gate and up, and the gradient of ``x``
    is written whole, where that of chunks is put together by a copy.

    Under autocast, the operands are cast to its dtype.

    Args:
        gate: (..., H), float32, float64, float16 or bfloat16; without ``up`` (..., 2H), the gate first.
        up: Tensor with the shape, dtype and device of ``gate``.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).

    Returns:
        y, (..., H), contiguous, of the dtype of ``gate``.

    Raises:
        ValueError: If the devices or shapes differ, or the last size is odd where there is no ``up``.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        return _lowered("swiglu", lowering, _swiglu_formula, _swiglu_kernel, gate, up)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.swiglu(gate, up)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_swiglu, gate, up)


def geglu(
    gate: Tensor, up: Tensor | None = None, *, approximate: Approximation = "none", lowering: Lowering | None = None
) -> Tensor:
    """Compute gelu(gate)·up in one pass over memory; see :func:`swiglu`.

    y = gate·Φ(gate)·up with the normal distribution Φ, or its approximation by tanh as in
    :func:`~custom_ops.bias_gelu`. Below zero, where 1 + erf cancels, y keeps its digits.

    Args:
        gate: Same as for :func:`swiglu`.
        up: Same as for :func:`swiglu`.
        approximate: ``"none"`` or ``"tanh"``, as for ``torch.nn.functional.gelu``.
        lowering: Same as for :func:`swiglu`.

    Returns:
        y, (..., H), contiguous, of the dtype of ``gate``.

    Raises:
        ValueError: As :func:`swiglu`, or if the approximation is unknown.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: argument 'approximate': expected 'none' or 'tanh', got {approximate!r}")
    tanh = approximate == "tanh"
    if is_dynamo_compiling():
        return _lowered("geglu", lowering, _geglu_formula, _geglu_kernel, gate, up, tanh)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.geglu(gate, up, tanh)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_geglu, gate, up, tanh)


def _lowered(
    op: str, lowering: Lowering | None, formula: Any, kernel: Any, gate: Tensor, up: Tensor | None, *rest: bool
) -> Tensor:
    gate, up = as_autocast(gate, up)
    columns = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    sizes = (("rows", gate.shape[:-1].numel()), ("columns", columns))
    result: Tensor = lower(op, lowering, formula, kernel, gate, up, *rest, sizes=sizes)
    return result


def _product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    """The formula in the dtype of the arithmetic."""
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    dtype = wide(gate.dtype)
    return (activation(first.to(dtype)) * second.to(dtype)).to(gate.dtype).contiguous()


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def _swiglu_formula(gate: Tensor, up: Tensor | None) -> Tensor:
    check_swiglu(gate, up)
    return _product(F.silu, gate, up)


def _geglu_formula(gate: Tensor, up: Tensor | None, tanh: bool) -> Tensor:
    check_geglu(gate, up, tanh)
    return _product(lambda x: _gelu(x, tanh), gate, up)


def _swiglu_kernel(gate: Tensor, up: Tensor | None) -> Tensor:
    return torch.ops.custom_ops.swiglu.default(gate, up)


def _geglu_kernel(gate: Tensor, up: Tensor | None, tanh: bool) -> Tensor:
    return torch.ops.custom_ops.geglu.default(gate, up, tanh)


def _fake(op: str) -> Callable[..., Tensor]:
    def fake(gate: Tensor, up: Tensor | None = None, tanh: bool = False) -> Tensor:
        check_glu(op, gate, up)
        columns = gate.shape[-1] if up is not None else gate.shape[-1] // 2
        return gate.new_empty((*gate.shape[:-1], columns))

    return fake


def _fake_backward(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def fake(grad: Tensor, gate: Tensor, up: Tensor | None = None, tanh: bool = False) -> tuple[Tensor, Tensor]:
        check_glu_backward(op, grad, gate, up)
        dup = gate.new_empty((*gate.shape[:-1], 0 if up is None else gate.shape[-1]))
        return gate.new_empty(gate.shape), dup

    return fake


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.rest = inputs
    ctx.save_for_backward(gate, up)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    sigmoid = x.sigmoid()  # aten's silu_backward has no derivative
    return gradient * sigmoid * (1 + x * (1 - sigmoid))


def _swiglu_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True: torch's own operators have second derivatives
        return _with_graph(_silu_backward, F.silu, gradient, gate, up)
    dgate, dup = torch.ops.custom_ops.swiglu_backward.default(gradient, gate, up)
    return dgate, None if up is None else dup


def _geglu_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    (tanh,) = ctx.rest
    if torch.is_grad_enabled():
        form = "tanh" if tanh else "none"
        derivative = lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate=form)  # noqa: E731
        return *_with_graph(derivative, lambda x: _gelu(x, tanh), gradient, gate, up), None
    dgate, dup = torch.ops.custom_ops.geglu_backward.default(gradient, gate, up, tanh)
    return dgate, None if up is None else dup, None


def _with_graph(
    derivative: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], gradient: Tensor, gate: Tensor,
    up: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    first, second = gate.chunk(2, -1) if up is None else (gate, up)
    results = derivative(gradient * second, first), gradient * activation(first)
    return (torch.cat(results, -1), None) if up is None else results


def _lower(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    return [to_lower(x, dtype) if isinstance(x, Tensor) else x for x in arguments]


RULES = (
    Rules("swiglu", _fake("swiglu"), Autograd(_swiglu_backward, _setup), _lower, elementwise_batched),
    Rules("swiglu_backward", _fake_backward("swiglu_backward")),
    Rules("geglu", _fake("geglu"), Autograd(_geglu_backward, _setup), _lower, elementwise_batched),
    Rules("geglu_backward", _fake_backward("geglu_backward")),
)

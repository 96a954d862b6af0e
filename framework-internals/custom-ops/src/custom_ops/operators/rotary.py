"""Rotary positions of queries and keys in one kernel, which is its own derivative with the opposite angle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_rotary, explain
from custom_ops.operators.registration import Autograd, Rules
from lowering import Lowering, check_lowering


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, lowering: Lowering | None = None
) -> Tensor:
    """Rotate the P pairs (x_i, x_{i+P}) of each head by the angle of their token (Su et al., arXiv:2104.09864).

    y_i = x_i·cos − x_{i+P}·sin and y_{i+P} = x_{i+P}·cos + x_i·sin, in one pass over memory. If P < D/2, the elements
    from 2P on stay as they are (partial rotary). The 16-bit dtypes are computed in float32 and rounded once. Slices of
    a fused projection are read in place.

    The gradient is the inverse rotation, by the same kernel; it can be differentiated again. The tables have none.

    Args:
        x: (B, T, H, D), float32, float64, float16 or bfloat16, D even.
        cos: (T, P), or (B, T, P) where the batches have positions of their own, P ≤ D/2; float32, or float64 for a
            float64 ``x``, on the device of ``x``.
        sin: Tensor like ``cos``.
        interleaved: Whether the pairs are neighbours, (x_{2i}, x_{2i+1}), as in GPT-J.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).

    Returns:
        y, contiguous, with the shape and dtype of ``x``.

    Raises:
        ValueError: If the devices differ, a shape does not match, D is odd, or a table needs a gradient.
        TypeError: If a dtype does not match or has no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if any(isinstance(table, Tensor) and table.requires_grad for table in (cos, sin)):
        raise ValueError("rotary: argument 'cos' or 'sin': the tables have no gradient; use .detach()")
    if is_dynamo_compiling():
        sizes = (("tokens", x.shape[:2].numel()), ("heads", x.shape[2]), ("head size", x.shape[3]))
        return lower("rotary", lowering, _formula, _kernel, x, cos, sin, interleaved, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.rotary(x, cos, sin, False, True) if interleaved else calls.rotary(x, cos, sin)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_rotary, x, cos, sin, interleaved)


def formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """:func:`rotary` in torch's operators, without its checks."""
    turned, kept = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    wide = turned.to(cos.dtype)
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    rotated = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)
    return rotated if kept.shape[-1] == 0 else torch.cat((rotated, kept), -1)


def _formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    check_rotary(x, cos, sin)
    return formula(x, cos, sin, interleaved)


def _kernel(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.ops.custom_ops.rotary.default(x, cos, sin, False, interleaved)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, interleaved: bool = False) -> Tensor:
    check_rotary(x, cos, sin)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    of_x = torch.ops.custom_ops.rotary.default(gradient, cos, sin, not ctx.inverse, ctx.interleaved)
    return (of_x, None, None, None, None)[: len(ctx.needs_input_grad)]


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Tensor | None:
    x, cos, sin, *choices = arguments
    if mapped[1] or mapped[2] or cos.dim() == 3:
        return None
    rotated: Tensor = operator(x.flatten(0, 1), cos, sin, *choices)
    return rotated.unflatten(0, (size, -1))


RULES = (Rules("rotary", _fake, Autograd(_backward, _setup), batched=_batched),)

"""Attention that does not write its matrix of scores to memory: one kernel forward, fused kernels backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import scaled_dot_product_attention

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import check_flash_attention, check_flash_attention_backward, explain, wide
from custom_ops.operators.registration import Autograd, Rules, autocast_dtype, to_lower
from lowering import Lowering, check_lowering


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    lowering: Lowering | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, softmax(scale·QKᵀ)·V, and the log-sum-exp of each row of scores.

    Tiles of the scores stay on the chip, and the softmax is updated tile by tile (Dao et al., arXiv:2205.14135).
    float32 runs on tensor cores as three float16 products of split operands. Under autocast, the operands are cast to
    its dtype.

    On a Hopper GPU, the gradient of q in float16 and bfloat16 is a sum whose order is free, as in torch's flash
    attention: its last bits vary from run to run. Under :func:`torch.use_deterministic_algorithms` the order is fixed;
    ``torch.ops.custom_ops.flash_attention_backward`` has this as an argument. All other results are the same bits every
    time.

    Args:
        q: (B, H, S, D), float32, float64, float16 or bfloat16, D up to 256.
        k: (B, H_kv, T, D), of the dtype and device of ``q``; query head h reads key head h // (H / H_kv).
        v: (B, H_kv, T, D).
        causal: Query i attends to keys j ≤ i, like ``is_causal`` of ``scaled_dot_product_attention``.
        scale: Finite factor of the scores; 1/√D if None.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).
            The formula is ``scaled_dot_product_attention``.

    Returns:
        out (B, H, S, D) in the dtype of ``q``; and lse (B, H, S), float32 (float64 for float64). The kernel's out, as
        its gradients, is contiguous, or a transposed contiguous (B, S, H, D) if ``q`` lies so; the formula's has the
        layout that ``scaled_dot_product_attention`` gives it.

    Raises:
        ValueError: If the devices differ, the shapes do not match, D is above 256, or the scale is not finite.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode or ``torch.func``,
            for which there is no derivative.
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    if is_dynamo_compiling():
        if (dtype := autocast_dtype(q)) is not None:
            q, k, v = to_lower(q, dtype), to_lower(k, dtype), to_lower(v, dtype)
        sizes = (("heads", q.shape[:2].numel()), ("queries", q.shape[2]), ("head size", q.shape[3]))
        arguments = (q, k, v, causal, scale)
        return lower("flash_attention", lowering, _formula, _kernel, *arguments, sizes=sizes)
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.flash_attention(q, k, v, causal, scale)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_flash_attention, q, k, v, causal, scale)


def _formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    check_flash_attention(q, k, v, causal, scale)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # a comparison of symbols is no bool
    out = scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale, **grouped)
    # The compiler drops the second result, and with it the matrix of scores, where nothing uses it.
    return out, reference(q, k, v, causal, scale)[1]


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    return torch.ops.custom_ops.flash_attention.default(q, k, v, causal, scale)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Compute the same with torch's operators and the matrix of scores in memory; differentiable any number of times.

    The 16-bit dtypes are computed in float32, as :func:`flash_attention` computes them.
    """
    dtype = wide(q.dtype)
    groups = q.shape[1] // max(k.shape[1], 1)
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.to(dtype) @ keys.transpose(-1, -2))
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse.unsqueeze(-1)) @ values).to(q.dtype), lse


def _fake(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, algorithm: int = 0
) -> tuple[Tensor, Tensor]:
    check_flash_attention(q, k, v, causal, scale)
    return _in_order_of(q), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _in_order_of(x: Tensor) -> Tensor:
    """The kernels write a result with adjacent heads in each token where they read such an operand."""
    if x.stride(1) < x.stride(2):
        return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    deterministic: bool = False,
) -> tuple[Tensor, ...]:
    check_flash_attention_backward(grad_out, grad_lse, q, k, v, out, lse, causal, scale)
    return tuple(_in_order_of(x) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return None, None, None, None, None
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    if torch.is_grad_enabled():  # create_graph=True
        return *_gradients_with_graph(ctx, grad_out, grad_lse), None, None
    gradients = torch.ops.custom_ops.flash_attention_backward.default(
        grad_out, grad_lse, q, k, v, out, lse, ctx.causal, ctx.scale, torch.are_deterministic_algorithms_enabled()
    )
    return *gradients, None, None


def _gradients_with_graph(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor | None]:
    """The gradients of q, k and v by torch's operators; None for those that are not needed."""
    # Separate views: if k is computed from q, or is q, autograd would add k's gradient to that of q.
    operands = q, k, v = [x.view_as(x) for x in ctx.saved_tensors[:3]]
    needed = ctx.needs_input_grad[:3]
    results, gradients = [*reference(q, k, v, ctx.causal, ctx.scale)], [grad_out, grad_lse]
    if grad_lse is None or not results[1].requires_grad:  # lse does not depend on v
        results, gradients = results[:1], gradients[:1]
    asked = [x for x, wanted in zip(operands, needed, strict=True) if wanted]
    found = iter(torch.autograd.grad(results, asked, gradients, create_graph=True))
    return [next(found) if wanted else None for wanted in needed]


def _lower(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    return [*(to_lower(tensor, dtype) for tensor in arguments[:3]), *arguments[3:]]


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> tuple[Tensor, ...]:
    """Samples are batches."""
    tensors = [x if over else x.expand(size, *x.shape) for x, over in zip(arguments[:3], mapped, strict=False)]
    results = operator(*(x.flatten(0, 1) for x in tensors), *arguments[3:])
    return tuple(x.unflatten(0, (size, -1)) for x in results)


RULES = (
    Rules("flash_attention", _fake, Autograd(_backward, _setup), _lower, _batched),
    Rules("flash_attention_backward", _fake_backward),
)

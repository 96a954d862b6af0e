"""Attention that does not write its matrix of scores to memory: one kernel forward, fused kernels backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import scaled_dot_product_attention

from custom_ops.operators.calls import calls, lower
from custom_ops.operators.checks import (
    check_flash_attention,
    check_flash_attention_backward,
    check_kinds,
    check_number,
    explain,
    plain_number,
    wide,
)
from custom_ops.operators.registration import Autograd, Rules, autocast_dtype, to_lower, without_autocast
from lowering import Lowering, check_lowering

# What the operator takes behind the scale where a call has no features.
_NONE = (-1, -1, 0.0, None, None, None, None, None)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    lowering: Lowering | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, softmax(scale·QKᵀ)·V, and the log-sum-exp of each row of scores.

    Tiles of the scores stay on the chip, and the softmax is updated tile by tile (Dao et al., arXiv:2205.14135).
    float32 runs on tensor cores as three float16 products of split operands. Under autocast, the operands are cast to
    its dtype.

    The features change the scores before the softmax, in this order: S = softcap·tanh(scale·QKᵀ / softcap)
    + attn_mask − slope·|j − diagonal|, then −∞ where query i does not see key j. The *diagonal* of query i is key
    i + T − S: the two ends of a sequence are aligned (bottom right), as in FlashAttention from 2.1 on and in
    ``torch.nn.attention.bias.causal_lower_right``. ``is_causal`` of ``scaled_dot_product_attention`` aligns the two
    starts; the two are the same where S = T. A query that sees no key has zeros in out and −∞ in lse. Tiles of which
    no query sees a key are not computed; in the others 0 times a hidden NaN is NaN: keep padding finite.

    On a GPU, float16 and bfloat16 on Hopper have wgmma kernels for windows, packed sequences, soft caps, sinks,
    bottom-right masks, and an attn_mask beside no soft cap whose rows are multiples of 16 bytes (backward, with D up to
    128). alibi_slopes, other masks, float32, fixed orders of sums and other GPUs have mma.sync kernels.
    Absent are dropout, values of another head size than the keys, and a paged cache.

    On a Hopper GPU, the gradient of q in float16 and bfloat16 is a sum whose order is free, as in torch's flash
    attention: its last bits vary from run to run. Under :func:`torch.use_deterministic_algorithms` the order is fixed;
    ``torch.ops.custom_ops.flash_attention_backward`` has this as an argument. All other results are the same bits every
    time.

    Args:
        q: (B, H, S, D), float32, float64, float16 or bfloat16, D up to 256. With ``cu_seqlens_q``: (S, H, D), the rows
            of all sequences.
        k: (B, H_kv, T, D), of the dtype and device of ``q``; query head h reads key head h // (H / H_kv). With
            ``cu_seqlens_k``: (T, H_kv, D).
        v: Like ``k``.
        causal: Query i attends to keys up to its diagonal, j ≤ i + T − S.
        scale: Finite factor of the scores, not differentiated (multiply ``q`` by one that is learned); 1/√D if None.
        window_size: How many keys before and after its diagonal a query sees; −1 is no limit.
        softcap: Bound of the scores, c·tanh(s / c), not differentiated; 0 is none.
        sinks: (H,), a score of each head that takes part in the softmax without a key, and is learned.
        attn_mask: Broadcastable to (B, H, S, T). Of the dtype of ``q``, it is added to the scores and has a gradient
            (computed with B·H·S·T elements, and summed where the mask is broadcast). If bool, False hides a key; so
            does a number near the lowest of the dtype of lse, such as ``torch.finfo(torch.bfloat16).min``.
        alibi_slopes: (H,) or (B, H), the penalty of a distance of one to the diagonal; without a gradient.
        cu_seqlens_q: int32, on the device of ``q``: the first row of each sequence, then the number of rows. Rows see
            keys of their own sequence only.
        cu_seqlens_k: Likewise for the keys, of as many sequences.
        max_seqlen_q: Taken so that calls of the field's functions fit; no kernel here needs the longest sequence.
        max_seqlen_k: Likewise.
        lowering: Under torch.compile, ``"formula"`` or ``"kernel"``; None takes what was measured (:mod:`lowering`).
            The formula is ``scaled_dot_product_attention``. With features it has the matrix of scores in memory, and
            None takes the kernel wherever it can be used.

    Returns:
        out, with the shape and dtype of ``q``; and lse (B, H, S), float32 (float64 for float64); of packed sequences
        (H, S). The kernel's out, as its gradients, is contiguous, or a transposed contiguous (B, S, H, D) if ``q`` lies
        so; the formula's has the layout that ``scaled_dot_product_attention`` gives it.

    Raises:
        ValueError: If devices, shapes or numbers are wrong, D is not 1 to 256, or what has no gradient needs one.
        TypeError: If the dtypes differ or have no kernel.
        NotImplementedError: If the build in use has no kernels for the device, or in forward mode; also in
            ``torch.func`` where the derivative is Python's (``custom_ops.build_info().autograd``).
        native_build.BuildError: At the first call, if the kernels cannot be built.
    """
    asked = (window_size, softcap, sinks, attn_mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    out, lse = _attention(q, k, v, causal, scale, asked, lowering)
    return (out, lse) if cu_seqlens_q is None else (out.squeeze(0).transpose(0, 1), lse.squeeze(0))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    asked: tuple[Any, ...],
    lowering: Lowering | None,
) -> tuple[Tensor, Tensor]:
    """Call the operator or its formula; ``asked`` are the features from ``window_size`` on."""
    window_size, softcap, *tensors = asked
    check_number("flash_attention", "scale", scale)
    check_number("flash_attention", "softcap", softcap)
    check_kinds("flash_attention", "float", softcap=softcap)
    features: tuple[Any, ...] = ()
    if any(tensor is not None for tensor in tensors) or softcap != 0 or window_size != (-1, -1):
        q, k, v, features = _with_features(q, k, v, *asked)
    arguments = (q, k, v, causal, scale, *features)
    if is_dynamo_compiling():
        if (dtype := autocast_dtype(q)) is None:
            return _lowered(lowering, *arguments)
        with torch.autocast(q.device.type, enabled=False):  # else it casts the formula's products in float32, too
            return _lowered(lowering, *_lower(arguments, dtype))
    if lowering is not None:
        check_lowering(lowering)
    try:
        return calls.flash_attention(*arguments)
    except (RuntimeError, AttributeError) as error:
        explain(error, check_flash_attention, *arguments)


def _lowered(lowering: Lowering | None, *arguments: Any) -> tuple[Tensor, Tensor]:
    q = arguments[0]
    sizes = (("heads", q.shape[:2].numel()), ("queries", q.shape[2]), ("head size", q.shape[3]))
    if len(arguments) > 5:
        return lower(_FEATURES, lowering, reference, _kernel, *arguments, sizes=sizes, default="kernel")
    return lower("flash_attention", lowering, _formula, _kernel, *arguments, sizes=sizes)


# Beyond every sequence, and added to its length without an overflow of the kernels.
_ENDLESS = 2**31 - 1

# Calls with features have rows of their own in the tables of lowerings.
_FEATURES = "flash_attention with features"


def _with_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """The operands and features as the operator takes them."""
    op = "flash_attention"
    if (
        not isinstance(window_size, Sequence)
        or len(window_size) != 2
        or any(not isinstance(side, (int, Integral, torch.SymInt)) or side < -1 for side in window_size)
    ):
        raise ValueError(
            f"{op}: argument 'window_size': expected two numbers of keys, (left, right), or -1 for no limit, "
            f"got {window_size}"
        )
    check_kinds(op, "Tensor", q=q, k=k, v=v)
    check_kinds(op, "Tensor | None", sinks=sinks, attn_mask=attn_mask, alibi_slopes=alibi_slopes)
    if cu_seqlens_q is not None:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3:
                raise ValueError(
                    f"{op}: argument '{name}': expected three dimensions (rows, heads, head size) beside "
                    f"'cu_seqlens_q', got {list(x.shape)}"
                )
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if attn_mask is not None:
        if attn_mask.dim() > 4:
            raise ValueError(
                f"{op}: argument 'attn_mask': expected at most four dimensions, got {list(attn_mask.shape)}"
            )
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    sinks, alibi_slopes = (None if x is None else x.to(wide(q.dtype)) for x in (sinks, alibi_slopes))
    left, right = (min(side, _ENDLESS) for side in window_size)
    return q, k, v, (left, right, float(softcap), sinks, attn_mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)


def _formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    check_flash_attention(q, k, v, causal, scale)
    if causal and q.shape[2] != k.shape[2]:  # is_causal would align the starts
        return reference(q, k, v, causal, scale)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # a comparison of symbols is no bool
    out = scaled_dot_product_attention(q, k, v, None, 0.0, causal, scale=scale, **grouped)
    # The compiler drops the second result, and with it the matrix of scores, where nothing uses it.
    return out, reference(q, k, v, causal, scale)[1]


def _kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands, scale = arguments[:5]
    scale = plain_number("flash_attention", "scale", scale)
    return torch.ops.custom_ops.flash_attention.default(*operands, scale, *arguments[5:])


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same with torch's operators and the matrix of scores in memory; differentiable any number of times.

    The 16-bit dtypes are computed in float32, as :func:`flash_attention` computes them. The arguments are those of the
    operator.
    """
    dtype = wide(q.dtype)
    groups = q.shape[1] // max(k.shape[1], 1)
    keys, values = (x.to(dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.to(dtype) @ keys.transpose(-1, -2))
    if softcap != 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    limited = causal or window_left >= 0 or window_right >= 0 or cu_seqlens_q is not None
    if limited or alibi_slopes is not None:
        distance, apart = _distances(q, k, cu_seqlens_q, cu_seqlens_k)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.unsqueeze(-1).unsqueeze(-1) * distance.abs()
        if limited:
            unseen = torch.zeros_like(distance, dtype=torch.bool) if apart is None else apart
            if window_left >= 0:
                unseen = unseen | (distance < -window_left)
            if causal or window_right >= 0:
                unseen = unseen | (distance > (0 if causal else window_right))
            scores = scores.masked_fill(unseen, float("-inf"))
    if bias is not None:  # a bias of -inf leaves no NaN in the gradients of a row that sees no key
        # The kernels' scores are for powers of two, where a number this low is -inf.
        scores = scores.masked_fill(bias <= torch.finfo(dtype).min * math.log(2), float("-inf"))
    terms = scores if sinks is None else torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    lse = terms.logsumexp(-1)
    unseeing = (lse == float("-inf")).unsqueeze(-1)
    # Not exp(scores - lse): beside a score of -1e9, lse has no digits for the number of the keys.
    shares = terms.masked_fill(unseeing, 0.0).softmax(-1).masked_fill(unseeing, 0.0)[..., : k.shape[2]]
    return (shares @ values).to(q.dtype), lse


def _distances(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """How far each key is behind each query's diagonal, and whether the two are in different sequences."""
    query, key = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return key - (query + k.shape[2] - q.shape[2]).unsqueeze(-1), None
    sequences = [
        torch.searchsorted(ends[1:].to(row.dtype), row, right=True)
        for ends, row in ((cu_seqlens_q, query), (cu_seqlens_k, key))
    ]
    of_query = sequences[0].clamp(max=cu_seqlens_q.shape[0] - 2)
    diagonal = query - cu_seqlens_q[1:][of_query] + cu_seqlens_k[1:][of_query]
    return key - diagonal.unsqueeze(-1), sequences[0].unsqueeze(-1) != sequences[1]


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    *features: Any,
    algorithm: int = 0,
) -> tuple[Tensor, Tensor]:
    check_flash_attention(q, k, v, causal, scale, *features)  # or the number of an algorithm
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
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    bias_gradient: bool = False,
) -> tuple[Tensor, ...]:
    features = (window_left, window_right, softcap, attn_mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    check_flash_attention_backward(grad_out, grad_lse, q, k, v, out, lse, causal, scale, *features)
    of_bias = q.new_empty((*q.shape[:3], k.shape[2]) if bias_gradient and attn_mask is not None else 0)
    return *(_in_order_of(x) for x in (q, k, v)), of_bias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale, *features = inputs
    if (alibi_slopes := features[5]) is not None and alibi_slopes.requires_grad:
        raise ValueError("flash_attention: argument 'alibi_slopes': the slopes have no gradient; use .detach()")
    ctx.numbers, tensors = features[:3], features[3:]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *features = ctx.saved_tensors  # activation checkpointing lets them be read once
    if grad_out is None and grad_lse is None:
        return (None,) * len(ctx.needs_input_grad)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    if torch.is_grad_enabled():  # create_graph=True
        arguments = (q, k, v, ctx.causal, ctx.scale, *ctx.numbers, *features)
        return gradients_with_graph(grad_out, grad_lse, arguments, ctx.needs_input_grad)
    sinks, bias, *rest = features
    deterministic = torch.are_deterministic_algorithms_enabled()
    numbers, needed = (ctx.causal, ctx.scale, deterministic, *ctx.numbers), ctx.needs_input_grad
    dq, dk, dv, dbias = torch.ops.custom_ops.flash_attention_backward.default(
        grad_out, grad_lse, q, k, v, out, lse, *numbers, bias, *rest, bias is not None and needed[9]
    )
    dsinks = _sink_gradient(grad_out, grad_lse, out, lse, sinks) if sinks is not None and needed[8] else None
    summed = dbias.sum_to_size(bias.shape) if bias is not None and needed[9] else None
    gradients = (dq, dk, dv, None, None, None, None, None, dsinks, summed, None, None, None)
    return gradients[: len(needed)]  # the dispatcher drops arguments that are at their defaults, from the last one on


def _sink_gradient(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's share of the softmax, times what the scores' gradients are relative to: out·dout, less that of lse."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    share = torch.exp(sinks.view(-1, 1) - lse).masked_fill(lse == float("-inf"), 0.0)  # a sink of -inf and no key
    return -(share * (delta if grad_lse is None else delta - grad_lse)).sum((0, 2))


def gradients_with_graph(
    grad_out: Tensor, grad_lse: Tensor | None, arguments: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of the operator's arguments by torch's operators; None for those that are not needed."""
    places = [place for place, wanted in enumerate(needed) if wanted]

    def results_of(*asked: Tensor) -> tuple[Tensor, ...]:
        given = list(arguments)
        for place, x in zip(places, asked, strict=True):
            given[place] = x
        results = reference(*given)
        return results if grad_lse is not None else results[:1]  # lse = -inf has NaN for a gradient of 0

    # Not autograd.grad: if k is computed from q, it would add k's gradient to that of q, and it needs operands that
    # require a gradient, which those of torch.func.jacrev no longer do here.
    with without_autocast(arguments[0]):
        pull_back: Any = torch.func.vjp(results_of, *(arguments[place] for place in places))[1]
        computed = iter(pull_back((grad_out,) if grad_lse is None else (grad_out, grad_lse)))
    return tuple(next(computed) if wanted else None for wanted in needed)


def _lower(arguments: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    cast = (0, 1, 2, 9)  # the operands and the bias
    return [to_lower(x, dtype) if place in cast and isinstance(x, Tensor) else x for place, x in enumerate(arguments)]


def _batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> tuple[Tensor, ...] | None:
    """Samples are batches, unless there are features."""
    if tuple(arguments[5:]) != _NONE[: len(arguments) - 5]:
        return None
    tensors = [x if over else x.expand(size, *x.shape) for x, over in zip(arguments[:3], mapped, strict=False)]
    results = operator(*(x.flatten(0, 1) for x in tensors), *arguments[3:])
    return tuple(x.unflatten(0, (size, -1)) for x in results)


RULES = (
    Rules("flash_attention", _fake, Autograd(_backward, _setup), _lower, _batched),
    Rules("flash_attention_backward", _fake_backward),
)

"""The baseline's GPT as a pure function of its parameters.

The mathematics and the precision rules are those of ``torch_baseline.model``: matrices are multiplied in the compute
dtype, while the residual stream, the norms, the rotary turn, the softmax and the loss are float32 at least.

Shapes: B sequences, T positions, C model width, H heads, D head size (C = H·D), F MLP width (4·C), V vocabulary.
A name ends in the shape of its array: ``x_BTC``. Kernels are (in, out), the transposes of torch's weights, and heads
stay where the product puts them, (B, T, H, D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from torch_baseline.config import GPTConfig
from torch_baseline.model import rotary_tables

TokensBT = Int[Array, "B T"]
HiddenBTC = Float[Array, "B T C"]
HeadsBTHD = Float[Array, "B T H D"]
LogitsBTV = Float[Array, "B T V"]
Scalar = Float[Array, ""]

Attention = Callable[[HeadsBTHD, HeadsBTHD, HeadsBTHD], HeadsBTHD]


class Block(NamedTuple):
    """Parameters of one transformer block."""

    attention_norm: Float[Array, " C"]
    qkv: Float[Array, "C 3C"]
    out: Float[Array, "C C"]
    mlp_norm: Float[Array, " C"]
    up: Float[Array, "C F"]
    bias: Float[Array, " F"]
    down: Float[Array, "F C"]


class Params(NamedTuple):
    """Parameters of the model.

    Attributes:
        embedding: one row a token.
        blocks: one after another; or, stacked by :func:`stack_blocks`, a single one whose arrays have a leading axis of
            layers, which :func:`forward` then scans over.
        norm: of the last layer's output.
        head: None where the embedding table makes the logits.
    """

    embedding: Float[Array, "V C"]
    blocks: tuple[Block, ...] | Block
    norm: Float[Array, " C"]
    head: Float[Array, "C V"] | None


def stack_blocks(params: Params) -> Params:
    """Return parameters with the blocks in one, for a scan over layers: compiled once, whatever the depth."""
    if isinstance(params.blocks, Block):
        return params
    return params._replace(blocks=jax.tree.map(lambda *layers: jnp.stack(layers), *params.blocks))


def unstack_blocks(params: Params) -> Params:
    """Return parameters with the blocks one after another; the inverse of :func:`stack_blocks`."""
    if not isinstance(params.blocks, Block):
        return params
    stacked = params.blocks
    return params._replace(
        blocks=tuple(
            jax.tree.map(lambda layers, index=index: layers[index], stacked) for index in range(len(stacked.bias))
        )
    )


def xla_attention(q_BTHD: HeadsBTHD, k_BTHD: HeadsBTHD, v_BTHD: HeadsBTHD) -> HeadsBTHD:
    """Return softmax(q kᵀ / √D, masked above the diagonal) v, written out for XLA to fuse.

    Scores leave the first product in float32 at least and stay there until the softmax is done, as in a flash kernel.
    """
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    length = q_BTHD.shape[1]
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, preferred_element_type=wide)
    causal_TS = np.tril(np.ones((length, length), bool))
    scores_BHTS = jnp.where(causal_TS, scores_BHTS / math.sqrt(q_BTHD.shape[-1]), -jnp.inf)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)


def cudnn_attention(q_BTHD: HeadsBTHD, k_BTHD: HeadsBTHD, v_BTHD: HeadsBTHD) -> HeadsBTHD:
    """Return the same by cuDNN's fused kernel: bfloat16 or float16, on a CUDA GPU; JAX refuses anything else."""
    return jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=True, implementation="cudnn")


ATTENTIONS: dict[str, Attention] = {"xla": xla_attention, "cudnn": cudnn_attention}


@jax.custom_vjp
def bias_gelu(x_BTF: Array, bias_F: Array) -> Array:
    """Return GELU(x + bias) in its tanh form, in the dtype of x.

    As in torch, the sum is rounded to the dtype of x, the nonlinearity is taken in float32 at least and rounded once,
    and the gradient of the bias, a sum over all B·T positions, is kept in float32 until its end and then rounded to the
    dtype of x. Left in bfloat16, XLA rounds after every operation and sums in bfloat16.

    The backward computes everything again from x; the two barriers keep XLA from saving the float32 tanh instead, and
    from drawing the elementwise work into the sum, a kernel that goes through memory by columns.
    """
    return _biased(_gelu, x_BTF, bias_F)


def _gelu(x: Array) -> Array:
    # u · sigmoid(2 z) is the tanh form: on a GPU an exponential and a quotient cost less than the tanh that XLA makes.
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _biased(function: Callable[[Array], Array], x_BTF: Array, bias_F: Array) -> Array:
    """The function of x + bias, in float32 at least between the two roundings to the dtype of x."""
    wide = jnp.promote_types(x_BTF.dtype, jnp.float32)
    biased_BTF = (x_BTF.astype(wide) + bias_F.astype(x_BTF.dtype).astype(wide)).astype(x_BTF.dtype)
    return function(biased_BTF.astype(wide)).astype(x_BTF.dtype)


def _bias_gelu_forward(x_BTF: Array, bias_F: Array) -> tuple[Array, tuple[Array, Array]]:
    return bias_gelu(x_BTF, bias_F), (x_BTF, bias_F)


def _bias_gelu_backward(saved: tuple[Array, Array], gradient_BTF: Array) -> tuple[Array, Array]:
    x_BTF, bias_F = jax.lax.optimization_barrier(saved)
    wide = jnp.promote_types(x_BTF.dtype, jnp.float32)

    def derivative(biased_BTF: Array) -> Array:
        return jax.vjp(_gelu, biased_BTF)[1](gradient_BTF.astype(wide))[0]

    inner_BTF = jax.lax.optimization_barrier(_biased(derivative, x_BTF, bias_F))
    # What is added is the bias in x's dtype, as kernels are multiplied in it: its gradient is rounded as theirs are.
    return inner_BTF, inner_BTF.astype(wide).sum((0, 1)).astype(x_BTF.dtype).astype(bias_F.dtype)


bias_gelu.defvjp(_bias_gelu_forward, _bias_gelu_backward)


@jax.named_scope("norm")
def rms_norm(x_BTC: HiddenBTC, weight_C: Array, eps: float) -> HiddenBTC:
    """X / √(mean(x²) + eps) · weight, in the dtype of the weight whatever the residual stream is kept in."""
    x_BTC = x_BTC.astype(weight_C.dtype)
    return x_BTC * jax.lax.rsqrt(jnp.square(x_BTC).mean(-1, keepdims=True) + eps) * weight_C


@jax.custom_vjp
def rotated_heads(qkv_BT3HD: Array, cos_TD: Array, sin_TD: Array) -> tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD]:
    """Queries and keys turned by their positions, and values: what attention takes.

    The derivative is written out so that the gradient of ``qkv`` is made once, turned back and joined in one pass over
    memory; the two products that read it would otherwise each get a copy of their own.
    """
    q_BTHD, k_BTHD, v_BTHD = (qkv_BT3HD[:, :, index] for index in range(3))
    return rotate(q_BTHD, cos_TD, sin_TD), rotate(k_BTHD, cos_TD, sin_TD), v_BTHD


def _heads_forward(
    qkv_BT3HD: Array, cos_TD: Array, sin_TD: Array
) -> tuple[tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD], tuple[Array, Array]]:
    return rotated_heads(qkv_BT3HD, cos_TD, sin_TD), (cos_TD, sin_TD)


def _heads_backward(
    tables: tuple[Array, Array], gradients: tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD]
) -> tuple[Array, None, None]:
    (cos_TD, sin_TD), (q_BTHD, k_BTHD, v_BTHD) = tables, gradients
    back = rotate(q_BTHD, cos_TD, -sin_TD), rotate(k_BTHD, cos_TD, -sin_TD), v_BTHD
    return jax.lax.optimization_barrier(jnp.stack(back, 2)), None, None


rotated_heads.defvjp(_heads_forward, _heads_backward)


def rotate(x_BTHD: HeadsBTHD, cos_TD: Array, sin_TD: Array) -> HeadsBTHD:
    """Turn the pairs (x_i, x_{i + D/2}), in the dtype of the tables.

    The partner of every element is had by reversing an axis of two halves, which XLA fuses into its neighbours more
    readily than two halves that are joined.
    """
    x_BTH2E = x_BTHD.reshape(*x_BTHD.shape[:-1], 2, x_BTHD.shape[-1] // 2).astype(cos_TD.dtype)
    cos_T12E = jnp.stack((cos_TD, cos_TD), 1)[:, None]
    sin_T12E = jnp.stack((-sin_TD, sin_TD), 1)[:, None]
    turned_BTH2E = x_BTH2E * cos_T12E + jnp.flip(x_BTH2E, -2) * sin_T12E
    return turned_BTH2E.reshape(x_BTHD.shape).astype(x_BTHD.dtype)


@jax.custom_vjp
def cross_entropy(logits_BTV: LogitsBTV, targets_BT: TokensBT) -> Scalar:
    """Return the mean over all positions of log Σ exp(logits) − logits[target], in float32 at least.

    The derivative, softmax(logits) − onehot(target) over the number of positions, is written out: it leaves in the
    dtype of the logits in one pass over them. What JAX derives by itself holds the float32 softmax and a scatter, and
    moves five times the memory at a vocabulary of 50 304.
    """
    return _cross_entropy_forward(logits_BTV, targets_BT)[0]


# Stretches of a row that XLA reads side by side. On an H200, 32 × 1024 rows of 50 304 take 2.29 ms with one, 1.46 with
# 4, 1.01 with 8, 1.10 with 16 and 2.06 with 32; to read them takes 0.78.
_MOST_STRETCHES = 8


def one_pass_logsumexp(x_BTV: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Return log Σ exp(x) over the last axis, reading x once.

    Maximum and sum are reduced together: two parts with maxima m, n and sums s, t of exp(x − maximum) join to
    max(m, n) and s · exp(m − max(m, n)) + t · exp(n − max(m, n)) (Milakov and Gimelshein, "Online normalizer
    calculation for softmax", 2018). One of the two exponentials is always 1, so each join costs one. What is joined are
    not single values but sums over a few, one from each of as many equal stretches of a row: a value then costs an
    exponential and little else.

    Args:
        x_BTV: finite, or −∞ beside finite ones.
    """

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (m, s), (n, t) = one, other
        shrink = jnp.exp(-jnp.abs(m - n))
        return jnp.maximum(m, n), jnp.where(m >= n, s + t * shrink, s * shrink + t)

    lowest = jnp.array(jnp.finfo(x_BTV.dtype).min, x_BTV.dtype)
    stretches = math.gcd(_MOST_STRETCHES, x_BTV.shape[-1])
    # −∞ less −∞ would not be a number.
    parts = jnp.split(jnp.maximum(x_BTV, lowest), stretches, axis=-1)
    maxima = reduce(jnp.maximum, parts)
    sums = reduce(jnp.add, [jnp.exp(part - maxima) for part in parts])
    zero = jnp.zeros((), x_BTV.dtype)
    maximum_BT, sum_BT = jax.lax.reduce((maxima, sums), (lowest, zero), join, (x_BTV.ndim - 1,))
    return maximum_BT + jnp.log(sum_BT)


def _cross_entropy_forward(logits_BTV: LogitsBTV, targets_BT: TokensBT) -> tuple[Scalar, tuple[Array, Array, Array]]:
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    # jax.nn.logsumexp reads the logits twice, once for the maximum, and on a GPU the loss is what that memory takes.
    normaliser_BT = jax.lax.platform_dependent(
        wide_BTV, cuda=one_pass_logsumexp, default=partial(jax.nn.logsumexp, axis=-1)
    )
    chosen_BT = jnp.take_along_axis(wide_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return (normaliser_BT - chosen_BT).mean(), (logits_BTV, normaliser_BT, targets_BT)


def _cross_entropy_backward(saved: tuple[Array, Array, Array], gradient: Scalar) -> tuple[LogitsBTV, None]:
    logits_BTV, normaliser_BT, targets_BT = saved
    wide_BTV = logits_BTV.astype(normaliser_BT.dtype)
    hit_BTV = jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype) == targets_BT[..., None]
    difference_BTV = jnp.exp(wide_BTV - normaliser_BT[..., None]) - hit_BTV
    return (difference_BTV * (gradient / targets_BT.size)).astype(logits_BTV.dtype), None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


class Parts(NamedTuple):
    """What the model is made of besides attention, each part replaceable by a function of one's own.

    Attributes:
        norm: (x_BTC, weight_C, eps) → h_BTC.
        heads: (qkv_BT3HD, cos_TD, sin_TD) → queries and keys turned by their positions, and values.
        activation: (h_BTF, bias_F) → h_BTF, both in the dtype of the computation.
        cross_entropy: (logits_BTV, targets_BT) → scalar.
    """

    norm: Callable[[HiddenBTC, Array, float], HiddenBTC] = rms_norm
    heads: Callable[[Array, Array, Array], tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD]] = rotated_heads
    activation: Callable[[Array, Array], Array] = bias_gelu
    cross_entropy: Callable[[LogitsBTV, TokensBT], Scalar] = cross_entropy


PARTS = Parts()

Record = Callable[[str, Array], None]


def forward(
    params: Params,
    tokens_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
    parts: Parts = PARTS,
    remat: bool = False,
    record: Record | None = None,
) -> LogitsBTV:
    """Return the logits.

    Args:
        params: of the shape ``config`` describes, all of one dtype.
        tokens_BT: int32 or int64, T at most ``block_size``.
        config: the shape.
        dtype: to multiply matrices in; by default that of the parameters.
        attention: called as ``attention(q_BTHD, k_BTHD, v_BTHD)`` on rotated queries and keys; causal, scaled by 1/√D.
        parts: the rest of what the model is made of.
        remat: keep each block's input alone for the backward, and compute the rest of the block again there.
        record: called with a name and an array, in the order of the computation, for whoever wants to look inside:
            ``embedding``, ``blocks.0.attention``, ``blocks.0.mlp`` (what they add to the stream), …, ``norm``,
            ``logits``. Not for stacked blocks.

    Returns:
        Logits (B, T, V) in ``dtype``.

    Raises:
        ValueError: for a sequence longer than ``block_size``.
    """
    length = tokens_BT.shape[1]
    if length > config.block_size:
        raise ValueError(f"a sequence holds at most block_size={config.block_size} tokens, got {length}")
    compute = jnp.dtype(dtype or params.embedding.dtype)
    wide = jnp.promote_types(compute, jnp.float32)
    cos_TD, sin_TD = (jnp.asarray(table[:length], wide) for table in rotary_tables(config))
    note = record or (lambda name, array: None)
    with jax.named_scope("embedding"):
        x_BTC = params.embedding[tokens_BT]
        note("embedding", x_BTC)
        if config.low_precision_residual:
            x_BTC = x_BTC.astype(compute)

    def apply(x_BTC: HiddenBTC, block: Block) -> tuple[HiddenBTC, HiddenBTC, HiddenBTC]:
        with jax.named_scope("attention"):
            attended_BTC = _attend(block, x_BTC, cos_TD, sin_TD, config, compute, attention, parts)
            x_BTC = x_BTC + attended_BTC
        with jax.named_scope("mlp"):
            added_BTC = _mlp(block, x_BTC, config, compute, parts)
            return x_BTC + added_BTC, attended_BTC, added_BTC

    if remat:
        apply = jax.checkpoint(apply)
    if isinstance(params.blocks, Block):
        with jax.named_scope("blocks"):
            x_BTC, _ = jax.lax.scan(lambda x_BTC, block: (apply(x_BTC, block)[0], None), x_BTC, params.blocks)
    else:
        for index, block in enumerate(params.blocks):
            with jax.named_scope(f"block{index}"):
                x_BTC, attended_BTC, added_BTC = apply(x_BTC, block)
            note(f"blocks.{index}.attention", attended_BTC)
            note(f"blocks.{index}.mlp", added_BTC)
    with jax.named_scope("head"):
        x_BTC = parts.norm(x_BTC, params.norm, config.norm_eps)
        note("norm", x_BTC)
        logits_BTV = _linear(x_BTC, params.embedding.T if params.head is None else params.head, compute)
        note("logits", logits_BTV)
        return logits_BTV


def activations(
    params: Params,
    tokens_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
    parts: Parts = PARTS,
) -> dict[str, Array]:
    """Return what :func:`forward` records, by name and in order; its arguments are the same."""
    found: dict[str, Array] = {}
    forward(params, tokens_BT, config, dtype=dtype, attention=attention, parts=parts, record=found.__setitem__)
    return found


def loss(
    params: Params,
    tokens_BT: TokensBT,
    targets_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
    parts: Parts = PARTS,
    remat: bool = False,
) -> Scalar:
    """Return the mean cross-entropy in nats per token, computed in float32 at least.

    Args:
        params: as :func:`forward`, like the others.
        tokens_BT: int32 or int64.
        targets_BT: the token that follows each position.
        config: the shape.
        dtype: to multiply matrices in.
        attention: which one.
        parts: the rest.
        remat: what is kept for the backward.
    """
    logits_BTV = forward(params, tokens_BT, config, dtype=dtype, attention=attention, parts=parts, remat=remat)
    with jax.named_scope("loss"):
        return parts.cross_entropy(logits_BTV, targets_BT)


def _attend(
    block: Block,
    x_BTC: HiddenBTC,
    cos_TD: Float[Array, "T E"],
    sin_TD: Float[Array, "T E"],
    config: GPTConfig,
    compute: DTypeLike,
    attention: Attention,
    parts: Parts,
) -> HiddenBTC:
    """What attention adds to the residual stream."""
    h_BTC = parts.norm(x_BTC, block.attention_norm, config.norm_eps)
    qkv_BT3HD = _linear(h_BTC, block.qkv, compute).reshape(*x_BTC.shape[:2], 3, config.n_head, config.head_size)
    q_BTHD, k_BTHD, v_BTHD = parts.heads(qkv_BT3HD, cos_TD, sin_TD)
    with jax.named_scope("core"):
        y_BTHD = attention(q_BTHD, k_BTHD, v_BTHD)
    return _linear(y_BTHD.reshape(x_BTC.shape), block.out, compute)


def _mlp(block: Block, x_BTC: HiddenBTC, config: GPTConfig, compute: DTypeLike, parts: Parts) -> HiddenBTC:
    """What the MLP adds to the residual stream."""
    h_BTC = parts.norm(x_BTC, block.mlp_norm, config.norm_eps)
    h_BTF = _linear(h_BTC, block.up, compute)
    with jax.named_scope("activation"):
        h_BTF = parts.activation(h_BTF, block.bias)
    return _linear(h_BTF, block.down, compute)


def _linear(x: Array, kernel: Array, compute: DTypeLike) -> Array:
    """The product in the compute dtype; what autocast does to ``torch.nn.functional.linear``."""
    return x.astype(compute) @ kernel.astype(compute)

"""The baseline's GPT as a pure function of its parameters.

The mathematics and the precision rules are those of ``torch_baseline.model``. Matrix products are computed in the
compute dtype. The residual stream, the norms, the rotary embedding, the softmax and the loss are at least float32.

Shapes: B sequences, T positions, C model width, H heads, D head size (C = H·D), F MLP width (4·C), V vocabulary.
A name ends in the shape of its array: ``x_BTC``. Weight matrices are (in, out), the transposes of torch's. The heads
stay where the matrix product leaves them: (B, T, H, D).
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

from benchkit import UserError
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
        embedding: Embedding table, one row per token.
        blocks: One :class:`Block` per layer. After :func:`stack_blocks`, a single :class:`Block` whose arrays have a
            leading axis of layers; :func:`forward` then scans over that axis.
        norm: Gain of the norm after the last block.
        head: Weight of the output layer; None if the output layer shares the embedding table.
    """

    embedding: Float[Array, "V C"]
    blocks: tuple[Block, ...] | Block
    norm: Float[Array, " C"]
    head: Float[Array, "C V"] | None


def stack_blocks(params: Params) -> Params:
    """Return parameters with all blocks stacked into one, so that a scan compiles the block once for any depth."""
    if isinstance(params.blocks, Block):
        return params
    return params._replace(blocks=jax.tree.map(lambda *layers: jnp.stack(layers), *params.blocks))


def unstack_blocks(params: Params) -> Params:
    """Return parameters with one :class:`Block` per layer; the inverse of :func:`stack_blocks`."""
    if not isinstance(params.blocks, Block):
        return params
    stacked = params.blocks
    return params._replace(
        blocks=tuple(
            jax.tree.map(lambda layers, index=index: layers[index], stacked) for index in range(len(stacked.bias))
        )
    )


def xla_attention(q_BTHD: HeadsBTHD, k_BTHD: HeadsBTHD, v_BTHD: HeadsBTHD) -> HeadsBTHD:
    """Return softmax(q kᵀ / √D, masked above the diagonal) v as separate operations that XLA can fuse.

    The scores are at least float32 from the first product to the end of the softmax, as in a flash attention kernel.
    """
    wide = jnp.promote_types(q_BTHD.dtype, jnp.float32)
    length = q_BTHD.shape[1]
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, preferred_element_type=wide)
    causal_TS = np.tril(np.ones((length, length), bool))
    scores_BHTS = jnp.where(causal_TS, scores_BHTS / math.sqrt(q_BTHD.shape[-1]), -jnp.inf)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)


def cudnn_attention(q_BTHD: HeadsBTHD, k_BTHD: HeadsBTHD, v_BTHD: HeadsBTHD) -> HeadsBTHD:
    """Return the same from cuDNN's fused kernel. It takes bfloat16 or float16 on a CUDA GPU; JAX raises otherwise."""
    return jax.nn.dot_product_attention(q_BTHD, k_BTHD, v_BTHD, is_causal=True, implementation="cudnn")


ATTENTIONS: dict[str, Attention] = {"xla": xla_attention, "cudnn": cudnn_attention}


@jax.custom_vjp
def bias_gelu(x_BTF: Array, bias_F: Array) -> Array:
    """Return GELU(x + bias) in the tanh approximation, in the dtype of x.

    The rounding is torch's. The sum x + bias is rounded to the dtype of x. The nonlinearity is computed in at least
    float32 and rounded once. The gradient of the bias is a sum over all B·T positions; it is accumulated in float32 and
    rounded to the dtype of x at the end. Without these casts XLA rounds after every operation and sums in bfloat16.

    The backward pass recomputes everything from x. The first barrier keeps XLA from saving the float32 tanh instead.
    The second keeps XLA from fusing the elementwise work into the sum, whose kernel reads memory by columns.
    """
    return _biased(_gelu, x_BTF, bias_F)


def _gelu(x: Array) -> Array:
    # u · sigmoid(2 z) equals the tanh form. On a GPU one exponential and one division cost less than XLA's tanh.
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _biased(function: Callable[[Array], Array], x_BTF: Array, bias_F: Array) -> Array:
    """Return function(x + bias). Both the sum and the result are rounded to the dtype of x."""
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
    # The forward pass adds the bias in the dtype of x, so its gradient is rounded to that dtype as well.
    return inner_BTF, inner_BTF.astype(wide).sum((0, 1)).astype(x_BTF.dtype).astype(bias_F.dtype)


bias_gelu.defvjp(_bias_gelu_forward, _bias_gelu_backward)


@jax.named_scope("norm")
def rms_norm(x_BTC: HiddenBTC, weight_C: Array, eps: float) -> HiddenBTC:
    """Return x / √(mean(x²) + eps) · weight, in the dtype of the weight for any dtype of the residual stream."""
    x_BTC = x_BTC.astype(weight_C.dtype)
    return x_BTC * jax.lax.rsqrt(jnp.square(x_BTC).mean(-1, keepdims=True) + eps) * weight_C


@jax.custom_vjp
def rotated_heads(qkv_BT3HD: Array, cos_TD: Array, sin_TD: Array) -> tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD]:
    """Return queries and keys with the rotary embedding applied, and values: the inputs of attention.

    The derivative is written by hand. It rotates the gradients back and stacks them in one pass over memory, so that
    the gradient of ``qkv`` is stored once. Otherwise XLA makes one copy for each of the two products that read it.
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
    """Rotate the pairs (x_i, x_{i + D/2}) by the angle of their position, in the dtype of the tables.

    The partner of each element is found by flipping an axis of length 2. XLA fuses a flip more readily than a
    concatenation of two halves.
    """
    x_BTH2E = x_BTHD.reshape(*x_BTHD.shape[:-1], 2, x_BTHD.shape[-1] // 2).astype(cos_TD.dtype)
    cos_T12E = jnp.stack((cos_TD, cos_TD), 1)[:, None]
    sin_T12E = jnp.stack((-sin_TD, sin_TD), 1)[:, None]
    turned_BTH2E = x_BTH2E * cos_T12E + jnp.flip(x_BTH2E, -2) * sin_T12E
    return turned_BTH2E.reshape(x_BTHD.shape).astype(x_BTHD.dtype)


@jax.custom_vjp
def cross_entropy(logits_BTV: LogitsBTV, targets_BT: TokensBT) -> Scalar:
    """Return the mean over all positions of log Σ exp(logits) − logits[target], in at least float32.

    The derivative is written by hand: (softmax(logits) − onehot(target)) / number of positions, in the dtype of the
    logits, in one pass over them. The derivative that JAX generates stores the float32 softmax and scatters into it; it
    moves five times as many bytes at a vocabulary of 50 304.
    """
    return _cross_entropy_forward(logits_BTV, targets_BT)[0]


# Number of equal parts of a row that are combined elementwise. On an H200, 32 × 1024 rows of 50 304 take 2.29 ms with 1
# part, 1.46 with 4, 1.01 with 8, 1.10 with 16 and 2.06 with 32; reading the rows takes 0.78 ms.
_MAX_PARTS = 8


def one_pass_logsumexp(x_BTV: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """Return log Σ exp(x) over the last axis, reading x once.

    Maximum and sum are reduced together. Two sets with maxima m and n, and sums s and t of exp(x − maximum), combine to
    the maximum max(m, n) and the sum s · exp(m − max(m, n)) + t · exp(n − max(m, n)) (Milakov and Gimelshein, "Online
    normalizer calculation for softmax", 2018). One of the two exponentials is always 1, so a combination costs one. To
    need fewer combinations, a row is first split into equal parts, which are combined elementwise. Values are finite,
    or −∞ as long as each row has a finite one.
    """

    def combine(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (m, s), (n, t) = one, other
        shrink = jnp.exp(-jnp.abs(m - n))
        return jnp.maximum(m, n), jnp.where(m >= n, s + t * shrink, s * shrink + t)

    lowest = jnp.array(jnp.finfo(x_BTV.dtype).min, x_BTV.dtype)
    # −∞ − (−∞) is NaN.
    parts = jnp.split(jnp.maximum(x_BTV, lowest), math.gcd(_MAX_PARTS, x_BTV.shape[-1]), axis=-1)
    maxima = reduce(jnp.maximum, parts)
    sums = reduce(jnp.add, [jnp.exp(part - maxima) for part in parts])
    zero = jnp.zeros((), x_BTV.dtype)
    maximum_BT, sum_BT = jax.lax.reduce((maxima, sums), (lowest, zero), combine, (x_BTV.ndim - 1,))
    return maximum_BT + jnp.log(sum_BT)


def _cross_entropy_forward(logits_BTV: LogitsBTV, targets_BT: TokensBT) -> tuple[Scalar, tuple[Array, Array, Array]]:
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    # jax.nn.logsumexp reads the logits twice, first for the maximum. On a GPU the loss is limited by memory bandwidth.
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
    """The replaceable parts of the model.

    Attributes:
        attention: Causal attention, scaled by 1/√D: function of rotated queries and keys, and values.
        norm: Function (x_BTC, weight_C, eps) → h_BTC.
        heads: Function (qkv_BT3HD, cos_TD, sin_TD) → rotated queries, rotated keys, values.
        activation: Function (h_BTF, bias_F) → h_BTF, in and out in the compute dtype.
        cross_entropy: Function (logits_BTV, targets_BT) → scalar.
    """

    attention: Attention = xla_attention
    norm: Callable[[HiddenBTC, Array, float], HiddenBTC] = rms_norm
    heads: Callable[[Array, Array, Array], tuple[HeadsBTHD, HeadsBTHD, HeadsBTHD]] = rotated_heads
    activation: Callable[[Array, Array], Array] = bias_gelu
    cross_entropy: Callable[[LogitsBTV, TokensBT], Scalar] = cross_entropy


PARTS = Parts()


def with_attention(name: str) -> Parts:
    """Return the parts of the model with the attention of this name.

    Raises:
        UserError: If there is none.
    """
    if name not in ATTENTIONS:
        raise UserError(f"attention must be one of {', '.join(ATTENTIONS)}, got {name!r}")
    return PARTS._replace(attention=ATTENTIONS[name])


Record = Callable[[str, Array], None]


def forward(
    params: Params,
    tokens_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    parts: Parts = PARTS,
    remat: bool = False,
    record: Record | None = None,
) -> LogitsBTV:
    """Return the logits.

    Args:
        params: Parameters of the shapes that ``config`` describes, all of one dtype.
        tokens_BT: Tokens, int32 or int64; T is at most ``block_size``.
        config: Shape of the model.
        dtype: Compute dtype of the matrix products. The default is the dtype of the parameters.
        parts: The replaceable parts.
        remat: Save only the input of each block for the backward pass, and recompute the rest of the block there.
        record: Called with the name and the value of each intermediate, in the order of the computation:
            ``embedding``, ``blocks.0.attention`` and ``blocks.0.mlp`` (their outputs before they are added to the
            residual stream), …, ``norm``, ``logits``. Stacked blocks record nothing.

    Returns:
        Logits (B, T, V) in ``dtype``.

    Raises:
        ValueError: If a sequence is longer than ``block_size``.
    """
    length = tokens_BT.shape[1]
    if length > config.block_size:
        raise ValueError(
            f"a sequence holds at most block_size={config.block_size} tokens, got {length}; cut it, or use a model "
            "with a larger block_size"
        )
    compute = jnp.dtype(dtype or params.embedding.dtype)
    wide = jnp.promote_types(compute, jnp.float32)
    cos_TD, sin_TD = (jnp.asarray(table[:length], wide) for table in rotary_tables(config))
    record = record or (lambda name, array: None)
    with jax.named_scope("embedding"):
        x_BTC = params.embedding[tokens_BT]
        record("embedding", x_BTC)
        if config.low_precision_residual:
            x_BTC = x_BTC.astype(compute)

    def apply(x_BTC: HiddenBTC, block: Block) -> tuple[HiddenBTC, HiddenBTC, HiddenBTC]:
        with jax.named_scope("attention"):
            attended_BTC = _attend(block, x_BTC, cos_TD, sin_TD, config, compute, parts)
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
            record(f"blocks.{index}.attention", attended_BTC)
            record(f"blocks.{index}.mlp", added_BTC)
    with jax.named_scope("head"):
        x_BTC = parts.norm(x_BTC, params.norm, config.norm_eps)
        record("norm", x_BTC)
        logits_BTV = _linear(x_BTC, params.embedding.T if params.head is None else params.head, compute)
        record("logits", logits_BTV)
        return logits_BTV


def activations(
    params: Params, tokens_BT: TokensBT, config: GPTConfig, *, dtype: DTypeLike | None = None
) -> dict[str, Array]:
    """Return the intermediates that :func:`forward` records, by name and in order; the arguments are the same."""
    recorded: dict[str, Array] = {}
    forward(params, tokens_BT, config, dtype=dtype, record=recorded.__setitem__)
    return recorded


def loss(
    params: Params,
    tokens_BT: TokensBT,
    targets_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    parts: Parts = PARTS,
    remat: bool = False,
) -> Scalar:
    """Return the mean cross-entropy in nats per token, computed in at least float32.

    ``targets_BT`` has the token that follows each position. The other arguments are those of :func:`forward`.
    """
    logits_BTV = forward(params, tokens_BT, config, dtype=dtype, parts=parts, remat=remat)
    with jax.named_scope("loss"):
        return parts.cross_entropy(logits_BTV, targets_BT)


def _attend(
    block: Block,
    x_BTC: HiddenBTC,
    cos_TD: Float[Array, "T E"],
    sin_TD: Float[Array, "T E"],
    config: GPTConfig,
    compute: DTypeLike,
    parts: Parts,
) -> HiddenBTC:
    """Output of a block's attention, before it is added to the residual stream."""
    h_BTC = parts.norm(x_BTC, block.attention_norm, config.norm_eps)
    qkv_BT3HD = _linear(h_BTC, block.qkv, compute).reshape(*x_BTC.shape[:2], 3, config.n_head, config.head_size)
    q_BTHD, k_BTHD, v_BTHD = parts.heads(qkv_BT3HD, cos_TD, sin_TD)
    with jax.named_scope("core"):
        y_BTHD = parts.attention(q_BTHD, k_BTHD, v_BTHD)
    return _linear(y_BTHD.reshape(x_BTC.shape), block.out, compute)


def _mlp(block: Block, x_BTC: HiddenBTC, config: GPTConfig, compute: DTypeLike, parts: Parts) -> HiddenBTC:
    """Output of a block's MLP, before it is added to the residual stream."""
    h_BTC = parts.norm(x_BTC, block.mlp_norm, config.norm_eps)
    h_BTF = _linear(h_BTC, block.up, compute)
    with jax.named_scope("activation"):
        h_BTF = parts.activation(h_BTF, block.bias)
    return _linear(h_BTF, block.down, compute)


def _linear(x: Array, kernel: Array, compute: DTypeLike) -> Array:
    """Matrix product in the compute dtype, as autocast computes ``torch.nn.functional.linear``."""
    return x.astype(compute) @ kernel.astype(compute)

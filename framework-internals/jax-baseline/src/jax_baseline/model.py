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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    """Parameters of the model; ``head`` is None where the embedding table makes the logits."""

    embedding: Float[Array, "V C"]
    blocks: tuple[Block, ...]
    norm: Float[Array, " C"]
    head: Float[Array, "C V"] | None


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


def forward(
    params: Params,
    tokens_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
) -> LogitsBTV:
    """Return the logits.

    Args:
        params: of the shape ``config`` describes, all of one dtype.
        tokens_BT: int32 or int64, T at most ``block_size``.
        config: the shape.
        dtype: to multiply matrices in; by default that of the parameters.
        attention: called as ``attention(q_BTHD, k_BTHD, v_BTHD)`` on rotated queries and keys; causal, scaled by 1/√D.

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
    with jax.named_scope("embedding"):
        x_BTC = params.embedding[tokens_BT]
    for index, block in enumerate(params.blocks):
        with jax.named_scope(f"block{index}"):
            x_BTC = _block(block, x_BTC, cos_TD, sin_TD, config, compute, attention)
    with jax.named_scope("head"):
        x_BTC = _rms_norm(x_BTC, params.norm, config.norm_eps)
        return _linear(x_BTC, params.embedding.T if params.head is None else params.head, compute)


def loss(
    params: Params,
    tokens_BT: TokensBT,
    targets_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
) -> Scalar:
    """Return the mean cross-entropy in nats per token, computed in float32 at least.

    Args:
        params: as :func:`forward`, like the others.
        tokens_BT: int32 or int64.
        targets_BT: the token that follows each position.
        config: the shape.
        dtype: to multiply matrices in.
        attention: which one.
    """
    logits_BTV = forward(params, tokens_BT, config, dtype=dtype, attention=attention)
    with jax.named_scope("loss"):
        wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(wide_BTV, targets_BT).mean()


def _block(
    block: Block,
    x_BTC: HiddenBTC,
    cos_TD: Float[Array, "T E"],
    sin_TD: Float[Array, "T E"],
    config: GPTConfig,
    compute: DTypeLike,
    attention: Attention,
) -> HiddenBTC:
    with jax.named_scope("attention"):
        h_BTC = _rms_norm(x_BTC, block.attention_norm, config.norm_eps)
        heads = (*x_BTC.shape[:2], config.n_head, config.head_size)
        q_BTHD, k_BTHD, v_BTHD = (
            part.reshape(heads) for part in jnp.split(_linear(h_BTC, block.qkv, compute), 3, axis=-1)
        )
        q_BTHD, k_BTHD = _rotate(q_BTHD, cos_TD, sin_TD), _rotate(k_BTHD, cos_TD, sin_TD)
        with jax.named_scope("core"):
            y_BTHD = attention(q_BTHD, k_BTHD, v_BTHD)
        x_BTC = x_BTC + _linear(y_BTHD.reshape(x_BTC.shape), block.out, compute)
    with jax.named_scope("mlp"):
        h_BTC = _rms_norm(x_BTC, block.mlp_norm, config.norm_eps)
        h_BTF = _linear(h_BTC, block.up, compute)
        with jax.named_scope("activation"):
            h_BTF = jax.nn.gelu(_add_bias(h_BTF, block.bias), approximate=True)
        return x_BTC + _linear(h_BTF, block.down, compute)


def _linear(x: Array, kernel: Array, compute: DTypeLike) -> Array:
    """The product in the compute dtype; what autocast does to ``torch.nn.functional.linear``."""
    return x.astype(compute) @ kernel.astype(compute)


def _add_bias(x_BTF: Array, bias_F: Array) -> Array:
    """X + bias, both in the dtype of x, taken in float32 at least and rounded once.

    The sum is the same as in the dtype of x itself. The gradient is not: the bias's is a sum over all B·T positions,
    which torch keeps in float32 until the end and XLA would keep in bfloat16.
    """
    wide = jnp.promote_types(x_BTF.dtype, jnp.float32)
    return (x_BTF.astype(wide) + bias_F.astype(x_BTF.dtype).astype(wide)).astype(x_BTF.dtype)


@jax.named_scope("norm")
def _rms_norm(x_BTC: HiddenBTC, weight_C: Array, eps: float) -> HiddenBTC:
    return x_BTC * jax.lax.rsqrt(jnp.square(x_BTC).mean(-1, keepdims=True) + eps) * weight_C


def _rotate(x_BTHD: HeadsBTHD, cos_TD: Array, sin_TD: Array) -> HeadsBTHD:
    """Turn the pairs (x_i, x_{i + D/2}), in the dtype of the tables."""
    first, second = jnp.split(x_BTHD, 2, axis=-1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x_BTHD.dtype)

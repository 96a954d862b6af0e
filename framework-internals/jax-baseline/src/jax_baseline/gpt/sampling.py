"""Writing with a trained model, byte by byte, each from the keys and values that the bytes before it left behind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_baseline.gpt.model import Block, Params, TokensBT, bias_gelu, rms_norm, rotate
from torch_baseline.config import GPTConfig
from torch_baseline.model import rotary_tables
from torch_baseline.sample import BYTES


class Cache(NamedTuple):
    """Keys, turned by their positions, and values of what was read, by layer.

    Attributes:
        keys: zero where nothing was read yet.
        values: likewise.
        length: positions read.
    """

    keys: Float[Array, "L B S H D"]
    values: Float[Array, "L B S H D"]
    length: Int[Array, ""]


def empty_cache(config: GPTConfig, batch_size: int) -> Cache:
    """Return the cache before the first token, with room for ``block_size``.

    Args:
        config: the shape.
        batch_size: B, texts that are written at the same time.
    """
    shape = (config.n_layer, batch_size, config.block_size, config.n_head, config.head_size)
    return Cache(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def read(params: Params, cache: Cache, tokens_BT: TokensBT, config: GPTConfig) -> tuple[Cache, Float[Array, "B V"]]:
    """Read tokens behind those that the cache holds; compiled once for the prompt and once for single bytes.

    Args:
        params: float32, blocks one after another.
        cache: overwritten.
        tokens_BT: the next T tokens of every text; the cache must have room for them.
        config: the shape.

    Returns:
        The cache, and the logits of what comes next.
    """
    assert not isinstance(params.blocks, Block), "unstack the blocks"
    length = tokens_BT.shape[1]
    cos_TD, sin_TD = (
        jax.lax.dynamic_slice_in_dim(jnp.asarray(table, jnp.float32), cache.length, length)
        for table in rotary_tables(config)
    )
    x_BTC = params.embedding[tokens_BT]
    keys, values = cache.keys, cache.values
    for index, block in enumerate(params.blocks):
        h_BTC = rms_norm(x_BTC, block.attention_norm, config.norm_eps)
        qkv_BT3HD = (h_BTC @ block.qkv).reshape(*x_BTC.shape[:2], 3, config.n_head, config.head_size)
        new_keys = rotate(qkv_BT3HD[:, :, 1], cos_TD, sin_TD)
        place = (index, 0, cache.length, 0, 0)
        keys = jax.lax.dynamic_update_slice(keys, new_keys[None], place)
        values = jax.lax.dynamic_update_slice(values, qkv_BT3HD[None, :, :, 2], place)
        q_BTHD = rotate(qkv_BT3HD[:, :, 0], cos_TD, sin_TD)
        x_BTC = x_BTC + _attend(q_BTHD, keys[index], values[index], cache.length).reshape(x_BTC.shape) @ block.out
        h_BTC = rms_norm(x_BTC, block.mlp_norm, config.norm_eps)
        x_BTC = x_BTC + bias_gelu(h_BTC @ block.up, block.bias) @ block.down
    last_BC = rms_norm(x_BTC[:, -1], params.norm, config.norm_eps)
    logits_BV = last_BC @ (params.embedding.T if params.head is None else params.head)
    return Cache(keys, values, cache.length + length), logits_BV


def _attend(q_BTHD: Array, keys_BSHD: Array, values_BSHD: Array, read_before: Array) -> Array:
    """Every query over the keys up to its own place, the cache's unused rest left out."""
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, keys_BSHD) / np.sqrt(q_BTHD.shape[-1])
    own_T = read_before + jnp.arange(q_BTHD.shape[1])
    seen_TS = jnp.arange(keys_BSHD.shape[1]) <= own_T[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_TS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, values_BSHD)


def sample_bytes(
    params: Params, config: GPTConfig, prompt: bytes, count: int, *, temperature: float, seed: int
) -> Iterator[int]:
    """Continue a text.

    A text that outgrows ``block_size`` is read anew from its last bytes, as ``torch_baseline`` reads it for every byte:
    positions count from the start of what the model sees, so nothing of the cache can be kept then.

    Args:
        params: trained on bytes; blocks one after another.
        config: the shape.
        prompt: at least one byte; the last ``block_size`` bytes are what the model sees.
        count: bytes to write.
        temperature: that logits are divided by; 0 takes the likeliest byte.
        seed: of the draws.

    Yields:
        One byte at a time.

    Raises:
        ValueError: for an empty prompt or a negative temperature.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one byte")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    key = jax.random.key(seed)
    text = list(prompt)
    unread, cache = text[-config.block_size :], empty_cache(config, 1)
    for index in range(count):
        if int(cache.length) + len(unread) > config.block_size:
            unread, cache = text[-config.block_size :], empty_cache(config, 1)
        cache, logits_BV = read(params, cache, jnp.array([unread], jnp.int32), config)
        # A vocabulary padded beyond the bytes has logits for tokens that no text holds.
        logits_V = logits_BV[0, :BYTES]
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(jax.random.categorical(jax.random.fold_in(key, index), logits_V / temperature))
        text.append(token)
        unread = [token]
        yield token

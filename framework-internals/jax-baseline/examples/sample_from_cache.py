"""Text from a trained model, one byte at a time, with a cache of keys and values.

``python examples/sample_from_cache.py RUN`` takes the folder of a run of either framework, as ``jax-baseline train
--out RUN`` writes it, or a checkpoint in it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchkit import UserError
from jax_baseline.gpt.model import Block, Params, TokensBT, bias_gelu, rms_norm, rotate
from jax_baseline.gpt.transfer import open_torch_checkpoint
from torch_baseline.config import GPTConfig
from torch_baseline.loop import BEST
from torch_baseline.model import rotary_tables
from torch_baseline.sample import BYTES


class Cache(NamedTuple):
    """Keys and values of every layer for the tokens that the model has read."""

    keys: Float[Array, "L B S H D"]  # keys after the rotary embedding; zero at the positions that are not read yet
    values: Float[Array, "L B S H D"]  # values; zero at the positions that are not read yet
    length: Int[Array, ""]  # number of positions that are read


def empty_cache(config: GPTConfig, batch_size: int) -> Cache:
    """Return an empty cache with room for ``block_size`` positions.

    Args:
        config: Shape of the model.
        batch_size: B, the number of texts that are written at the same time.
    """
    shape = (config.n_layer, batch_size, config.block_size, config.n_head, config.head_size)
    return Cache(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames="config", donate_argnums=1)
def read(params: Params, cache: Cache, tokens_BT: TokensBT, config: GPTConfig) -> tuple[Cache, Float[Array, "B V"]]:
    """Read the next tokens of every text. JAX compiles this once for the prompt and once for single bytes.

    Args:
        params: Weights in float32, with one :class:`Block` per layer.
        cache: Cache of the tokens before these. Its memory is donated.
        tokens_BT: The next T tokens of every text; the cache must have room for them.
        config: Shape of the model.

    Returns:
        The new cache, and the logits of the token that follows.
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
    """Attention of every query over the keys up to its own position; the unused rest of the cache is masked."""
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, keys_BSHD) / np.sqrt(q_BTHD.shape[-1])
    own_T = read_before + jnp.arange(q_BTHD.shape[1])
    seen_TS = jnp.arange(keys_BSHD.shape[1]) <= own_T[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_TS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, values_BSHD)


def sample_bytes(
    params: Params, config: GPTConfig, prompt: bytes, count: int, *, temperature: float, seed: int
) -> Iterator[int]:
    """Continue a text.

    When the text outgrows ``block_size``, its last ``block_size`` bytes are read again. Positions count from the start
    of what the model sees, so the cached keys are no longer valid then. ``torch_baseline`` reads the text again for
    every byte.

    Args:
        params: Weights of a model of bytes, with one :class:`Block` per layer.
        config: Shape of the model.
        prompt: At least one byte. The model sees the last ``block_size`` bytes.
        count: Number of bytes to write.
        temperature: Divisor of the logits; 0 takes the most likely byte.
        seed: Seed of the random choices.

    Yields:
        The next byte.

    Raises:
        ValueError: For an empty prompt or a negative temperature.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one byte, got an empty one")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}; 0 takes the most likely byte")
    key = jax.random.key(seed)
    text = list(prompt)
    unread, cache = text[-config.block_size :], empty_cache(config, 1)
    for index in range(count):
        if int(cache.length) + len(unread) > config.block_size:
            unread, cache = text[-config.block_size :], empty_cache(config, 1)
        cache, logits_BV = read(params, cache, jnp.array([unread], jnp.int32), config)
        # A padded vocabulary has logits for tokens that are no bytes.
        logits_V = logits_BV[0, :BYTES]
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(jax.random.categorical(jax.random.fold_in(key, index), logits_V / temperature))
        text.append(token)
        unread = [token]
        yield token


def main() -> None:
    """Write with the best weights of a run, the averaged ones where the run kept an average."""
    parser = argparse.ArgumentParser(description="Continue a text with the best weights of a run.")
    parser.add_argument("run", type=Path, help="folder of a training run, or a checkpoint in it")
    parser.add_argument("--prompt", default="The ", help="text to continue [default: %(default)r]")
    parser.add_argument("--bytes", type=int, default=300, help="number of bytes to write [default: %(default)s]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely byte")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    asked = parser.parse_args()
    try:
        checkpoint = asked.run / BEST if asked.run.is_dir() else asked.run
        model, params = open_torch_checkpoint(checkpoint, averaged=True)
        prompt = asked.prompt.encode()
        written = bytes(
            sample_bytes(params, model, prompt, asked.bytes, temperature=asked.temperature, seed=asked.seed)
        )
    except (UserError, ValueError) as error:
        parser.error(str(error))
    print(asked.prompt + written.decode(errors="replace"))


if __name__ == "__main__":
    main()

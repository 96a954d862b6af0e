"""Grouped-query attention with rotary positions: four heads of queries share two of keys and values."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

HEADS, GROUPS, SIZE = 4, 2, 6
WIDTH = HEADS * SIZE


def angles(length):
    frequencies = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    return np.outer(np.arange(length), frequencies)  # position, half of the head


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, heads, SIZE).transpose(1, 2)
            for part, heads in ((self.q, HEADS), (self.k, GROUPS), (self.v, GROUPS))
        )
        phase = torch.from_numpy(angles(length)).to(x.dtype)
        q, k = (self.rotated(part, phase.cos(), phase.sin()) for part in (q, k))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

    def rotated(self, x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def jax_attention(params, x, *, scale=SIZE**-0.5, tiled=False):
    """``tiled``: repeats the heads of keys and values as a whole, not each."""
    batch, length, _ = x.shape
    q, k, v = ((x @ params[name]["kernel"]).reshape(batch, length, -1, SIZE) for name in "qkv")
    phase = jnp.asarray(angles(length), x.dtype)[:, None]
    q, k = (jax_rotated(part, jnp.cos(phase), jnp.sin(phase)) for part in (q, k))
    repeated = partial(jnp.tile, reps=(1, 1, 2, 1)) if tiled else partial(jnp.repeat, repeats=2, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, repeated(k)) * scale
    seen = jnp.tril(jnp.ones((length, length), bool))
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), repeated(v))
    return y.reshape(batch, length, WIDTH) @ params["out"]["kernel"]


def jax_rotated(x, cos, sin):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def torch_side():
    torch.manual_seed(0)
    return Attention(), lambda model, x: (model(x) - x).square().mean()


def jax_side(**planted):
    widths = {"q": WIDTH, "k": GROUPS * SIZE, "v": GROUPS * SIZE, "out": WIDTH}
    params = {name: {"kernel": jnp.zeros((WIDTH, width))} for name, width in widths.items()}
    return params, lambda params, x: ((jax_attention(params, x, **planted) - x) ** 2).mean()


def names():
    return {r"(q|k|v|out)\.weight": r"\1/kernel.T"}


def inputs():
    return [(np.random.default_rng(seed).standard_normal((2, 5, WIDTH)),) for seed in range(2)]


wrong_scale = partial(jax_side, scale=WIDTH**-0.5)
wrong_groups = partial(jax_side, tiled=True)

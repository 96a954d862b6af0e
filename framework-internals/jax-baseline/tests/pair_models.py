"""Two small models, written in torch and in JAX, for the tests of pairs: they differ as the arguments say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def torch_side():
    torch.manual_seed(0)
    return Model(), lambda model, tokens, targets: nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten()
    )


def names():
    return {
        r"blocks\.(\d)\.(up|down)\.weight": r"blocks/\1/\2/kernel.T",
        r"blocks\.(\d)\.norm\.weight": r"blocks/\1/norm/scale",
    }


def inputs():
    generator = np.random.default_rng(0)
    return [(generator.integers(0, 11, (3, 5)), generator.integers(0, 11, (3, 5))) for _ in range(3)]


def jax_side(eps=1e-5, approximate=False, decay=0.0, rate=1e-3):
    def block():
        return {
            "norm": {"scale": jnp.ones(8), "bias": jnp.zeros(8)},
            "up": {"kernel": jnp.zeros((8, 16)), "bias": jnp.zeros(16)},
            "down": {"kernel": jnp.zeros((16, 8)), "bias": jnp.zeros(8)},
        }

    def loss(params, tokens, targets):
        x = params["embed"]["weight"][tokens]
        for one in params["blocks"]:
            centred = x - x.mean(-1, keepdims=True)
            h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + eps)
            h = h * one["norm"]["scale"] + one["norm"]["bias"]
            h = jax.nn.gelu(h @ one["up"]["kernel"] + one["up"]["bias"], approximate=approximate)
            x = x + h @ one["down"]["kernel"] + one["down"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"]["weight"].T, targets).mean()

    params = {"embed": {"weight": jnp.zeros((11, 8))}, "blocks": [block(), block()]}
    return params, loss, optax.adamw(rate, weight_decay=decay)


tanh_side = functools.partial(jax_side, approximate=True)
eps_side = functools.partial(jax_side, eps=1e-6)
decay_side = functools.partial(jax_side, decay=1e-2)
rate_side = functools.partial(jax_side, rate=1.1e-3)

"""MLP-Mixer: a patch embedding as a convolution, MLPs across tokens and across channels; flax.linen in JAX."""

from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

WIDTH, TOKENS = 12, 12  # a token MLP with a square shape hides a missing transposition from every check of shapes


class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.tokens = nn.LayerNorm(WIDTH, eps=1e-6), Mlp(TOKENS)
        self.norm2, self.channels = nn.LayerNorm(WIDTH, eps=1e-6), Mlp(WIDTH)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 5)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images).flatten(2).transpose(1, 2)).mean(1))


class JaxMixer(flax.linen.Module):
    eps: float = 1e-6
    turned: bool = False

    @flax.linen.compact
    def __call__(self, images):
        x = flax.linen.Conv(WIDTH, (2, 2), (2, 2), name="stem")(images.transpose(0, 2, 3, 1))
        x = x.reshape(len(x), -1, WIDTH)
        for index in range(2):
            h = flax.linen.LayerNorm(epsilon=self.eps, name=f"norm1_{index}")(x)
            h = h if self.turned else h.swapaxes(1, 2)
            h = self.mlp(h, f"tokens_{index}")
            x = x + (h if self.turned else h.swapaxes(1, 2))
            h = flax.linen.LayerNorm(epsilon=self.eps, name=f"norm2_{index}")(x)
            x = x + self.mlp(h, f"channels_{index}")
        return flax.linen.Dense(5, name="head")(x.mean(1))

    def mlp(self, x, name):
        h = flax.linen.gelu(flax.linen.Dense(x.shape[-1], name=f"{name}_up")(x), approximate=False)
        return flax.linen.Dense(x.shape[-1], name=f"{name}_down")(h)


def torch_side():
    torch.manual_seed(0)
    return Mixer(), lambda model, images, labels: nn.functional.cross_entropy(model(images), labels)


def jax_side(**planted):
    mixer = JaxMixer(**planted)

    def loss(params, images, labels):
        logits = mixer.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return mixer.init(jax.random.key(0), jnp.zeros((1, 3, 6, 8)))["params"], loss


def names():
    return {
        r"stem\.weight": "stem/kernel.transpose(2, 3, 1, 0)",
        r"blocks\.(\d)\.(norm\d)\.weight": r"\2_\1/scale",
        r"blocks\.(\d)\.(norm\d)\.bias": r"\2_\1/bias",
        r"blocks\.(\d)\.(tokens|channels)\.(up|down)\.weight": r"\2_\1_\3/kernel.T",
        r"blocks\.(\d)\.(tokens|channels)\.(up|down)\.bias": r"\2_\1_\3/bias",
        r"head\.weight": "head/kernel.T",
    }


def inputs():
    generator = np.random.default_rng(0)
    return [(generator.standard_normal((2, 3, 6, 8)), generator.integers(0, 5, 2)) for _ in range(2)]


wrong_eps = partial(jax_side, eps=1e-5)
wrong_axis = partial(jax_side, turned=True)

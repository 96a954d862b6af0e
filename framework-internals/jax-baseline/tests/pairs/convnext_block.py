"""A ConvNeXt block: depthwise convolution, LayerNorm over channels, MLP, layer scale; channels last in JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from jax_baseline.parity.pairs import Pair

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-1))

    def forward(self, x):
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.gamma * self.down(nn.functional.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.downsample = Block(), nn.Conv2d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, x):
        return self.downsample(self.block(x))


def convolution(x, p, **options):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, p["kernel"], dimension_numbers=dimensions, **options) + p["bias"]


def jax_stage(params, x, *, approximate=False, gamma=True):
    p = params["block"]
    x = x.transpose(0, 2, 3, 1)
    h = convolution(x, p["depthwise"], window_strides=(1, 1), padding="SAME", feature_group_count=WIDTH)
    centred = h - h.mean(-1, keepdims=True)
    h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    h = h * p["norm"]["scale"] + p["norm"]["bias"]
    h = jax.nn.gelu(h @ p["up"]["kernel"] + p["up"]["bias"], approximate=approximate)
    h = h @ p["down"]["kernel"] + p["down"]["bias"]
    x = x + (p["gamma"] * h if gamma else h + 0 * p["gamma"])
    x = convolution(x, params["downsample"], window_strides=(2, 2), padding="VALID")
    return x.transpose(0, 3, 1, 2)


def torch_side():
    torch.manual_seed(0)
    return Stage(), lambda model, x: (model(x) - 1).square().mean()


def jax_side(**planted):
    def dense(*shape):
        return {"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[-1])}

    norm = {"scale": jnp.zeros(WIDTH), "bias": jnp.zeros(WIDTH)}
    block = {"depthwise": dense(7, 7, 1, WIDTH), "norm": norm, "up": dense(WIDTH, 4 * WIDTH)}
    block |= {"down": dense(4 * WIDTH, WIDTH), "gamma": jnp.zeros(WIDTH)}
    params = {"block": block, "downsample": dense(2, 2, WIDTH, WIDTH)}
    return params, lambda params, x: ((jax_stage(params, x, **planted) - 1) ** 2).mean()


def names():
    return {
        r"(block\.depthwise|downsample)\.weight": r"\1/kernel.transpose(2, 3, 1, 0)",
        r"block.norm.weight": "block/norm/scale",
        r"block\.(up|down)\.weight": r"block/\1/kernel.T",
    }


def inputs():
    return [(np.random.default_rng(seed).standard_normal((2, WIDTH, 8, 10)),) for seed in range(2)]


MODEL = torch_side()[0]
PARAMS = Pair(*torch_side(), *jax_side(), inputs(), names()).converted()


def arrays():
    return inputs()[0][0].astype(np.float32)


def torch_fn(x):
    return MODEL(x)


def jax_fn(x, **planted):
    return jax_stage(PARAMS, x, **planted)


wrong_gelu = partial(jax_side, approximate=True)
wrong_gamma = partial(jax_side, gamma=False)
gelu_fn = partial(jax_fn, approximate=True)

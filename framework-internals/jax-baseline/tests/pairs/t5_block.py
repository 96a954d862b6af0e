"""A block of T5's encoder: RMSNorm, attention without a scale and with a relative position bias, gated MLP."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

HEADS, SIZE, LENGTH, BUCKETS, FURTHEST = 3, 4, 20, 8, 16
WIDTH = HEADS * SIZE


def bucket(distance):
    """T5's bucket of each distance: half for each sign; near ones exact, far ones by logarithm."""
    half, size = BUCKETS // 2, np.abs(distance)
    exact = half // 2
    far = exact + np.log(np.maximum(size, 1) / exact) / math.log(FURTHEST / exact) * (half - exact)
    found = np.where(size < exact, size, np.minimum(far.astype(np.int64), half - 1))
    return found + (distance > 0) * half


POSITIONS = np.arange(LENGTH)
DISTANCES = POSITIONS[None] - POSITIONS[:, None]  # key minus query


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.bias = Norm(), Norm(), nn.Embedding(BUCKETS, HEADS)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) + self.bias(torch.from_numpy(bucket(DISTANCES))).permute(2, 0, 1)
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(nn.functional.gelu(self.gate(h), approximate="tanh") * self.up(h))


def jax_block(p, x, *, scale=1.0, distances=DISTANCES, turned=False):
    """``turned``: the output's square matrix without its transposition."""

    def norm(weight, x):
        return weight * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    h = norm(p["norm1"]["weight"], x)
    q, k, v = ((h @ p[name]["kernel"]).reshape(*x.shape[:2], HEADS, SIZE) for name in "qkv")
    scores = scale * jnp.einsum("bthd,bshd->bhts", q, k)
    scores = scores + p["bias"]["weight"][bucket(distances)].transpose(2, 0, 1)
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + y @ (p["o"]["kernel"].T if turned else p["o"]["kernel"])
    h = norm(p["norm2"]["weight"], x)
    gated = jax.nn.gelu(h @ p["gate"]["kernel"], approximate=True) * (h @ p["up"]["kernel"])
    return x + gated @ p["down"]["kernel"]


def torch_side():
    torch.manual_seed(0)
    return Block(), lambda model, x: (model(x) - 1).square().mean()


def jax_side(**planted):
    params = {name: {"kernel": jnp.zeros((WIDTH, WIDTH))} for name in ("q", "k", "v", "o", "gate", "up", "down")}
    params |= {name: {"weight": jnp.zeros(WIDTH)} for name in ("norm1", "norm2")}
    params["bias"] = {"weight": jnp.zeros((BUCKETS, HEADS))}
    return params, lambda params, x: ((jax_block(params, x, **planted) - 1) ** 2).mean()


def names():
    return {r"(q|k|v|o|gate|up|down)\.weight": r"\1/kernel.T"}


def inputs():
    return [(np.random.default_rng(seed).standard_normal((2, LENGTH, WIDTH)),) for seed in range(2)]


wrong_scale = partial(jax_side, scale=SIZE**-0.5)
wrong_distance = partial(jax_side, distances=-DISTANCES)
wrong_matrix = partial(jax_side, turned=True)

"""Random functions, each written in torch and in JAX from one description; one in two has a planted difference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import strategies as st

F = torch.nn.functional


def _t_norm(x, k):
    return F.layer_norm(x, (x.shape[-1],), eps=k)


def _j_norm(x, k):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + k)


def _t_rms(x, k):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + k)


def _j_rms(x, k):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + k)


# name: (torch, JAX, the value of k, other values of k that are planted)
OPERATIONS = {
    "gelu": (
        lambda x, k: F.gelu(x, approximate="tanh" if k else "none"),
        lambda x, k: jax.nn.gelu(x, approximate=bool(k)),
        0,
        (1,),
    ),
    "layer_norm": (_t_norm, _j_norm, 1e-5, (1e-6, 1e-3, 1e-12)),
    "rms_norm": (_t_rms, _j_rms, 1e-5, (1e-6, 1e-3)),
    "softmax": (lambda x, k: x.softmax(k), lambda x, k: jax.nn.softmax(x, k), -1, (0, 1)),
    "log_softmax": (lambda x, k: x.log_softmax(k), lambda x, k: jax.nn.log_softmax(x, k), -1, (1,)),
    "silu": (lambda x, k: x * torch.sigmoid(k * x), lambda x, k: x * jax.nn.sigmoid(k * x), 1.0, (1.702, 0.999)),
    "leaky_relu": (
        lambda x, k: F.leaky_relu(x, k),
        lambda x, k: jax.nn.leaky_relu(x, k),
        0.01,
        (0.2, 0.011),
    ),
    # Above its threshold, 20, torch's softplus is x, 2e-9 less: another function in float64.
    "softplus": (
        lambda x, k: F.softplus(x, k, threshold=40),
        lambda x, k: jnp.logaddexp(k * x, 0) / k,
        1.0,
        (2.0, 1.01),
    ),
    "scale": (lambda x, k: x * k, lambda x, k: k * x, 0.35355, (0.5, 0.35)),
    "clip": (lambda x, k: x.clamp(-k, k), lambda x, k: jnp.clip(x, -k, k), 1.0, (0.9, 1.5)),
    "matmul": (lambda x, k: x @ _weight(x, k), lambda x, k: jnp.einsum("abc,cd->abd", x, _weight(x, k)), 0, (1, 2)),
    "attention": (
        lambda x, k: ((x @ x.transpose(1, 2)) * k).softmax(-1) @ x,
        lambda x, k: jnp.einsum("bts,bsc->btc", jax.nn.softmax(jnp.einsum("btc,bsc->bts", x, x) * k), x),
        0.5,
        (0.25, 0.51),
    ),
    "variance": (
        lambda x, k: x / (1 + x.var(1, correction=k, keepdim=True)),
        lambda x, k: x / (1 + x.var(1, ddof=k, keepdims=True)),
        0,
        (1,),
    ),
    "shift": (lambda x, k: x + x.roll(k, 1), lambda x, k: x + jnp.roll(x, k, 1), 1, (-1, 0)),
    "cumsum": (lambda x, k: x.cumsum(k) / 3, lambda x, k: jnp.cumsum(x, k) / 3, 1, (2, 0)),
}


def _weight(x, k):
    """A matrix in the framework and the dtype of x: itself, transposed, or without its last column."""
    width = x.shape[-1]
    matrix = np.random.default_rng(5).standard_normal((width, width)) / np.sqrt(width)
    if k == 1:
        matrix = matrix.T.copy()
    if k == 2:
        matrix[:, -1] = 0
    return torch.from_numpy(matrix).to(x.dtype) if isinstance(x, torch.Tensor) else jnp.asarray(matrix, x.dtype)


@dataclass(frozen=True)
class Function:
    """A function of an array (batch, position, channel): operations one after another, some with a residual.

    Attributes:
        shape: Shape of the input.
        steps: Name of each operation, and whether its input is added to its result.
        wrong: Index of the operation that differs in JAX, with its k; None if both are equal.
        seed: Seed of the input.
        dtype: Dtype that the input is cast to; results have it too.
    """

    shape: tuple[int, int, int]
    steps: tuple[tuple[str, bool], ...]
    wrong: tuple[int, float] | None
    seed: int
    dtype: str = "float32"

    def input(self):
        return np.random.default_rng(self.seed).standard_normal(self.shape, np.float32)

    def torch(self, x):
        if self.dtype != "float32":
            x = x.to(getattr(torch, self.dtype))
        for name, residual in self.steps:
            made, _, k, _ = OPERATIONS[name]
            x = x + made(x, k) if residual else made(x, k)
        return x

    def jax(self, x):
        if self.dtype != "float32":
            x = x.astype(self.dtype)
        for index, (name, residual) in enumerate(self.steps):
            _, made, k, _ = OPERATIONS[name]
            k = self.wrong[1] if self.wrong and self.wrong[0] == index else k
            x = x + made(x, k) if residual else made(x, k)
        return x


@st.composite
def functions(draw):
    shape = draw(st.sampled_from([(3, 4, 6), (1, 5, 4), (2, 3, 8), (4, 2, 3)]))
    steps = tuple(draw(st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.booleans()), min_size=1, max_size=6)))
    wrong = None
    if draw(st.booleans()):
        index = draw(st.integers(0, len(steps) - 1))
        wrong = index, draw(st.sampled_from(OPERATIONS[steps[index][0]][3]))
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"]))
    return Function(shape, steps, wrong, draw(st.integers(0, 1000)), dtype)

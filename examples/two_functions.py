"""jax-baseline on two functions of one's own: the same attention for both compilers, inputs once for both.

jax-baseline diff examples/two_functions.py:torch_fn examples/two_functions.py:jax_fn --gradients --device cpu
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch


def inputs():
    """Queries, keys and values: one sequence of 128, 64 wide."""
    generator = np.random.default_rng(0)
    return tuple(generator.standard_normal((128, 64), np.float32) for _ in range(3))


def torch_fn(q, k, v):
    """softmax(q kᵀ / 8) v, and its sum of squares."""
    weights = torch.softmax(q @ k.T / 8, -1)
    return (weights @ v).square().sum()


def jax_fn(q, k, v):
    """The same."""
    weights = jax.nn.softmax(q @ k.T / 8, -1)
    return jnp.square(weights @ v).sum()

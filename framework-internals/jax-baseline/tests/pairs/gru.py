"""A GRU over tokens: torch's fused layer, and a scan in JAX with the gates in torch's order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from jax_baseline.parity.pairs import Pair

WIDTH, TOKENS = 8, 11


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Embedding(TOKENS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def torch_side():
    torch.manual_seed(0)
    return Gru(), lambda model, tokens, targets: nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), targets.flatten()
    )


def jax_gru(p, x, *, bias=True, before=False):
    """``bias``: that of the hidden part; ``before``: the reset gate before its product."""

    def step(h, x_t):
        xr, xz, xn = jnp.split(x_t @ p["weight_ih_l0"].T + p["bias_ih_l0"], 3, -1)
        of_h = h @ p["weight_hh_l0"].T + (p["bias_hh_l0"] if bias else 0 * p["bias_hh_l0"])
        hr, hz, hn = jnp.split(of_h, 3, -1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        if before:
            w = p["weight_hh_l0"][2 * WIDTH :]
            n = jnp.tanh(xn + (r * h) @ w.T + p["bias_hh_l0"][2 * WIDTH :])
        else:
            n = jnp.tanh(xn + r * hn)
        h = (1 - z) * n + z * h
        return h, h

    return jax.lax.scan(step, jnp.zeros((len(x), WIDTH), x.dtype), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def jax_side(**planted):
    def loss(params, tokens, targets):
        h = jax_gru(params["gru"], params["embed"]["weight"][tokens], **planted)
        logits = h @ params["head"]["kernel"] + params["head"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    gates = {name: jnp.zeros((3 * WIDTH, WIDTH)) for name in ("weight_ih_l0", "weight_hh_l0")}
    gates |= {name: jnp.zeros(3 * WIDTH) for name in ("bias_ih_l0", "bias_hh_l0")}
    head = {"kernel": jnp.zeros((WIDTH, TOKENS)), "bias": jnp.zeros(TOKENS)}
    return {"embed": {"weight": jnp.zeros((TOKENS, WIDTH))}, "gru": gates, "head": head}, loss


def names():
    return {r"head\.weight": "head/kernel.T"}


def inputs():
    generator = np.random.default_rng(0)
    return [tuple(generator.integers(0, TOKENS, (3, 5)) for _ in range(2)) for _ in range(3)]


MODEL = torch_side()[0]
PARAMS = Pair(*torch_side(), *jax_side(), inputs(), names()).converted()


def arrays():
    return np.random.default_rng(0).standard_normal((3, 5, WIDTH), np.float32)


def torch_fn(x):
    return MODEL.gru(x)[0]


def jax_fn(x, **planted):
    return jax_gru(PARAMS["gru"], x, **planted)


wrong_bias = partial(jax_side, bias=False)
wrong_reset = partial(jax_side, before=True)
bias_fn = partial(jax_fn, bias=False)

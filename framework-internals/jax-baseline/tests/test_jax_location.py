"""Where two functions part and why: differences that people plant when they port a model, each beside its equal."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional

from jax_baseline.parity.location import locate


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def linear(x, module):
    return x @ module["weight"].T + module["bias"]


def parameters(module):
    """The parameters of a module for JAX, by the first part of their names."""
    found = {}
    for name, parameter in module.named_parameters():
        *parts, last = name.split(".")
        found.setdefault(".".join(parts), {})[last] = jnp.asarray(parameter.detach().numpy())
    return found


def made(*modules):
    torch.manual_seed(0)
    return nn.ModuleDict({name: make() for name, make in modules}).double()


class Convolution:
    """Two by two windows at stride 2 see other rows with SAME padding, which pads after an odd size alone."""

    cause = "SAME padding, 0 and 1, 0 and 1 before and after, instead of [1, 1]"
    model = made(("conv", lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1)))
    x = numbers(2, 3, 6, 8)

    def torch(self):
        return self.model["conv"](torch.from_numpy(self.x)).relu()

    def jax(self, p, x, wrong):
        pads = "SAME" if wrong else ((1, 1), (1, 1))
        y = jax.lax.conv_general_dilated(x, p["conv"]["weight"], (2, 2), pads)
        return jax.nn.relu(y + p["conv"]["bias"][:, None, None])


class Scale:
    cause = "scale=1.0 instead of None"
    model = made(("out", lambda: nn.Linear(4, 4)))
    x = numbers(2, 3, 5, 4)

    def torch(self):
        x = torch.from_numpy(self.x)
        return self.model["out"](functional.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True))

    def jax(self, p, x, wrong):
        scores = jnp.einsum("bhtd,bhsd->bhts", x, jnp.sin(x)) / (1.0 if wrong else 2.0)
        seen = jnp.tril(jnp.ones((5, 5), bool))
        return linear(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ jnp.cos(x), p["out"])


class ScaleByHand:
    cause = "JAX computes what follows without this operation"
    model = made(("out", lambda: nn.Linear(4, 4)))
    x = numbers(2, 5, 4)

    def torch(self):
        x = torch.from_numpy(self.x)
        return self.model["out"]((x @ x.sin().mT / 2.0).softmax(-1) @ x.cos())

    def jax(self, p, x, wrong):
        scores = jnp.einsum("btd,bsd->bts", x, jnp.sin(x))
        return linear(jax.nn.softmax(scores if wrong else scores / 2.0) @ jnp.cos(x), p["out"])


class Groups:
    cause = "group=4 instead of 2"
    model = made(("norm", lambda: nn.GroupNorm(2, 8)))
    x = numbers(3, 8, 5)

    def torch(self):
        return self.model["norm"](torch.from_numpy(self.x)).relu()

    def jax(self, p, x, wrong):
        parts = x.reshape(3, 4 if wrong else 2, -1)
        parts = (parts - parts.mean(-1, keepdims=True)) / jnp.sqrt(parts.var(-1, keepdims=True) + 1e-5)
        return jax.nn.relu(parts.reshape(x.shape) * p["norm"]["weight"][:, None] + p["norm"]["bias"][:, None])


class Variance:
    cause = "the variance over n − 1 instead of n"
    model = made(("norm", lambda: nn.LayerNorm(6)), ("out", lambda: nn.Linear(6, 3)))
    x = numbers(4, 6)

    def torch(self):
        return self.model["out"](self.model["norm"](torch.from_numpy(self.x)))

    def jax(self, p, x, wrong):
        y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True, ddof=int(wrong)) + 1e-5)
        return linear(y * p["norm"]["weight"] + p["norm"]["bias"], p["out"])


class VarianceOfGroups(Groups):
    cause = "the variance over n − 1 instead of n"

    def jax(self, p, x, wrong):
        parts = x.reshape(3, 2, -1)
        var = parts.var(-1, keepdims=True, ddof=int(wrong))
        parts = (parts - parts.mean(-1, keepdims=True)) / jnp.sqrt(var + 1e-5)
        return jax.nn.relu(parts.reshape(x.shape) * p["norm"]["weight"][:, None] + p["norm"]["bias"][:, None])


class VarianceOfBatches:
    cause = "the variance over n − 1 instead of n"
    model = made(("norm", lambda: nn.BatchNorm1d(6)), ("out", lambda: nn.Linear(6, 3)))
    x = numbers(9, 6)

    def torch(self):
        return self.model["out"](self.model["norm"](torch.from_numpy(self.x)))

    def jax(self, p, x, wrong):
        y = (x - x.mean(0)) / jnp.sqrt(x.var(0, ddof=int(wrong)) + 1e-5)
        return linear(y * p["norm"]["weight"] + p["norm"]["bias"], p["out"])


class MissingNorm(Variance):
    cause = "JAX computes what follows without this operation"

    def jax(self, p, x, wrong):
        y = x
        if not wrong:
            y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
            y = y * p["norm"]["weight"] + p["norm"]["bias"]
        return linear(y, p["out"])


class Smoothing:
    cause = "label smoothing of 0.1"
    model = made(("out", lambda: nn.Linear(6, 7)))
    x = numbers(4, 6)
    targets = np.array([0, 3, 6, 2])

    def torch(self):
        return functional.cross_entropy(self.model["out"](torch.from_numpy(self.x)), torch.from_numpy(self.targets))

    def jax(self, p, x, wrong):
        wanted = jax.nn.one_hot(self.targets, 7)
        wanted = optax.smooth_labels(wanted, 0.1) if wrong else wanted
        return optax.softmax_cross_entropy(linear(x, p["out"]), wanted).mean()


class SmoothingLeftOut(Smoothing):
    cause = "without label smoothing"

    def torch(self):
        logits = self.model["out"](torch.from_numpy(self.x))
        return functional.cross_entropy(logits, torch.from_numpy(self.targets), label_smoothing=0.1)

    def jax(self, p, x, wrong):
        return super().jax(p, x, not wrong)


class ForgetBias:
    cause = "1 added to the operand"
    model = made(("cell", lambda: nn.LSTMCell(3, 4)))
    x = numbers(2, 3)

    def torch(self):
        return self.model["cell"](torch.from_numpy(self.x), (torch.ones(2, 4).double(), torch.ones(2, 4).double()))[0]

    def jax(self, p, x, wrong):
        cell, h = p["cell"], jnp.ones((2, 4))
        gates = x @ cell["weight_ih"].T + cell["bias_ih"] + h @ cell["weight_hh"].T + cell["bias_hh"]
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f + 1.0 if wrong else f) * h + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c)


class ResetGate:
    cause = "the multiplication before the matrix product"
    model = made(("cell", lambda: nn.GRUCell(3, 4)))
    x = numbers(2, 3)
    h = numbers(2, 4)

    def torch(self):
        return self.model["cell"](torch.from_numpy(self.x), torch.from_numpy(self.h))

    def jax(self, p, x, wrong):
        cell, h = p["cell"], jnp.asarray(self.h)
        of_x = jnp.split(x @ cell["weight_ih"].T + cell["bias_ih"], 3, -1)
        of_h = jnp.split(h @ cell["weight_hh"].T + cell["bias_hh"], 3, -1)
        r, z = (jax.nn.sigmoid(of_x[one] + of_h[one]) for one in range(2))
        gated = (r * h) @ cell["weight_hh"][8:].T + cell["bias_hh"][8:] if wrong else r * of_h[2]
        n = jnp.tanh(of_x[2] + gated)
        return (1 - z) * n + z * h


KINDS = (
    Convolution, Scale, ScaleByHand, Groups, Variance, VarianceOfGroups, VarianceOfBatches, MissingNorm, Smoothing,
    SmoothingLeftOut, ForgetBias, ResetGate,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_difference_has_its_cause_and_its_equal_none(kind):
    pair = kind()
    with jax.enable_x64(True), torch.no_grad():
        arguments = parameters(pair.model), jnp.asarray(pair.x)
        equal, planted = (
            locate(pair.torch, lambda p, x, wrong=wrong: pair.jax(p, x, wrong), arguments) for wrong in (False, True)
        )
    assert str(equal) == "all operations of the forward pass agree: the backward pass differs"
    assert pair.cause in planted.cause
    assert planted.torch

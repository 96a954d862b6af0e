"""Random pairs of models with casts, state and parameter groups; one in two has a planted difference."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from hypothesis import strategies as st
from torch import nn

from jax_baseline.parity.pairs import Pair

WIDE, RATE, DECAY = 6, 1e-2, 0.1
CASTS = ("", "float32 norm", "float32 softmax", "bfloat16 gelu", "float32 table", "float32 product", "float32 loss")
ON_ONE_SIDE = ("float32 norm", "float32 softmax", "float32 loss")  # which compute the same with and without the cast
STATES = ("", "mean", "running statistics", "teacher")
GROUPS = ("", "mask", "rates", "mask and rates", "frozen")
OF_BIASES = {
    "mask": {"weight_decay": 0.0},
    "rates": {"lr": RATE / 10},
    "mask and rates": {"weight_decay": 0.0, "lr": RATE / 10},
}
# What is planted in JAX, and what it needs.
WRONGS = {
    "": ("", ""),
    "epsilon": ("", ""),
    "another rate": ("", ""),
    "another second moment": ("", ""),
    "coupled decay": ("", ""),
    "gelu": ("cast", "bfloat16 gelu"),
    "momentum": ("state", ""),
    "variance over n": ("state", "running statistics"),
    "no mask": ("groups", "mask"),
    "one rate": ("groups", "rates"),
    "groups exchanged": ("groups", "mask and rates"),
    "trained": ("groups", "frozen"),
}


class Model(nn.Module):
    def __init__(self, cast, state, softmax):  # cast: what torch casts
        super().__init__()
        self.cast, self.kept, self.softmax = cast, state, softmax
        self.a, self.b = nn.Linear(4, WIDE), nn.Linear(WIDE, 3)
        if state == "mean":
            self.register_buffer("mean", torch.zeros(WIDE))
        if state == "running statistics":
            self.norm = nn.BatchNorm1d(WIDE, affine=False)
        if state == "teacher":
            self.teacher = nn.Parameter(torch.ones(WIDE), requires_grad=False)
        if cast == "float32 table":
            self.register_buffer("table", torch.cos(torch.arange(WIDE) / 7))

    def forward(self, x):
        h = self.a(x)
        if self.kept == "mean":
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.mean
        if self.kept == "running statistics":
            h = self.norm(h)
        if self.kept == "teacher":
            with torch.no_grad():
                self.teacher.mul_(0.9).add_(self.a.bias, alpha=0.1)
            h = h + self.teacher
        wide = h.float() if self.cast == "float32 norm" else h
        h = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(h.dtype)
        if self.softmax:
            h = (h.float() if self.cast == "float32 softmax" else h).softmax(-1).to(h.dtype)
        if self.cast == "bfloat16 gelu":
            h = nn.functional.gelu(h.bfloat16()).to(h.dtype)
        if self.cast == "float32 table":
            h = h * self.table
        return self.b(h)


@dataclass(frozen=True)
class Description:
    """A pair of models.

    Attributes:
        cast: One of ``CASTS``.
        state: One of ``STATES``.
        groups: One of ``GROUPS``.
        wrong: What JAX does differently, a key of ``WRONGS``.
        seed: Seed of weights and batches.
        side: Where the cast is: "both", "torch" or "JAX".
    """

    cast: str = ""
    state: str = ""
    groups: str = ""
    wrong: str = ""
    seed: int = 0
    side: str = "both"

    def casts(self, side):
        """The cast of a side."""
        return self.cast if self.side in ("both", side) else ""

    def pair(self):
        torch.manual_seed(self.seed)
        generator = np.random.default_rng(self.seed)
        names = {r"(a|b)\.weight": r"\1/kernel.T", r"norm\.running_(mean|var)": r"norm/\1"}
        return Pair(
            Model(self.casts("torch"), self.state, self.cast == "float32 softmax"),
            self._torch_loss,
            {"a": _linear(4, WIDE), "b": _linear(WIDE, 3)},
            self._jax_loss,
            [(generator.standard_normal((5, 4)),) for _ in range(4)],
            names,
            _frozen if self.groups == "frozen" else self._torch_optimizer,
            self._jax_optimizer(),
            self._jax_state(),
        )

    def _torch_loss(self, model, x):
        y = model(x)
        return ((y.float() if self.casts("torch") == "float32 loss" else y) - 1).square().mean()

    def _torch_optimizer(self, model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices, biases = ([one for one in trained if (one.ndim > 1) == big] for big in (True, False))
        groups = [{"params": matrices}, {"params": biases, **OF_BIASES.get(self.groups, {})}]
        return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)

    def _jax_optimizer(self):
        def labels(params):
            return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "bias", params)

        of_biases = {} if self.wrong in ("no mask", "one rate") else OF_BIASES.get(self.groups, {})
        of_matrices = {}
        if self.wrong == "groups exchanged":
            of_matrices, of_biases = of_biases, of_matrices
        if self.groups == "mask" and self.wrong != "no mask":
            return self._adamw(mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params))
        optimizers = {"matrix": self._adamw(**of_matrices), "bias": self._adamw(**of_biases)}
        if self.groups == "frozen":
            optimizers["bias"] = optax.adamw(RATE) if self.wrong == "trained" else optax.set_to_zero()
        return optax.multi_transform(optimizers, labels)

    def _adamw(self, lr=RATE, weight_decay=DECAY, mask=None):
        lr = 1.01 * lr if self.wrong == "another rate" else lr
        if self.wrong == "coupled decay":
            return optax.chain(optax.add_decayed_weights(weight_decay, mask), optax.adam(lr))
        b2 = 0.99 if self.wrong == "another second moment" else 0.999
        return optax.adamw(lr, b2=b2, weight_decay=weight_decay, mask=mask)

    def _jax_state(self):
        zeros, ones = jnp.zeros(WIDE), jnp.ones(WIDE)
        return {
            "mean": {"mean": zeros},
            "running statistics": {"norm": {"mean": zeros, "var": ones}},
            "teacher": {"teacher": ones},
        }.get(self.state)

    def _jax_loss(self, params, *rest):
        state, x = rest if self.state else (None, *rest)
        new = 0.2 if self.wrong == "momentum" else 0.1

        def mixed(old, value):
            return (1 - new) * old + new * jax.lax.stop_gradient(value)

        h = x @ params["a"]["kernel"] + params["a"]["bias"]
        if self.state == "mean":
            state = {"mean": mixed(state["mean"], h.mean(0))}
            h = h - state["mean"]
        if self.state == "running statistics":
            over = int(self.wrong != "variance over n")
            old = state["norm"]
            state = {"norm": {"mean": mixed(old["mean"], h.mean(0)), "var": mixed(old["var"], h.var(0, ddof=over))}}
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
        if self.state == "teacher":
            state = {"teacher": mixed(state["teacher"], params["a"]["bias"])}
            h = h + state["teacher"]
        wide = h.astype(jnp.float32) if self.casts("JAX") == "float32 norm" else h
        epsilon = 1e-6 if self.wrong == "epsilon" else 1e-5
        h = (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon)).astype(h.dtype)
        y = self._cast(h, params["b"])
        loss = jnp.square((y.astype(jnp.float32) if self.casts("JAX") == "float32 loss" else y) - 1).mean()
        return (loss, state) if self.state else loss

    def _cast(self, h, last):
        if self.cast == "float32 softmax":
            h = jax.nn.softmax(h.astype(jnp.float32) if self.casts("JAX") else h).astype(h.dtype)
        if self.cast == "bfloat16 gelu":
            h = jax.nn.gelu(h.astype(jnp.bfloat16), approximate=self.wrong == "gelu").astype(h.dtype)
        if self.cast == "float32 table":
            h = h * jnp.cos(jnp.arange(WIDE, dtype=jnp.float32) / 7)
        if self.cast == "float32 product":
            return jnp.matmul(h, last["kernel"], preferred_element_type=jnp.float32).astype(h.dtype) + last["bias"]
        return h @ last["kernel"] + last["bias"]


def _linear(rows, columns):
    return {"kernel": jnp.zeros((rows, columns)), "bias": jnp.zeros(columns)}


def _frozen(model):
    return torch.optim.AdamW([model.a.weight, model.b.weight], lr=RATE, weight_decay=DECAY)


@st.composite
def descriptions(draw):
    parts = {
        "cast": draw(st.sampled_from(CASTS)),
        "state": draw(st.sampled_from(STATES)),
        "groups": draw(st.sampled_from(GROUPS)),
    }
    possible = [
        wrong
        for wrong, (part, kind) in WRONGS.items()
        if wrong and (not part or (parts[part] == kind if kind else parts[part]))
    ]
    side = draw(st.sampled_from(["both", "torch", "JAX"])) if parts["cast"] in ON_ONE_SIDE else "both"
    wrong = draw(st.sampled_from(possible)) if draw(st.booleans()) else ""
    return Description(**parts, wrong=wrong, seed=draw(st.integers(0, 1000)), side=side)

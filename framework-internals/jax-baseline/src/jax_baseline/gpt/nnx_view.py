"""The model as a ``flax.nnx`` module: a thin view for code that speaks nnx; the functions stay the truth."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jax_baseline.gpt.model import PARTS, Attention, LogitsBTV, Params, Parts, TokensBT, forward, xla_attention
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig
from torch_baseline.model import init_numpy


class GPT(nnx.Module):
    """``GPT(config)(tokens_BT)``: the logits of :func:`jax_baseline.gpt.model.forward`.

    ``nnx.split``, ``nnx.grad`` and ``nnx.Optimizer`` work on it as on any module. For a training step pass
    :attr:`params` to the functional one: ``nnx.jit`` takes the module apart and puts it together at every call, in
    Python, which costs more than the dispatch of the compiled step.

    Args:
        config: the shape.
        params: the weights; by default drawn from ``seed`` as ``torch_baseline`` draws them.
        seed: of the weights.
        attention: see :func:`jax_baseline.gpt.model.forward`.
        parts: likewise.
        dtype: to multiply matrices in.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        params: Params | None = None,
        seed: int = 0,
        attention: Attention = xla_attention,
        parts: Parts = PARTS,
        dtype: DTypeLike | None = None,
    ) -> None:
        params = from_torch(init_numpy(config, seed), config) if params is None else params
        leaves, self.structure = jax.tree.flatten(params)
        self.weights = nnx.List([nnx.Param(leaf) for leaf in leaves])
        self.config, self.attention, self.parts, self.dtype = config, attention, parts, dtype

    @property
    def params(self) -> Params:
        """The weights as the functions take them."""
        return jax.tree.unflatten(self.structure, [weight[...] for weight in self.weights])

    def __call__(self, tokens_BT: TokensBT) -> LogitsBTV:
        """Return the logits."""
        options: dict[str, Any] = {"attention": self.attention, "parts": self.parts, "dtype": self.dtype}
        return forward(self.params, tokens_BT, self.config, **options)

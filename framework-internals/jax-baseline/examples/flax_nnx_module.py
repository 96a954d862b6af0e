"""The model as a ``flax.nnx`` module, for code that is written for nnx: ``python examples/flax_nnx_module.py``.

The module holds the parameters and calls the package's functions; it adds no mathematics. ``nnx.split``, ``nnx.grad``
and ``nnx.Optimizer`` work on it as on any module.
"""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_baseline.gpt.model import PARTS, LogitsBTV, Params, Parts, TokensBT, forward
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig
from torch_baseline.model import init_numpy


class GPT(nnx.Module):
    """``GPT(config)(tokens_BT)`` returns the logits of :func:`jax_baseline.gpt.model.forward`.

    For a training step, pass :attr:`params` to the functional step. ``nnx.jit`` splits and merges the module in Python
    at every call, which costs more than the dispatch of the compiled step.

    Args:
        config: Shape of the model.
        params: Weights. The default is the weights that ``torch_baseline`` draws from ``seed``.
        seed: Seed of the default weights.
        parts: As in :func:`jax_baseline.gpt.model.forward`.
        dtype: Dtype of the matrix products.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        params: Params | None = None,
        seed: int = 0,
        parts: Parts = PARTS,
        dtype: DTypeLike | None = None,
    ) -> None:
        params = from_torch(init_numpy(config, seed), config) if params is None else params
        leaves, self.structure = jax.tree.flatten(params)
        self.weights = nnx.List([nnx.Param(leaf) for leaf in leaves])
        self.config, self.parts, self.dtype = config, parts, dtype

    @property
    def params(self) -> Params:
        """The weights in the form that the package's functions take."""
        return jax.tree.unflatten(self.structure, [weight[...] for weight in self.weights])

    def __call__(self, tokens_BT: TokensBT) -> LogitsBTV:
        """Return the logits."""
        return forward(self.params, tokens_BT, self.config, parts=self.parts, dtype=self.dtype)


def main() -> None:
    """Print the shape of the logits and the number of parameters that nnx sees."""
    model = GPT(GPTConfig.preset("tiny"))
    logits = model(np.zeros((1, model.config.block_size), np.int32))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"logits {logits.shape}, {count:,} parameters")


if __name__ == "__main__":
    main()

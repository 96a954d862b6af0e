"""Permuted reference: the same model with its units renumbered, so that every sum adds its terms in another order.

A transformer computes the same function after a permutation of its channels, of the units of its MLP, of its heads, of
the value dimensions inside a head, of its tokens and of the rows of a batch, if the weights are permuted with them. In
exact arithmetic the permutation commutes with training too: AdamW works element by element, and clipping depends on the
norm alone. In floating point every matrix product, mean and softmax adds the same terms in another order. The result
then differs from the original by rounding alone, in every operation of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jax_baseline.parity.comparison import Arrays
from torch_baseline.config import GPTConfig
from torch_baseline.data import Tokens

Order = NDArray[np.int64]


@dataclass(frozen=True)
class Permutation:
    """One permutation of the model's units."""

    # Order of each axis of every parameter: new[i, j] = old[axes[0][i], axes[1][j]].
    axes: Mapping[str, tuple[Order, ...]]
    channels: Order  # order of the channels of the residual stream
    vocabulary: Order  # order of the tokens
    rows: Order  # order of the rows of a batch

    @classmethod
    def draw(cls, config: GPTConfig, batch_size: int, seed: int) -> Permutation:
        """Return a random permutation."""
        generator = np.random.Generator(np.random.PCG64(seed))
        channels, vocabulary = generator.permutation(config.n_embd), generator.permutation(config.vocab_size)
        axes: dict[str, tuple[Order, ...]] = {"embedding.weight": (vocabulary, channels)}
        for index in range(config.n_layer):
            heads, inner = generator.permutation(config.n_head), generator.permutation(config.mlp_size)
            # The rotary embedding gives each dimension of queries and keys its frequency. Those of values are free.
            inside = np.arange(config.head_size)
            queries = (heads[:, None] * config.head_size + inside).ravel()
            values = (heads[:, None] * config.head_size + generator.permutation(config.head_size)).ravel()
            width = config.n_embd
            prefix = f"blocks.{index}"
            axes |= {
                f"{prefix}.attention_norm.weight": (channels,),
                f"{prefix}.attention.qkv.weight": (
                    np.concatenate((queries, width + queries, 2 * width + values)),
                    channels,
                ),
                f"{prefix}.attention.out.weight": (channels, values),
                f"{prefix}.mlp_norm.weight": (channels,),
                f"{prefix}.mlp.bias": (inner,),
                f"{prefix}.mlp.up.weight": (inner, channels),
                f"{prefix}.mlp.down.weight": (channels, inner),
            }
        axes["norm.weight"] = (channels,)
        if not config.tie_embeddings:
            axes["head.weight"] = (vocabulary, channels)
        return cls(axes, channels, vocabulary, generator.permutation(batch_size))

    def weights(self, weights: Arrays) -> dict[str, NDArray]:
        """Return weights, or anything of their shapes, in the permuted order."""
        return {name: array[np.ix_(*self.axes[name])] for name, array in weights.items()}

    def batch(self, tokens_BT: Tokens) -> Tokens:
        """Return a batch in the permuted order."""
        return np.argsort(self.vocabulary)[tokens_BT[self.rows]]

    def original_weights(self, weights: Arrays) -> dict[str, NDArray]:
        """Return weights in the original order; the inverse of :meth:`weights`."""
        return {
            name: array[np.ix_(*(np.argsort(order) for order in self.axes[name]))] for name, array in weights.items()
        }

    def original_activations(self, activations: Arrays) -> dict[str, NDArray]:
        """Return arrays (batch, position, channel), and ``logits`` (batch, position, token), in the original order."""
        rows = np.argsort(self.rows)
        return {
            name: array[rows][..., np.argsort(self.vocabulary if name == "logits" else self.channels)]
            for name, array in activations.items()
        }

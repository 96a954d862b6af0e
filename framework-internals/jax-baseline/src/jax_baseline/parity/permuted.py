"""The same model in another basis: a torch run whose every sum is taken in another order.

A transformer computes the same function when its channels, its MLP's inner units, its heads, the dimensions of the
values inside a head, its tokens and the rows of a batch are renumbered, the weights with them. In exact arithmetic
training commutes with the renumbering as well (AdamW works element by element, clipping needs the norm alone). In
floating point every matrix product, mean and softmax then adds the same terms in another order: the result strays from
the original by rounding and by nothing else, in every operation of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_baseline.config import GPTConfig
from torch_baseline.data import Tokens

Order = NDArray[np.int64]
Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class Symmetry:
    """One renumbering.

    Attributes:
        axes: for every parameter, the order of each of its axes: new[i, j] = old[axes[0][i], axes[1][j]].
        channels: of the residual stream.
        vocabulary: of the tokens.
        rows: of a batch.
    """

    axes: Mapping[str, tuple[Order, ...]]
    channels: Order
    vocabulary: Order
    rows: Order

    @classmethod
    def draw(cls, config: GPTConfig, batch_size: int, seed: int) -> Symmetry:
        """Return a renumbering drawn at random.

        Args:
            config: shape of the model.
            batch_size: rows of a batch.
            seed: of NumPy's PCG64.
        """
        generator = np.random.Generator(np.random.PCG64(seed))
        channels, vocabulary = generator.permutation(config.n_embd), generator.permutation(config.vocab_size)
        axes: dict[str, tuple[Order, ...]] = {"embedding.weight": (vocabulary, channels)}
        for index in range(config.n_layer):
            heads, inner = generator.permutation(config.n_head), generator.permutation(config.mlp_size)
            # Rotary positions tie the dimensions of queries and keys to their frequencies; those of values are free.
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
        """Return weights (or anything of their shapes) in the new numbering."""
        return {name: array[np.ix_(*self.axes[name])] for name, array in weights.items()}

    def batch(self, tokens_BT: Tokens) -> Tokens:
        """Return a batch in the new numbering."""
        return np.argsort(self.vocabulary)[tokens_BT[self.rows]]

    def original_weights(self, weights: Arrays) -> dict[str, NDArray]:
        """Return weights in the old numbering; the inverse of :meth:`weights`."""
        return {
            name: array[np.ix_(*(np.argsort(order) for order in self.axes[name]))] for name, array in weights.items()
        }

    def original_activations(self, activations: Arrays) -> dict[str, NDArray]:
        """Return arrays (batch, position, channel), and ``logits`` (batch, position, token), in the old numbering."""
        rows = np.argsort(self.rows)
        return {
            name: array[rows][..., np.argsort(self.vocabulary if name == "logits" else self.channels)]
            for name, array in activations.items()
        }

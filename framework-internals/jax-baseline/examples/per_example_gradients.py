"""Loss and gradient norm of every sequence of a batch, and the gradient noise scale.

``python examples/per_example_gradients.py`` prints them for a batch of the ``tiny`` preset.
``jax.vmap`` over the loss of one sequence gives all of them at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_baseline.gpt.model import Params, TokensBT, loss
from jax_baseline.gpt.optim import global_norm
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import init_numpy

PerExample = Float[Array, " B"]


def gradient_norms(
    params: Params, tokens_BT: TokensBT, targets_BT: TokensBT, config: GPTConfig, **options: Any
) -> tuple[PerExample, PerExample]:
    """Return the loss of each sequence in nats, and the norm of its gradient, before the batch is averaged.

    Under ``jax.jit`` no array of size B × parameters is kept: XLA reduces each gradient where it is computed.
    ``options`` are those of :func:`jax_baseline.gpt.model.loss`.
    """

    def of_sequence(tokens_T: Array, targets_T: Array) -> tuple[Array, Array]:
        nats, gradient = jax.value_and_grad(loss)(params, tokens_T[None], targets_T[None], config, **options)
        return nats, global_norm(gradient)

    return jax.vmap(of_sequence)(tokens_BT, targets_BT)


def noise_scale(norms: PerExample, batch_norm: Float[Array, ""]) -> Float[Array, ""]:
    """Return the simple gradient noise scale tr(Σ) / |G|² (McCandlish et al. 2018, appendix A), in sequences.

    It is the batch size at which the noise of a step's gradient is as large as its signal. Both estimates are unbiased.

    Args:
        norms: Gradient norm of each sequence, from :func:`gradient_norms`; at least two.
        batch_norm: Norm of the batch's mean gradient.
    """
    size = norms.shape[0]
    one, all_ = jnp.mean(jnp.square(norms)), jnp.square(batch_norm)
    noise = (one - all_) / (1 - 1 / size)
    signal = (size * all_ - one) / (size - 1)
    return noise / signal


def main() -> None:
    """Print one line per sequence of a batch of the ``tiny`` preset, and the noise scale of the batch."""
    config = GPTConfig.preset("tiny")
    params = from_torch(init_numpy(config, 0), config)
    tokens_BT, targets_BT = (part.astype(np.int32) for part in batch(load_corpus().train, 0, 0, 4, config.block_size))
    each, norms = jax.jit(gradient_norms, static_argnums=3)(params, tokens_BT, targets_BT, config)
    for index, (nats, norm) in enumerate(zip(each, norms, strict=True)):
        print(f"sequence {index}: loss {nats:.3f} nats, gradient norm {norm:.3f}")
    mean_gradient = jax.jit(jax.grad(loss), static_argnums=3)(params, tokens_BT, targets_BT, config)
    print(f"noise scale {noise_scale(norms, global_norm(mean_gradient)):.2f} sequences")


if __name__ == "__main__":
    main()

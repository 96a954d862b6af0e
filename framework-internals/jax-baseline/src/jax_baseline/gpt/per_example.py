"""Every example's own loss and gradient norm, by vectorising the step over the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jax_baseline.gpt.model import Attention, Params, TokensBT, loss, xla_attention
from jax_baseline.gpt.optim import global_norm
from torch_baseline.config import GPTConfig

PerExample = Float[Array, " B"]


def losses(
    params: Params,
    tokens_BT: TokensBT,
    targets_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
) -> PerExample:
    """Return each sequence's mean cross-entropy, nats per token.

    Args:
        params: the weights.
        tokens_BT: the batch.
        targets_BT: the token that follows each position.
        config: the shape.
        dtype: to multiply matrices in.
        attention: see :func:`jax_baseline.gpt.model.forward`.
    """

    def one(tokens_T: Array, targets_T: Array) -> Array:
        return loss(params, tokens_T[None], targets_T[None], config, dtype=dtype, attention=attention)

    return jax.vmap(one)(tokens_BT, targets_BT)


def gradient_norms(
    params: Params,
    tokens_BT: TokensBT,
    targets_BT: TokensBT,
    config: GPTConfig,
    *,
    dtype: DTypeLike | None = None,
    attention: Attention = xla_attention,
) -> tuple[PerExample, PerExample]:
    """Return each sequence's loss and the norm of its own gradient, before any averaging.

    Nothing of size B × parameters is kept if this is compiled: each gradient is reduced where it is made.

    Args:
        params: the weights.
        tokens_BT: the batch.
        targets_BT: the token that follows each position.
        config: the shape.
        dtype: to multiply matrices in.
        attention: see :func:`jax_baseline.gpt.model.forward`.
    """

    def one(tokens_T: Array, targets_T: Array) -> tuple[Array, Array]:
        found, gradient = jax.value_and_grad(loss)(
            params, tokens_T[None], targets_T[None], config, dtype=dtype, attention=attention
        )
        return found, global_norm(gradient)

    return jax.vmap(one)(tokens_BT, targets_BT)


def noise_scale(norms: PerExample, batch_norm: Float[Array, ""]) -> Float[Array, ""]:
    """Return the simple gradient noise scale tr(Σ) / |G|² (McCandlish et al. 2018, appendix A), in sequences.

    The batch size at which a step's gradient is as much signal as noise, from unbiased estimates of both.

    Args:
        norms: of each sequence's gradient, from :func:`gradient_norms`; at least two.
        batch_norm: of the batch's mean gradient.
    """
    size = norms.shape[0]
    one, all_ = jnp.mean(jnp.square(norms)), jnp.square(batch_norm)
    noise = (one - all_) / (1 - 1 / size)
    signal = (size * all_ - one) / (size - 1)
    return noise / signal

"""AdamW, gradient clipping and the learning rate schedule with torch's exact formulas.

The schedule is a table of ``torch_baseline``'s own learning rates, so both frameworks use the same floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from benchkit import UserError
from jax_baseline.gpt.model import Block, Params
from torch_baseline.config import TrainConfig
from torch_baseline.optim import learning_rate

# torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides. optax.clip_by_global_norm adds nothing, so its
# clipped gradients are larger by about one part in a million.
_TORCH_CLIP_EPS = 1e-6


def decayed(params: Params) -> Params:
    """Return a mask of the parameters with weight decay: True for every matrix, False for every gain and bias.

    The mask goes by name, not by the number of axes, because the arrays of stacked blocks have one axis more.
    """
    block = Block(attention_norm=False, qkv=True, out=True, mlp_norm=False, up=True, bias=False, down=True)
    return Params(
        embedding=True,
        blocks=block if isinstance(params.blocks, Block) else (block,) * len(params.blocks),
        norm=False,
        head=None if params.head is None else True,
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return gradient clipping followed by AdamW (Loshchilov and Hutter 2019). Only matrices have weight decay.

    Args:
        config: Learning rate and its schedule over ``steps``, betas, epsilon, weight decay and clip. Updates after the
            last step use the learning rate of the last step.
    """
    adamw = make_adamw(config)
    return optax.chain(clip_like_torch(config.clip), adamw) if config.clip else adamw


def make_adamw(
    config: TrainConfig,
    *,
    schedule: optax.Schedule | None = None,
    adam: optax.GradientTransformation | None = None,
    weight_decay: float | None = None,
    mask: Callable[[Params], Params] | None = decayed,
) -> optax.GradientTransformation:
    """Return AdamW without clipping: ``optax.adamw`` with the bias correction of :func:`scale_by_adam`.

    The default of each setting is the configuration's. ``schedule`` is a function from the number of earlier steps to
    the learning rate, and ``adam`` takes the place of :func:`scale_by_adam`. Without a ``mask`` every parameter has
    weight decay.
    """
    table = np.array([learning_rate(step, config) for step in range(config.steps)])
    return optax.chain(
        adam or scale_by_adam(config.beta1, config.beta2, config.adam_eps),
        optax.add_decayed_weights(config.weight_decay if weight_decay is None else weight_decay, mask),
        optax.scale_by_learning_rate(schedule or (lambda count: jnp.asarray(table)[count])),
    )


def scale_by_adam(b1: float, b2: float, eps: float, eps_root: float = 0.0) -> optax.GradientTransformation:
    """Return ``optax.scale_by_adam`` with bias corrections 1 − βᵗ that are as accurate as torch's.

    optax subtracts in float32, which leaves four digits of 1 − 0.999. Its first updates are off by up to 2e-5, in the
    same direction for every parameter. −expm1(t · log β) has no such cancellation.
    """
    logarithms = [math.log(beta) if beta else -math.inf for beta in (b1, b2)]

    def update(
        updates: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        del params
        mu = optax.tree_utils.tree_update_moment(updates, state.mu, b1, 1)
        nu = optax.tree_utils.tree_update_moment(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        first, second = (-jnp.expm1(count * logarithm) for logarithm in logarithms)

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / first.astype(m.dtype) / (jnp.sqrt(v / second.astype(v.dtype) + eps_root) + eps)

        return jax.tree.map(scaled, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2).init, update)


def clip_like_torch(max_norm: float) -> optax.GradientTransformation:
    """Return a transformation g → min(1, max_norm / (‖g‖ + 1e-6)) · g, as ``torch.nn.utils.clip_grad_norm_``."""

    def clip(updates: optax.Updates, state: optax.EmptyState, params: optax.Params = None) -> tuple:
        del params
        scale = jnp.minimum(max_norm / (global_norm(updates) + _TORCH_CLIP_EPS), 1.0)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), clip)


def global_norm(tree: optax.Updates) -> jax.Array:
    """Return √Σ g² over all leaves, in their dtype."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def compute_dtype(config: TrainConfig) -> DTypeLike:
    """Return the compute dtype of the matrix products.

    Raises:
        UserError: For float16, which needs a gradient scaler that this loop does not have.
    """
    if config.dtype == "float16":
        raise UserError("this loop has no gradient scaler for dtype='float16'; use bfloat16 (or float32, float64)")
    return jnp.dtype(config.dtype)


def master_dtype(config: TrainConfig) -> DTypeLike:
    """Return the dtype of the weights and of the optimizer state: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if config.dtype == "float64" else jnp.float32)

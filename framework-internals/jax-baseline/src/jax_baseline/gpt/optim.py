"""AdamW, clipping and the learning rate, to the letter of torch's.

The schedule is ``torch_baseline``'s own, tabulated: Python floats, the same on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jax_baseline.gpt.model import Block, Params
from torch_baseline.config import TrainConfig
from torch_baseline.optim import learning_rate

# What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides; optax.clip_by_global_norm adds nothing and so
# scales a clipped gradient by about one part in a million more.
_TORCH_CLIP_EPS = 1e-6


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return clipping followed by AdamW (Loshchilov and Hutter 2019) that decays matrices alone.

    Args:
        config: learning rate and its schedule over ``steps``, betas, epsilon, weight decay and clip. An update after
            the last step would go on at the last step's rate.
    """
    adamw = make_adamw(config)
    return optax.chain(clip_like_torch(config.clip), adamw) if config.clip else adamw


def make_adamw(config: TrainConfig, **changed: Any) -> optax.GradientTransformation:
    """Return AdamW alone: ``optax.adamw`` but for its bias correction, see :func:`scale_by_adam`.

    Args:
        config: as for :func:`make_optimizer`.
        changed: arguments of ``optax.adamw`` to replace what the configuration says.
    """
    table = np.array([learning_rate(step, config) for step in range(config.steps)])
    arguments = {
        "learning_rate": lambda count: jnp.asarray(table)[count],
        "b1": config.beta1,
        "b2": config.beta2,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "mask": decayed,
    }
    return _adamw(**{**arguments, **changed})


def _adamw(
    *,
    learning_rate: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    weight_decay: float,
    mask: Callable[[Params], Params],
) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(b1: float, b2: float, eps: float, eps_root: float) -> optax.GradientTransformation:
    """Return ``optax.scale_by_adam``, with the bias corrections 1 − βᵗ exact to the last place, as torch has them.

    optax subtracts in float32, where of 1 − 0.999 four digits remain: the first updates are then off by up to 2e-5, at
    every parameter the same way. −expm1(t · log β) subtracts nothing.

    Args:
        b1: decay of the gradient average.
        b2: decay of the squared-gradient average.
        eps: added to the root.
        eps_root: added inside it.
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


def decayed(params: Params) -> Params:
    """Return True in the place of every matrix and False in that of every gain and bias.

    By name, not by the number of axes: those of stacked blocks have one more.
    """

    def of_block(block: Block) -> Block:
        return Block(attention_norm=False, qkv=True, out=True, mlp_norm=False, up=True, bias=False, down=True)

    blocks = params.blocks
    return Params(
        embedding=True,
        blocks=of_block(blocks) if isinstance(blocks, Block) else tuple(of_block(block) for block in blocks),
        norm=False,
        head=None if params.head is None else True,
    )


def clip_like_torch(max_norm: float) -> optax.GradientTransformation:
    """Return min(1, max_norm / (‖g‖ + 1e-6)) · g, ‖g‖ over all gradients, as ``torch.nn.utils.clip_grad_norm_`` has it.

    Args:
        max_norm: the norm that is let through; positive.
    """

    def clip(updates: optax.Updates, state: optax.EmptyState, params: optax.Params = None) -> tuple:
        del params
        scale = jnp.minimum(max_norm / (global_norm(updates) + _TORCH_CLIP_EPS), 1.0)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), clip)


def global_norm(tree: optax.Updates) -> jax.Array:
    """Return √Σ g² over all leaves, in their dtype: one number that a step reports and clips by."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def compute_dtype(config: TrainConfig) -> DTypeLike:
    """Return the dtype to multiply matrices in.

    Raises:
        ValueError: for float16, which needs a gradient scaler that this loop does not have.
    """
    if config.dtype == "float16":
        raise ValueError("this loop has no gradient scaler for dtype='float16'; use bfloat16 (or float32, float64)")
    return jnp.dtype(config.dtype)


def master_dtype(config: TrainConfig) -> DTypeLike:
    """Return the dtype of the weights and of the optimizer's state: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if config.dtype == "float64" else jnp.float32)

"""One or several optimizer steps as one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jax_baseline.gpt.model import PARTS, Params, Parts, Scalar, TokensBT, loss, stack_blocks
from jax_baseline.gpt.optim import compute_dtype, global_norm, make_optimizer, master_dtype
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import init_numpy


class TrainState(NamedTuple):
    """Everything that the next step depends on, besides its batch.

    Attributes:
        step: Number of optimizer steps taken.
        params: Weights, in the master dtype.
        optimizer: State of the optax optimizer.
        ema: Moving average of the weights; None if ``ema_decay`` is 0.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: optax.OptState
    ema: Params | None = None


class Metrics(NamedTuple):
    """Metrics of one step, all for the weights before the update.

    Attributes:
        loss: Mean cross-entropy in nats per token.
        gradient_norm: Norm of all gradients before clipping.
        gradients: Gradients before clipping, if they were requested.
    """

    loss: Scalar
    gradient_norm: Scalar
    gradients: Params | None = None


Step = Callable[[TrainState, TokensBT, TokensBT], tuple[TrainState, Metrics]]


def initial_state(
    model: GPTConfig, config: TrainConfig, params: Params | None = None, *, scan: bool = False
) -> TrainState:
    """Return the state before the first step.

    Args:
        model: Shape of the model.
        config: Precision, seed and optimizer.
        params: Initial weights, in the master dtype. The default is the weights that ``torch_baseline`` draws from the
            same seed.
        scan: Stack the blocks, so that the step scans over layers.
    """
    if params is None:
        params = from_torch(init_numpy(model, config.seed), model, master_dtype(config))
    if scan:
        params = stack_blocks(params)
    ema = jax.tree.map(jnp.copy, params) if config.ema_decay else None
    return TrainState(jnp.zeros((), jnp.int32), params, make_optimizer(config).init(params), ema)


def make_gradient(
    model: GPTConfig,
    config: TrainConfig,
    *,
    parts: Parts = PARTS,
    remat: bool = False,
) -> Callable[[Params, TokensBT, TokensBT], tuple[Scalar, Params]]:
    """Return the function (parameters, tokens, targets) → (loss, gradients), not yet compiled.

    With ``config.accumulation`` above 1, a loop runs over that many micro-batches and averages their losses and
    gradients. It needs the activation memory of one micro-batch. As in torch, the loss of each micro-batch is divided
    before its backward pass: dividing the gradients afterwards would round differently below float32.

    Args:
        model: Shape of the model.
        config: Precision and accumulation.
        parts: As in :func:`jax_baseline.gpt.model.forward`.
        remat: As in :func:`jax_baseline.gpt.model.forward`.

    Raises:
        UserError: For a dtype that this loop does not support.
    """
    dtype, micro = compute_dtype(config), config.accumulation
    value_and_grad = jax.value_and_grad(
        lambda params, tokens_BT, targets_BT: (
            loss(params, tokens_BT, targets_BT, model, dtype=dtype, parts=parts, remat=remat) / micro
        )
    )

    def gradient(params: Params, tokens_BT: TokensBT, targets_BT: TokensBT) -> tuple[Scalar, Params]:
        # On a GPU, JAX multiplies float32 matrices in TF32 by default; torch does not. Lower dtypes are not affected.
        with jax.default_matmul_precision("highest"):
            if micro == 1:
                return value_and_grad(params, tokens_BT, targets_BT)

            def add(
                total: tuple[Scalar, Params], part: tuple[TokensBT, TokensBT]
            ) -> tuple[tuple[Scalar, Params], None]:
                return jax.tree.map(jnp.add, total, value_and_grad(params, *part)), None

            batches = tuple(array.reshape(micro, -1, array.shape[1]) for array in (tokens_BT, targets_BT))
            zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), master_dtype(config)), params))
            return jax.lax.scan(add, zero, batches)[0]

    return gradient


def make_train_step(
    model: GPTConfig,
    config: TrainConfig,
    *,
    parts: Parts = PARTS,
    remat: bool = False,
    donate: bool = True,
    keep_gradients: bool = False,
    steps_per_dispatch: int = 1,
    shardings: TrainState | None = None,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Step:
    """Return one whole optimizer step: forward, backward, clipping, AdamW, weight average. It compiles on first call.

    A step whose loss or gradient norm is not finite leaves the state unchanged.

    Args:
        model: Shape of the model.
        config: Precision, accumulation and optimizer.
        parts: As in :func:`jax_baseline.gpt.model.forward`.
        remat: As in :func:`jax_baseline.gpt.model.forward`.
        donate: Reuse the memory of the state that is passed in. The caller must not use that state again.
        keep_gradients: Return the gradients in the metrics.
        steps_per_dispatch: Number of steps that one call takes before it returns to Python. Above 1, the function takes
            that many batches stacked along a new first axis, and every metric has that axis. After a step that is not
            finite, the remaining steps leave the state unchanged as well.
        shardings: Sharding of the state, see :mod:`jax_baseline.gpt.sharding`; the new state has the same sharding.
        compiler_options: XLA options by name, as ``jax.jit`` takes them.

    Returns:
        Function (state, tokens_BT, targets_BT) → (state, metrics).

    Raises:
        UserError: For a dtype that this loop does not support.
    """
    gradient = make_gradient(model, config, parts=parts, remat=remat)
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, tokens_BT: TokensBT, targets_BT: TokensBT) -> tuple[TrainState, Metrics]:
        loss_, gradients = gradient(state.params, tokens_BT, targets_BT)
        with jax.named_scope("optimizer"):
            norm = global_norm(gradients)
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        kept = config.ema_decay
        ema = jax.tree.map(lambda old, new: old * kept + new * (1 - kept), state.ema, params) if state.ema else None
        metrics = Metrics(loss_, norm, gradients if keep_gradients else None)
        # The unchanged state has the weights that caused the loss, which the error message of the loop examines.
        finite = jnp.isfinite(loss_) & jnp.isfinite(norm)
        after = TrainState(state.step + 1, params, optimizer_state, ema)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state), metrics

    def train_steps(state: TrainState, tokens_KBT: Array, targets_KBT: Array) -> tuple[TrainState, Metrics]:
        def step_if_finite(
            carry: tuple[TrainState, Array], batch: tuple[Array, Array]
        ) -> tuple[tuple[TrainState, Array], Metrics]:
            before, finite = carry
            after, metrics = train_step(before, *batch)
            finite &= jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.gradient_norm)
            return (jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before), finite), metrics

        (state, _), metrics = jax.lax.scan(step_if_finite, (state, jnp.array(True)), (tokens_KBT, targets_KBT))
        return state, metrics

    return jax.jit(
        train_step if steps_per_dispatch == 1 else train_steps,
        donate_argnums=(0,) if donate else (),
        out_shardings=None if shardings is None else (shardings, None),
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )

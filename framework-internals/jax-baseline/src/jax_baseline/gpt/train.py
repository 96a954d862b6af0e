"""One optimizer step as one compiled function, or several of them as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import torch
from jaxtyping import Array, Int

from benchkit import UserError
from benchkit.device import Device
from jax_baseline.gpt.model import PARTS, Attention, Params, Parts, Scalar, TokensBT, loss, stack_blocks, xla_attention
from jax_baseline.gpt.optim import compute_dtype, global_norm, make_optimizer, master_dtype
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import init_numpy


class TrainState(NamedTuple):
    """All that the next step depends on, besides its batch.

    Attributes:
        step: optimizer steps done.
        params: the weights, in the master dtype.
        optimizer: optax's.
        ema: moving average of the weights; None where ``ema_decay`` is 0.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: optax.OptState
    ema: Params | None = None


class Metrics(NamedTuple):
    """What a step tells of the weights it started from: the loss in nats per token, and gradients before clipping."""

    loss: Scalar
    gradient_norm: Scalar
    gradients: Params | None = None


Step = Callable[[TrainState, TokensBT, TokensBT], tuple[TrainState, Metrics]]


def initial_state(
    model: GPTConfig, config: TrainConfig, params: Params | None = None, *, scan: bool = False
) -> TrainState:
    """Return the state before the first step.

    Args:
        model: the shape.
        config: precision, seed and optimizer.
        params: to start from, in the master dtype; by default the weights ``torch_baseline`` draws from the same seed.
        scan: stack the blocks, so that the step scans over layers.
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
    attention: Attention = xla_attention,
    parts: Parts = PARTS,
    remat: bool = False,
) -> Callable[[Params, TokensBT, TokensBT], tuple[Scalar, Params]]:
    """Return the function (parameters, tokens, targets) → (loss, gradients), not yet compiled.

    With ``config.accumulation`` over 1 the batch is taken in that many parts, one after another in a loop, and their
    losses and gradients are averaged: the memory of one part's activations, the mathematics of the whole batch. As in
    torch each part's loss is divided before its backward, which below float32 rounds otherwise than divided gradients.

    Args:
        model: the shape.
        config: precision and accumulation.
        attention: see :func:`jax_baseline.gpt.model.forward`.
        parts: likewise.
        remat: likewise.

    Raises:
        ValueError: for a dtype this loop does not have.
    """
    dtype, micro = compute_dtype(config), config.accumulation
    value_and_grad = jax.value_and_grad(
        lambda params, tokens_BT, targets_BT: (
            loss(params, tokens_BT, targets_BT, model, dtype=dtype, attention=attention, parts=parts, remat=remat)
            / micro
        )
    )

    def gradient(params: Params, tokens_BT: TokensBT, targets_BT: TokensBT) -> tuple[Scalar, Params]:
        # float32 products in float32: JAX's default on a GPU is TF32, torch's is not. Lower dtypes are not affected.
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
    attention: Attention = xla_attention,
    parts: Parts = PARTS,
    remat: bool = False,
    donate: bool = True,
    keep_gradients: bool = False,
    steps_per_dispatch: int = 1,
    shardings: TrainState | None = None,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Step:
    """Return one whole optimizer step, compiled when it is first called: forward, backward, clip, AdamW, average.

    Args:
        model: the shape.
        config: precision, accumulation and optimizer.
        attention: see :func:`jax_baseline.gpt.model.forward`.
        parts: likewise.
        remat: likewise.
        donate: overwrite the state that is passed in, which saves the memory of a second one; the caller must then not
            use it again.
        keep_gradients: hand out the gradients in the metrics, for whoever wants to look at them.
        steps_per_dispatch: over 1, the compiled function takes so many batches, stacked along a new first axis, and
            does as many steps before it returns to Python; every metric then has that axis as well. After a step
            that is not finite the others leave the state as it is, too.
        shardings: how the state lies on a mesh, see :mod:`jax_baseline.gpt.sharding`; the new one is laid the same way.
        compiler_options: XLA's, by name, as ``jax.jit`` takes them.

    Returns:
        (state, tokens_BT, targets_BT) → (state, metrics).

    Raises:
        ValueError: for a dtype this loop does not have.
    """
    gradient = make_gradient(model, config, attention=attention, parts=parts, remat=remat)
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, tokens_BT: TokensBT, targets_BT: TokensBT) -> tuple[TrainState, Metrics]:
        loss_, gradients = gradient(state.params, tokens_BT, targets_BT)
        with jax.named_scope("optimizer"):
            norm = global_norm(gradients)
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
        ema = None if state.ema is None else update_average(state.ema, params, config.ema_decay)
        metrics = Metrics(loss_, norm, gradients if keep_gradients else None)
        # A step that is not finite changes nothing, so that whoever looks finds the weights that led to it.
        finite = jnp.isfinite(loss_) & jnp.isfinite(norm)
        after = TrainState(state.step + 1, params, optimizer_state, ema)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state), metrics

    def train_steps(state: TrainState, tokens_KBT: Array, targets_KBT: Array) -> tuple[TrainState, Metrics]:
        def go_on(
            carry: tuple[TrainState, Array], batch: tuple[Array, Array]
        ) -> tuple[tuple[TrainState, Array], Metrics]:
            before, going = carry
            after, metrics = train_step(before, *batch)
            going &= jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.gradient_norm)
            return (jax.tree.map(lambda new, old: jnp.where(going, new, old), after, before), going), metrics

        (state, _), metrics = jax.lax.scan(go_on, (state, jnp.array(True)), (tokens_KBT, targets_KBT))
        return state, metrics

    return jax.jit(
        train_step if steps_per_dispatch == 1 else train_steps,
        donate_argnums=(0,) if donate else (),
        out_shardings=None if shardings is None else (shardings, None),
        compiler_options=None if compiler_options is None else dict(compiler_options),
    )


def update_average(average: Params, params: Params, decay: float) -> Params:
    """Return decay · average + (1 − decay) · params."""
    return jax.tree.map(lambda old, new: old * decay + new * (1 - decay), average, params)


def require_jax_device(device: Device) -> None:
    """Check that JAX can use the device, the first of its kind; torch's GPU is that one afterwards.

    Raises:
        UserError: if not.
    """
    try:
        jax.devices(device)
    except RuntimeError as error:
        raise UserError(
            f"JAX sees no device {device!r} (it has {jax.default_backend()}); for a GPU install jax[cuda13], or use "
            "--device cpu"
        ) from error
    if device == "cuda":
        # Made ready one after another, several GPUs leave the last one current, to which torch's "cuda" would then go.
        torch.cuda.set_device(0)

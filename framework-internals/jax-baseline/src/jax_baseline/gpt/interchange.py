"""Training states in the checkpoint format of torch_baseline, so that one framework can resume a run of the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from jax_baseline.gpt.model import Params, stack_blocks
from jax_baseline.gpt.optim import make_optimizer, master_dtype
from jax_baseline.gpt.sharding import gathered
from jax_baseline.gpt.train import TrainState
from jax_baseline.gpt.transfer import MOMENTS, from_torch, to_torch
from torch_baseline import checkpoint as checkpoints
from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import GPTConfig, TrainConfig


def open_torch_run(path: Path) -> tuple[GPTConfig, TrainConfig, TrainState]:
    """Read a training state: weights, both moments, weight average and step.

    Args:
        path: ``last.pt`` or ``best.pt`` in the folder of a run.

    Returns:
        The shape of the model, the settings, and the state in the master dtype of the settings.

    Raises:
        UserError: If the file does not exist or is damaged.
        ValueError: For a float64 run without ``jax_enable_x64``.
    """
    saved = checkpoints.load(path)
    return GPTConfig(**saved.model_config), TrainConfig.from_plain(saved.train_config), state_of(saved)


def state_of(saved: Checkpoint, *, scan: bool = False) -> TrainState:
    """Return the training state of a checkpoint, with the blocks stacked if the step is to scan over them.

    Raises:
        ValueError: For a float64 run without ``jax_enable_x64``.
    """
    model, config = GPTConfig(**saved.model_config), TrainConfig.from_plain(saved.train_config)

    def converted(tensors: Mapping[str, torch.Tensor]) -> Params:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        params = from_torch(arrays, model, master_dtype(config))
        return stack_blocks(params) if scan else params

    params = converted(saved.model)
    moments = {
        ours: converted({name: state[theirs] for name, state in saved.optimizer.items()})
        for theirs, ours in MOMENTS.items()
    }
    step = jnp.asarray(saved.step, jnp.int32)
    optimizer = optax.tree_utils.tree_set(make_optimizer(config).init(params), **moments, count=step)
    # optax keeps the count in several leaves. A step that donates its state needs a separate buffer for each.
    return TrainState(step, params, jax.tree.map(jnp.copy, optimizer), converted(saved.ema) if saved.ema else None)


def checkpoint_of(
    state: TrainState,
    model: GPTConfig,
    config: TrainConfig,
    *,
    data_sha256: str,
    best_loss: float,
    stale: int,
    generators: Mapping[str, Any],
) -> Checkpoint:
    """Return a state as a checkpoint that either framework can resume from. All processes must call it.

    ``generators`` has the states of torch's random generators; empty for those of a run that begins.
    """
    state = gathered(state)

    def tensors(params: Params) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in to_torch(params, model).items()}

    moments = {theirs: tensors(optax.tree_utils.tree_get(state.optimizer, ours)) for theirs, ours in MOMENTS.items()}
    step, weights = int(state.step), tensors(state.params)
    return Checkpoint(
        step=step,
        model=weights,
        optimizer={
            name: {"step": torch.tensor(float(step)), **{key: arrays[name] for key, arrays in moments.items()}}
            for name in weights
        },
        ema={} if state.ema is None else tensors(state.ema),
        scaler={},
        rng=dict(generators) or {"cpu": torch.Generator().manual_seed(config.seed).get_state(), "cuda": []},
        best_loss=best_loss,
        stale=stale,
        model_config=asdict(model),
        train_config=config.as_plain(),
        data_sha256=data_sha256,
    )

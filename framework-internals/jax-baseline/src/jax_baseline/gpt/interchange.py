"""Training states in the checkpoint format of torch_baseline, so that one framework can resume a run of the other."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from jax_baseline.gpt.optim import make_optimizer, master_dtype
from jax_baseline.gpt.train import TrainState
from jax_baseline.gpt.transfer import from_torch, to_torch
from torch_baseline import checkpoint as checkpoints
from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import GPTConfig, TrainConfig


def open_torch_run(path: Path) -> tuple[GPTConfig, TrainConfig, TrainState]:
    """Read a training state that ``torch_baseline`` saved: weights, both moments, weight average and step.

    Args:
        path: ``last.pt`` or ``best.pt`` in the folder of a run.

    Returns:
        The shape of the model, the settings, and the state in the master dtype of the settings.

    Raises:
        UserError: If the file does not exist or is damaged.
        ValueError: For a float64 run without ``jax_enable_x64``.
    """
    saved = checkpoints.load(path)
    model, config = GPTConfig(**saved.model_config), train_config(saved.train_config)
    dtype = master_dtype(config)
    params = from_torch(_arrays(saved.model), model, dtype)
    moments = {
        ours: from_torch(_arrays({name: state[theirs] for name, state in saved.optimizer.items()}), model, dtype)
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))
    }
    step = jnp.asarray(saved.step, jnp.int32)
    optimizer = optax.tree_utils.tree_set(make_optimizer(config).init(params), **moments, count=step)
    ema = from_torch(_arrays(saved.ema), model, dtype) if saved.ema else None
    # optax keeps the count in several leaves. A step that donates its state needs a separate buffer for each.
    return model, config, TrainState(step, params, jax.tree.map(jnp.copy, optimizer), ema)


def save_torch_run(
    path: Path,
    state: TrainState,
    model: GPTConfig,
    config: TrainConfig,
    *,
    data_sha256: str,
    best_loss: float = math.inf,
    stale: int = 0,
) -> None:
    """Write a state as a checkpoint that ``torch_baseline`` can resume from.

    Args:
        path: File to write. ``--resume --out FOLDER`` resumes from ``last.pt`` in that folder.
        state: Training state on one device, or replicated on all.
        model: Shape of the model.
        config: Settings of the run.
        data_sha256: Hash of the corpus.
        best_loss: Lowest validation loss so far, in nats per byte.
        stale: Number of validations since the lowest loss.

    Raises:
        UserError: If the file cannot be written.
    """
    step = int(state.step)
    moments = {
        theirs: _tensors(to_torch(optax.tree_utils.tree_get(state.optimizer, ours), model))
        for ours, theirs in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))
    }
    weights = _tensors(to_torch(state.params, model))
    checkpoints.save(
        path,
        Checkpoint(
            step=step,
            model=weights,
            optimizer={
                name: {"step": torch.tensor(float(step)), **{key: arrays[name] for key, arrays in moments.items()}}
                for name in weights
            },
            ema={} if state.ema is None else _tensors(to_torch(state.ema, model)),
            scaler={},
            rng={"cpu": torch.Generator().manual_seed(config.seed).get_state(), "cuda": []},
            best_loss=best_loss,
            stale=stale,
            model_config=asdict(model),
            train_config=config.as_plain(),
            data_sha256=data_sha256,
        ),
    )


def train_config(plain: dict[str, Any]) -> TrainConfig:
    """Return the settings from the plain values that a checkpoint stores."""
    paths = {name: None if plain[name] is None else Path(plain[name]) for name in ("data", "out")}
    return TrainConfig(**{**plain, **paths})


def _arrays(tensors: dict[str, Any]) -> dict[str, NDArray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _tensors(arrays: dict[str, NDArray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

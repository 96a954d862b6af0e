"""Everything that changes as a model learns, and how it becomes a checkpoint and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import TrainConfig
from torch_baseline.model import GPT
from torch_baseline.optim import EMA

# Whole tensors on the CPU, however the model is spread: a checkpoint can be resumed on another number of processes.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Learner:
    """The state of a run.

    Attributes:
        model: not wrapped (its parameters may be sharded).
        optimizer: of its parameters.
        scaler: of float16 gradients.
        ema: average of the weights, or None.
        step: optimizer steps done.
        best_loss: lowest validation loss so far, nats per byte.
        stale: validations since then.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    step: int = 0
    best_loss: float = math.inf
    stale: int = 0

    def note_validation(self, loss: float) -> bool:
        """Take in a validation loss; return whether it is the lowest so far."""
        best = loss < self.best_loss
        self.best_loss = min(loss, self.best_loss)
        self.stale = 0 if best else self.stale + 1
        return best

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the state, whole and on the CPU; all processes must call it."""
        return Checkpoint(
            step=self.step,
            model=get_model_state_dict(self.model, options=_WHOLE),
            optimizer=get_optimizer_state_dict(self.model, self.optimizer, options=_WHOLE),
            ema={} if self.ema is None else self.ema.state_dict(),
            scaler=self.scaler.state_dict(),
            rng=_rng_state(),
            best_loss=self.best_loss,
            stale=self.stale,
            model_config=asdict(self.model.config),
            train_config=config.as_plain(),
            data_sha256=data_sha256,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state, sharded as the model is."""
        set_model_state_dict(self.model, checkpoint.model, options=_WHOLE)
        set_optimizer_state_dict(self.model, self.optimizer, checkpoint.optimizer, options=_WHOLE)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint.ema)
        if checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)
        self.step, self.best_loss, self.stale = checkpoint.step, checkpoint.best_loss, checkpoint.stale
        # Last: restoring an optimizer may draw random numbers.
        _restore_rng(checkpoint.rng)


def _rng_state() -> dict[str, Any]:
    """States of torch's generators on the CPU and on every GPU."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _restore_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, index)

"""The state of a training run, saved to and restored from checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import TrainConfig
from torch_baseline.model import GPT
from torch_baseline.optim import EMA
from torch_baseline.parallel import spread_like, whole
from torch_baseline.records import Validated


@dataclass
class Learner(Validated):
    """The state of a run.

    Attributes:
        model: The model without DDP's wrapper; its parameters may be sharded.
        optimizer: The optimizer of its parameters.
        scaler: The scaler of float16 gradients.
        ema: The moving average of the weights, or None.
        step: Number of finished optimizer steps.
        best_loss: Lowest validation loss so far, nats per byte.
        stale: Number of validations since the lowest one.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    step: int = 0
    best_loss: float = math.inf
    stale: int = 0

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the unsharded state on the CPU, from which any number of processes can resume.

        All processes must call it.
        """
        return Checkpoint(
            step=self.step,
            model={name: _on_cpu(parameter.detach()) for name, parameter in self._named()},
            optimizer={
                name: {key: _on_cpu(value) for key, value in self.optimizer.state[parameter].items()}
                for name, parameter in self._named()
            },
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
        """Take over a checkpoint's state, sharded in the same way as the model."""
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(spread_like(checkpoint.model[name], parameter))
        self._restore_optimizer(checkpoint.optimizer)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint.ema)
        if checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)
        self.step, self.best_loss, self.stale = checkpoint.step, checkpoint.best_loss, checkpoint.stale
        _restore_rng(checkpoint.rng)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def _restore_optimizer(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        # load_state_dict puts the step counters where a fused or a plain AdamW expects them. It identifies parameters
        # by their position in the groups, a checkpoint by their names.
        names = {parameter: name for name, parameter in self._named()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {
                key: spread_like(value, parameter) if value.ndim else value
                for key, value in saved[names[parameter]].items()
            }
            for index, parameter in enumerate(ordered)
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def _on_cpu(value: Tensor) -> Tensor:
    return whole(value).to("cpu", copy=True)


def _rng_state() -> dict[str, Any]:
    """States of torch's generators on the CPU and on every GPU."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _restore_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, index)

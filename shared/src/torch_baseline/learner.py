"""Everything that changes as a model learns, and how it becomes a checkpoint and back."""

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

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the state, whole and on the CPU, for any number of processes to go on from; all must call it."""
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
        """Take over a checkpoint's state, sharded as the model is."""
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
        # Through load_state_dict, which knows where a fused or a plain AdamW wants its step counters; it goes by the
        # place of a parameter in the groups, a checkpoint by its name.
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

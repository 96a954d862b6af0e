"""The time of a whole training step of the repository's GPT with each norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch

from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.errors import why_missing, without_frames
from benchkit.processes import budget
from benchkit.run import Run
from rmsnorm_fused.bench.candidates import Candidate
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import GPT, NormFactory
from torch_baseline.optim import make_optimizer
from torch_baseline.train import make_train_step

Mode = Literal["eager", "compiled"]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BASELINE = "nn.RMSNorm"


def measure_training(run: Run, mode: Mode, candidates: Mapping[str, Candidate]) -> None:
    """Time the step with each norm, in interleaved rounds in one process: records ``training``.

    All models start from the same weights and see the same batch. The loss of the first step is recorded; it reveals a
    norm that computes something else.
    """
    norms: dict[str, NormFactory] = {BASELINE: lambda width, eps: torch.nn.RMSNorm(width, eps)}
    norms |= {name: candidate.norm for name, candidate in candidates.items() if candidate.norm is not None}
    asked = run.configuration["training"]
    shape, config = GPTConfig.preset(asked["preset"]), TrainConfig.preset(asked["preset"])
    if asked["batch_size"] is not None:
        config = replace(config, batch_size=asked["batch_size"])
    tokens = batch(load_corpus().train, config.seed, 0, config.batch_size, shape.block_size)
    x_BT, y_BT = (torch.from_numpy(part).to(run.device) for part in tokens)
    torch.compiler.reset()
    steps: dict[str, Step] = {}
    losses: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, norm in norms.items():
        try:
            steps[name], losses[name] = _first_step(_make_step(shape, config, norm, mode, run.device), x_BT, y_BT)
        except budget.OutOfTime:
            raise
        except Exception as error:
            failed[name] = without_frames(error)
    timings = compare(
        steps, device=run.device, inputs=[(x_BT, y_BT)], clock="wall-clock", seconds=asked["seconds"], failed=failed
    )
    for name, cause in failed.items():
        run.absent(f"The {mode} training step with {name}", why_missing(cause))
    for name in timings.timings:
        time = timings[name].quantity()
        values = {
            "time": time,
            "rate": time.per(config.batch_size * shape.block_size, "tokens/s"),
            "loss": Quantity(losses[name], "nats"),
        }
        if name != BASELINE and BASELINE in timings.timings:
            values["speedup"] = timings.speedup(name, over=BASELINE)
        run.add(Record("training", {"mode": mode, "norm": name}, values))


def _first_step(step: Step, x_BT: torch.Tensor, y_BT: torch.Tensor) -> tuple[Step, float]:
    """A step and its first loss; if it fails, nothing holds its model any more."""
    return step, step(x_BT, y_BT).item()


def _make_step(shape: GPTConfig, config: TrainConfig, norm: NormFactory, mode: Mode, device: Device) -> Step:
    model = GPT(shape, seed=config.seed, norm=norm).to(device)
    if mode == "compiled":
        model.compile()
    return make_train_step(model, make_optimizer(model, config), config)

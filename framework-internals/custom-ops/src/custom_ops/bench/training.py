"""The time of a training step of the repository's GPT with this package's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import custom_ops
from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.results import Absence
from custom_ops.bench.loss import absences, first_losses
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import GPT
from torch_baseline.optim import make_optimizer
from torch_baseline.train import make_train_step

BASELINE = "torch"

Step = Callable[[Tensor, Tensor], Tensor]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return custom_ops.flash_attention(q, k, v, True)[0]


# What each variant replaces in the model.
PARTS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "bias_gelu": {"activation": custom_ops.bias_gelu},
    "flash_attention": {"attention": _attention},
    "linear_cross_entropy": {"loss": custom_ops.linear_cross_entropy},
    "all": {"activation": custom_ops.bias_gelu, "attention": _attention, "loss": custom_ops.linear_cross_entropy},
}


def training_steps(
    device: Device, preset: str, *, batch_size: int | None = None, seconds: float
) -> Iterator[Record | Absence]:
    """Time an eager training step with each operator in place: records ``training``, label ``part``.

    All models start from the same weights and see the same batch. The loss of the first step is recorded; it reveals
    an operator that computes something else.

    Yields:
        The values ``time``, ``speedup`` over the baseline, and ``loss``. A part that fails is an absence.
    """
    shape, config = GPTConfig.preset(preset), TrainConfig.preset(preset)
    config = replace(config, batch_size=batch_size or config.batch_size)
    tokens = batch(load_corpus().train, config.seed, 0, config.batch_size, shape.block_size)
    inputs = [tuple(torch.from_numpy(part).to(device) for part in tokens)]

    def make(parts: Mapping[str, Any]) -> Step:
        model = GPT(shape, seed=config.seed, **parts).to(device)
        return make_train_step(model, make_optimizer(model, config), config)

    steps = {name: made_at_first_call(partial(make, parts)) for name, parts in PARTS.items()}
    losses, absent = first_losses(steps, inputs[0], "a training step")
    yield from absent
    failed: dict[str, Exception] = {}
    steps = {name: steps[name] for name in losses}
    timings = compare(steps, device=device, inputs=inputs, clock="wall-clock", seconds=seconds, failed=failed)
    yield from absences(failed, "a training step")
    for name in timings.timings:
        values = {"time": timings[name].quantity(), "loss": Quantity(losses[name], "nats")}
        if BASELINE in timings.timings:
            values["speedup"] = timings.speedup(name, over=BASELINE)
        yield Record("training", {"part": name, "preset": preset}, values)


def made_at_first_call(make: Callable[[], Step]) -> Step:
    """A step that is made when it is first taken: one that does not fit then fails alone."""
    made: list[Step] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        if not made:
            made.append(make())
        try:
            return made[0](x, y)
        except Exception:
            made.clear()  # its memory is for the others
            raise

    return step

"""Tokens per second, model FLOPs utilization (MFU), and the memory of a step."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from benchkit.processes import memory
from benchkit.timing.limits import datasheet
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.model import flops_per_token, parameter_count

# The first steps of a process compile, allocate and fill caches. The total excludes them.
WARMUP_STEPS = 5


class Throughput:
    """A clock for training steps. The first steps, and the first call with each number of steps, are not counted.

    Args:
        model_config: Determines the FLOPs per token.
        config: Determines the tokens per step.
        peak: Peak FLOP/s of all devices, see :func:`peak_flops`; None if it is unknown.
    """

    def __init__(self, model_config: GPTConfig, config: TrainConfig, peak: float | None) -> None:
        self._tokens_per_step = config.batch_size * model_config.block_size
        self._flops_per_token = flops_per_token(model_config)
        self._peak = peak
        self._steps = self._counted_steps = 0
        self._counted_seconds = 0.0
        self._called: set[int] = set()  # a call with another number of steps compiles another function
        self.start()

    def start(self) -> None:
        """Restart the clock after work that is not training. That work has waited for its device."""
        self._mark = time.perf_counter()

    def lap(self, steps: int = 1) -> float:
        """Record one call of this many steps and return its seconds."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if self._steps >= WARMUP_STEPS and steps in self._called:
            self._counted_seconds += seconds
            self._counted_steps += steps
        self._steps += steps
        self._called.add(steps)
        return seconds

    def rate(self, seconds: float) -> float:
        """Return tokens per second of one step that took ``seconds``."""
        return self._tokens_per_step / seconds

    def total_rate(self) -> float | None:
        """Return tokens per second over all counted steps; None if there are none."""
        return self._counted_steps * self._tokens_per_step / self._counted_seconds if self._counted_steps else None

    def mfu(self, rate: float | None) -> float | None:
        """Return model FLOPs at ``rate`` tokens per second as a share of the peak; None if either is unknown."""
        return None if rate is None or self._peak is None else rate * self._flops_per_token / self._peak


def peak_flops(device: torch.device, dtype: Precision, devices: int = 1) -> float | None:
    """Return the dense peak of all devices from the datasheet, FLOP/s; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    sheet = datasheet(torch.cuda.get_device_name(device))
    return None if sheet is None else sheet.flops[dtype] * devices


# Bytes that a step in 16 bits keeps for an element of the residual stream in each block, and for a logit. The peaks of
# gpt2-124m with 8 and 32 sequences, and of two blocks 4096 wide, are up to 6 % below the sums (H200, 2026-11-25).
_EAGER_BYTES, _COMPILED_BYTES = (50, 10), (30, 4)
# What a step takes with parts that are formulas, which keep more, and what torch's allocator holds over it.
_REPLACED = 1.3
_WIDER = {"float64": 3.0, "float32": 1.5}


def state_bytes(model: GPTConfig, dtype: Precision) -> int:
    """Return the bytes of the weights, their gradients and both moments of AdamW."""
    return parameter_count(model) * (32 if dtype == "float64" else 16)


def eager_step_that_fits(preset: str, batch_size: int, *, models: int, available: float) -> tuple[str, int]:
    """Return the largest eager step that models in one process take one after another.

    Args:
        preset: Name of the shape and the settings that are wanted.
        batch_size: Sequences that are wanted.
        models: Number of models, each with its optimizer.
        available: Bytes that are free.

    Returns:
        The preset with at most so many sequences, or ``tiny`` where one sequence is too much.
    """

    def needs(size: tuple[str, int]) -> float:
        model, config = GPTConfig.preset(size[0]), replace(TrainConfig.preset(size[0]), batch_size=size[1])
        active = activation_bytes(model, config, compiled=False)
        return models * state_bytes(model, config.dtype) + _REPLACED * active

    sizes = [*((preset, batch) for batch in memory.halved(batch_size)), ("tiny", TrainConfig.preset("tiny").batch_size)]
    return memory.largest_that_fits(sizes, needs, available)


def activation_bytes(model: GPTConfig, config: TrainConfig, *, compiled: bool) -> float:
    """Return about the most bytes that one step takes beside :func:`state_bytes`; attention keeps no scores.

    Args:
        model: Shape of the model.
        config: Sequences of a micro-batch, and the dtype.
        compiled: Whether torch.compile fuses what is not a matrix product.
    """
    element, logit = _COMPILED_BYTES if compiled else _EAGER_BYTES
    token = element * model.n_layer * model.n_embd + logit * model.vocab_size
    tokens = config.batch_size // config.accumulation * model.block_size
    return tokens * token * _WIDER.get(config.dtype, 1.0)

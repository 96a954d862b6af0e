"""Tokens per second and model FLOPs utilization (MFU)."""

from __future__ import annotations

import time

import torch

from benchkit.timing.limits import datasheet
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.model import flops_per_token

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

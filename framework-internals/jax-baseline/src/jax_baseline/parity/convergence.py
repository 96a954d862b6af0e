"""The same training to its end in both frameworks: do they arrive at the same validation loss?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchkit.device import Device
from jax_baseline.gpt.loop import train as train_jax
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.train import train as train_torch


@dataclass(frozen=True)
class Converged:
    """Validation after the last step, bits per held-out byte, by seed.

    Attributes:
        seeds: of weights and batches.
        torch: with the weights as they are.
        jax: likewise.
        unigram_bits: entropy of the held-out bytes' frequencies.
    """

    seeds: tuple[int, ...]
    torch: tuple[float, ...]
    jax: tuple[float, ...]
    unigram_bits: float

    @property
    def difference(self) -> float:
        """Mean over the seeds, JAX's less torch's."""
        return statistics.fmean(ours - theirs for ours, theirs in zip(self.jax, self.torch, strict=True))

    @property
    def seed_noise(self) -> float:
        """Standard deviation of torch's results over the seeds."""
        return statistics.stdev(self.torch)

    @property
    def alike(self) -> bool:
        """Whether the mean difference is within twice the seed noise of a mean over so many seeds, and both learned.

        To have learned is to be below half of the unigram entropy with every seed.
        """
        learned = max(*self.torch, *self.jax) < self.unigram_bits / 2
        return learned and abs(self.difference) <= 2 * self.seed_noise * (2 / len(self.seeds)) ** 0.5


def run(model: GPTConfig, config: TrainConfig, *, seeds: Sequence[int], device: Device) -> Converged:
    """Train both frameworks from every seed.

    Args:
        model: the shape.
        config: how; its seed is replaced.
        seeds: at least two.
        device: where.

    Raises:
        ValueError: for fewer than two seeds, which say nothing of noise.
    """
    if len(seeds) < 2:
        raise ValueError(f"noise between seeds needs at least two of them, got {len(seeds)}")
    torch_bits, jax_bits, unigram = [], [], 0.0
    for seed in seeds:
        settings = replace(config, seed=seed, compile=False, eval_interval=0, out=None)
        summary = train_torch(model, settings, device=device)
        torch_bits.append(summary.bits)
        jax_bits.append(train_jax(model, settings, device=device).summary.bits)
        unigram = summary.unigram_bits
    return Converged(tuple(seeds), tuple(torch_bits), tuple(jax_bits), unigram)

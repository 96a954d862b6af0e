"""Full training runs in both frameworks: do they reach the same validation loss?"""

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
    """Validation losses after the last step, in bits per held-out byte.

    Attributes:
        seeds: Seeds of weights and batches.
        torch: Validation loss of torch by seed, with the weights that are not averaged.
        jax: The same for JAX.
        unigram_bits: Entropy of the frequencies of the held-out bytes.
    """

    seeds: tuple[int, ...]
    torch: tuple[float, ...]
    jax: tuple[float, ...]
    unigram_bits: float

    @property
    def difference(self) -> float:
        """Mean over the seeds of JAX's loss minus torch's."""
        return statistics.fmean(ours - theirs for ours, theirs in zip(self.jax, self.torch, strict=True))

    @property
    def seed_noise(self) -> float:
        """Standard deviation of torch's loss over the seeds."""
        return statistics.stdev(self.torch)

    @property
    def alike(self) -> bool:
        """Whether both learned, and the mean difference is at most twice the standard error from seed noise.

        A run has learned if its loss is below half of the unigram entropy.
        """
        learned = max(*self.torch, *self.jax) < self.unigram_bits / 2
        return learned and abs(self.difference) <= 2 * self.seed_noise * (2 / len(self.seeds)) ** 0.5


def run(model: GPTConfig, config: TrainConfig, *, seeds: Sequence[int], device: Device) -> Converged:
    """Train with both frameworks from every seed.

    Raises:
        ValueError: For fewer than two seeds, from which no noise can be estimated.
    """
    if len(seeds) < 2:
        raise ValueError(f"expected at least two seeds to estimate the noise between them, got {len(seeds)}")
    torch_bits, jax_bits, unigram = [], [], 0.0
    for seed in seeds:
        settings = replace(config, seed=seed, compile=False, eval_interval=0, out=None)
        summary = train_torch(model, settings, device=device)
        torch_bits.append(summary.bits)
        jax_bits.append(train_jax(model, settings, device=device).summary.bits)
        unigram = summary.unigram_bits
    return Converged(tuple(seeds), tuple(torch_bits), tuple(jax_bits), unigram)

"""Full training runs in both frameworks: do they reach the same validation loss?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchkit import Quantity
from benchkit.device import Device
from jax_baseline.gpt.loop import train as train_jax
from jax_baseline.parity.records import ConvergedRecord, ConvergenceRecord
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.train import train as train_torch


def run(
    model: GPTConfig, config: TrainConfig, *, seeds: Sequence[int], device: Device
) -> tuple[list[ConvergedRecord], ConvergenceRecord]:
    """Train with both frameworks from every seed; averaged weights are not validated.

    Raises:
        ValueError: For fewer than two seeds, from which no noise can be estimated.
    """
    if len(seeds) < 2:
        raise ValueError(f"expected at least two seeds to estimate the noise between them, got {len(seeds)}")
    records, unigram_bits = [], 0.0
    for seed in seeds:
        settings = replace(config, seed=seed, compile=False, eval_interval=0, out=None)
        torch, jax = train_torch(model, settings, device=device), train_jax(model, settings, device=device).summary
        records.append(ConvergedRecord(seed, Quantity(torch.bits, "bits"), Quantity(jax.bits, "bits")))
        unigram_bits = torch.unigram_bits
    return records, summarise(records, unigram_bits)


def summarise(records: Sequence[ConvergedRecord], unigram_bits: float) -> ConvergenceRecord:
    """Compare the runs. They are alike if all learned, and their mean difference is within twice its standard error.

    A run has learned if its loss is below half of the unigram entropy. The standard error follows from seed noise, the
    standard deviation of torch's loss over the seeds.
    """
    torch, jax = ([getattr(record, name).value for record in records] for name in ("torch", "jax"))
    difference = statistics.fmean(ours - theirs for ours, theirs in zip(jax, torch, strict=True))
    noise = statistics.stdev(torch)
    learned = max(*torch, *jax) < unigram_bits / 2
    alike = learned and abs(difference) <= 2 * noise * (2 / len(records)) ** 0.5
    return ConvergenceRecord(
        Quantity(difference, "bits"), Quantity(noise, "bits"), Quantity(unigram_bits, "bits"), alike
    )

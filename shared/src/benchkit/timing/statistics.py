"""Medians, quantiles and bootstrap intervals of small samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def fewest_samples(confidence: float) -> int:
    """How many samples an interval of the median needs at least to hold it with this confidence.

    All n lie on one side of the median with probability 2 · 2⁻ⁿ: even from the least to the largest, an interval holds
    it with 1 − 2¹⁻ⁿ at most. That is 6 for 95 %.

    Args:
        confidence: above 0, below 1.
    """
    return math.ceil(1 - math.log2(1 - confidence))


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors, and NaN where one is, which max() would drop after a number.

    Args:
        errors: at least one, of any unit.
    """
    return max(errors, key=lambda error: (math.isnan(error), error))


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The ``fraction`` quantile of ``samples`` by linear interpolation; the median at 0.5."""
    return float(np.quantile(np.asarray(samples, dtype=np.float64), fraction))


def bootstrap_median_interval(
    samples: Sequence[float], *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron, 1979).

    Args:
        samples: the observations, any unit; at least one. Of fewer than :func:`fewest_samples` the interval holds the
            median more rarely than it says.
        confidence: the share of the resampled medians that the interval holds.
        resamples: how many samples of the same size are drawn with replacement.
        seed: of the drawing; equal seeds give equal intervals.

    Returns:
        The lower and the upper end, in the unit of ``samples``.

    Raises:
        ValueError: for no samples.
    """
    observed = np.asarray(samples, dtype=np.float64)
    if observed.size == 0:
        raise ValueError("an interval needs at least one sample, got none")
    draw = np.random.default_rng(seed).integers(0, observed.size, size=(resamples, observed.size))
    medians = np.median(observed[draw], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)

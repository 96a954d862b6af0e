"""Medians, quantiles and bootstrap intervals of small samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The ``fraction`` quantile of ``samples`` by linear interpolation; the median at 0.5."""
    return float(np.quantile(np.asarray(samples, dtype=np.float64), fraction))


def bootstrap_median_interval(
    samples: Sequence[float], *, confidence: float = 0.95, resamples: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median (Efron, 1979).

    Args:
        samples: the observations, any unit; at least one.
        confidence: the share of the resampled medians that the interval holds.
        resamples: how many samples of the same size are drawn with replacement.
        seed: of the drawing; equal seeds give equal intervals.

    Returns:
        The lower and the upper end, in the unit of ``samples``.
    """
    observed = np.asarray(samples, dtype=np.float64)
    draw = np.random.default_rng(seed).integers(0, observed.size, size=(resamples, observed.size))
    medians = np.median(observed[draw], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)

"""Whether two implementations of a training loop compute the same thing, step by step."""

from jax_baseline.parity.comparison import (
    FALSE_ALARMS,
    LARGEST_BOUND,
    QUANTITIES,
    REPORTED,
    Adapter,
    Arrays,
    Comparison,
    Divergence,
    Inspectable,
    Observation,
    Unjudged,
    compare,
    compare_observations,
)

__all__ = [
    "FALSE_ALARMS",
    "LARGEST_BOUND",
    "QUANTITIES",
    "REPORTED",
    "Adapter",
    "Arrays",
    "Comparison",
    "Divergence",
    "Inspectable",
    "Observation",
    "Unjudged",
    "compare",
    "compare_observations",
]

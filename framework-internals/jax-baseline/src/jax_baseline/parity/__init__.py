"""Whether two implementations of a training loop compute the same thing, step by step."""

from jax_baseline.parity.comparison import (
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

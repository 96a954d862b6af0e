"""Whether two implementations of a training loop compute the same thing, step by step."""

from jax_baseline.parity.comparison import (
    QUANTITIES,
    TIMES_CONTROL,
    Adapter,
    Arrays,
    Comparison,
    Divergence,
    Inspectable,
    Observation,
    compare,
    compare_observations,
)

__all__ = [
    "QUANTITIES",
    "TIMES_CONTROL",
    "Adapter",
    "Arrays",
    "Comparison",
    "Divergence",
    "Inspectable",
    "Observation",
    "compare",
    "compare_observations",
]

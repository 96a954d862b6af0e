"""Whether two implementations of a training loop compute the same thing, step by step."""

from jax_baseline.parity.comparison import (
    QUANTITIES,
    TIMES_CONTROL,
    Arrays,
    Comparison,
    Divergence,
    Observation,
    compare,
    judge,
)

__all__ = [
    "QUANTITIES",
    "TIMES_CONTROL",
    "Arrays",
    "Comparison",
    "Divergence",
    "Observation",
    "compare",
    "judge",
]

"""A user's pair of models, one in torch and one in JAX: loss, gradients, state and updates step by step."""

from jax_baseline.parity.pairs.pair import Batch, Pair
from jax_baseline.parity.pairs.run import Outcome, run

__all__ = ["Batch", "Outcome", "Pair", "run"]

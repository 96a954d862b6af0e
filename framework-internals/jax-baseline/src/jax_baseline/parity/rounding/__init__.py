"""What rounding does to a function: noise of one unit in the last place, and the function in float64 throughout."""

from jax_baseline.parity.rounding.noise import Noise, bind, interpreted, with_noise

__all__ = ["Noise", "bind", "interpreted", "with_noise"]

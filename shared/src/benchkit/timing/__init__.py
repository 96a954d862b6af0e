"""Timing functions on a CPU or a GPU, and the measured limits of the machine."""

from benchkit.timing.clocks import Clock, Inputs, unrun
from benchkit.timing.comparison import Comparison, Timing, capturable_stream, compare, measure, rotating_inputs

__all__ = [
    "Clock",
    "Comparison",
    "Inputs",
    "Timing",
    "capturable_stream",
    "compare",
    "measure",
    "rotating_inputs",
    "unrun",
]

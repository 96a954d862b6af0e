"""Optimised HLO read as what it is: a list of kernels, what each does, costs and belongs to.

Text in, numbers out: neither jax nor torch is imported here, so that a dump from another machine can be read anywhere.
"""

from jax_baseline.hlo.cost import Cost
from jax_baseline.hlo.kernels import COLLECTIVES, Kernel, Phase, kernels
from jax_baseline.hlo.summary import RegionCount, Summary, summarise
from jax_baseline.hlo.text import Instruction, Module, Shape, parse

__all__ = [
    "COLLECTIVES",
    "Cost",
    "Instruction",
    "Kernel",
    "Module",
    "Phase",
    "RegionCount",
    "Shape",
    "Summary",
    "kernels",
    "parse",
    "summarise",
]

"""Reads optimised HLO as a list of kernels with their operations, costs and parts of the model.

The functions here work on text and import neither jax nor torch, so they can read a dump from another machine.
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

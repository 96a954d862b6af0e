"""The activations and their slopes by formulas in which nothing cancels, of float64 tensors or of mpmath's numbers.

PyTorch's GELU takes 1 + erf or 1 + tanh, and its slope 1 − tanh², so that in float64 it is wrong by more than a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

TENSORS = SimpleNamespace(exp=torch.exp, erfc=torch.special.erfc, sqrt=math.sqrt, pi=math.pi)


@dataclass(frozen=True)
class Activation:
    """u·p(u) and its slope p(u) + u·p'(u), as functions of u and of the module to use, TENSORS or mpmath.mp."""

    probability: Callable[[Any, Any], Any]
    second_summand: Callable[[Any, Any], Any]
    exponent: Callable[[Any, Any], Any]  # what p takes the exponential of; its rounding is an error of p

    def value(self, u: Any, m: Any = TENSORS) -> Any:
        return u * self.probability(u, m)

    def slope(self, u: Any, m: Any = TENSORS) -> Any:
        return self.probability(u, m) + self.second_summand(u, m)

    def slope_size(self, u: Any, m: Any = TENSORS) -> Any:
        """The size of the summands, which are of opposite signs below zero."""
        return self.probability(u, m) + abs(self.second_summand(u, m))

    def units(self, u: Any, m: Any = TENSORS) -> Any:
        """What arithmetic may lose of each summand, in units of its dtype.

        The exponent is found by up to four roundings of half a unit, and a dozen operations follow.
        """
        return 16 + 2 * abs(self.exponent(u, m))


def _logistic(z: Any, m: Any) -> Any:
    return 1 / (1 + m.exp(-z))


def _steepness(u: Any, m: Any) -> Any:  # of tanh's argument, twice
    return 2 * m.sqrt(2 / m.pi) * (1 + 0.044715 * 3 * u * u)


def _argument(u: Any, m: Any) -> Any:
    return 2 * m.sqrt(2 / m.pi) * (u + 0.044715 * u**3)


SILU = Activation(
    _logistic, lambda u, m: u * _logistic(u, m) * _logistic(-u, m), lambda u, m: u
)  # fmt: skip
GELU = Activation(
    lambda u, m: m.erfc(-u * m.sqrt(0.5)) / 2,
    lambda u, m: u * m.exp(-u * u / 2) / m.sqrt(2 * m.pi),
    lambda u, m: u * u / 2,
)
GELU_TANH = Activation(
    lambda u, m: _logistic(_argument(u, m), m),
    lambda u, m: u * _steepness(u, m) * _logistic(_argument(u, m), m) * _logistic(-_argument(u, m), m),
    _argument,
)

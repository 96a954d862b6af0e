"""What several programs share: an argument, and functions that compute what a program does without its cause."""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR = (torch.ones(4),)


def sine(x: Tensor) -> Tensor:
    """The sine."""
    return x.sin()


def sine_and_cosine(x: Tensor) -> Tensor:
    """The cosine of the sine."""
    return x.sin().cos()


def doubled(x: Tensor) -> Tensor:
    """Twice as much."""
    return x * 2

"""The interface that every build of ``csrc/vector_add`` has: a Python module with two functions."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

NAME = "custom_ops_vector_add"
SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "vector_add"


class VectorAddModule(Protocol):
    """The module that ``binding.cpp`` defines: plain functions, without dispatcher and without autograd.

    Attributes:
        torch_version: Version of the torch headers that it was compiled against.
        with_cuda: Whether the module contains CUDA kernels.
    """

    __file__: str
    torch_version: str
    with_cuda: bool

    def vector_add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``, of equal shape, dtype and device."""
        ...

    def axpb(self, x: Tensor, b: Tensor, alpha: float) -> Tensor:
        """``alpha * x + b`` in one kernel, of equal shape, dtype and device."""
        ...

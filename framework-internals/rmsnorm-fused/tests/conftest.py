from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rmsnorm_fused.backends import Implementation, unavailable


@dataclass(frozen=True)
class Where:
    """An implementation and the device of the test."""

    backend: Implementation
    device: str

    @property
    def interpreted(self) -> bool:
        """Whether it is Triton's interpreter that runs the kernels."""
        return self.backend == "triton" and self.device == "cpu"


def _params(*pairs: tuple[Implementation, str]) -> list[object]:
    return [
        pytest.param(
            Where(backend, device), id=f"{backend}-{device}", marks=[pytest.mark.gpu] if device == "cuda" else []
        )
        for backend, device in pairs
    ]


def _usable(where: Where) -> Where:
    if where.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    if (reason := unavailable(where.backend, where.device)) is not None:
        pytest.skip(reason)
    return where


KERNELS = _params(("cpp", "cpu"), ("triton", "cpu"), ("triton", "cuda"), ("cuda", "cuda"))
ALL = [*_params(("pytorch", "cpu"), ("pytorch", "cuda")), *KERNELS]


@pytest.fixture(scope="session", params=ALL)
def where(request: pytest.FixtureRequest) -> Where:
    """Every implementation on every device that it supports."""
    return _usable(request.param)


@pytest.fixture(scope="session", params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Where:
    """The implementations that are operators of this package: all except the PyTorch formula."""
    return _usable(request.param)

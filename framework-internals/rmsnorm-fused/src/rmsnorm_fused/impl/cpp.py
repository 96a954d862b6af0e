"""RMSNorm on the CPU in C++ (``csrc/rms_norm_cpu.cpp``), built at its first call."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from native_build import load_extension, missing_cxx
from rmsnorm_fused.paths import CSRC

# The instruction set that torch itself found on this processor, not -march=native: it is part of the build's key, so
# that a cache on a file system that machines share never serves one machine's instructions to another.
_INSTRUCTIONS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}


def unavailable() -> str | None:
    """Why this back end cannot be used here, with the remedy; None where it can."""
    if not CSRC.is_dir():
        return f"the C++ sources are not in {CSRC} (install the package editable from its checkout)"
    return missing_cxx()


@functools.cache
def load() -> ModuleType:
    """The extension, built if need be.

    Raises:
        BuildError: when it cannot be built.
    """
    flags = ("-fopenmp", *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()))
    return load_extension("rms_norm_cpu", [CSRC / "binding.cpp", CSRC / "rms_norm_cpu.cpp"], cflags=flags)


def forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Y (M, N) and rstd (M,) of the rows of x (outer, inner, N)."""
    return load().forward(x, _widened(x, weight), eps, 0)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, needs_dweight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dx (M, N) and, where it is asked for, dweight (N,), for the rows of dy and x (outer, inner, N)."""
    dx, dweight = load().backward(dy, x, _widened(x, weight), rstd, needs_dweight, 0)
    return dx, None if dweight is None or weight is None else dweight.to(weight.dtype)


def _widened(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
    if weight is None:
        return None
    return weight.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()

"""RMSNorm on a GPU in CUDA C++ (``csrc/rms_norm_cuda.cu``), built at its first call."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from native_build import load_extension, missing_cuda
from rmsnorm_fused.paths import CSRC


def unavailable() -> str | None:
    """Why this back end cannot be used here, with the remedy; None where it can."""
    if not CSRC.is_dir():
        return f"the CUDA sources are not in {CSRC} (install the package editable from its checkout)"
    return missing_cuda()


@functools.cache
def load() -> ModuleType:
    """The extension, built if need be.

    Raises:
        BuildError: when it cannot be built.
    """
    return load_extension("rms_norm_cuda", [CSRC / "binding.cpp", CSRC / "rms_norm_cuda.cu"], cuda=True)


def forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Y (M, N) and rstd (M,) of the rows of x (outer, inner, N)."""
    return load().forward(x, _fitting(x, weight), eps, _stream(x))


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, needs_dweight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dx (M, N) and, where it is asked for, dweight (N,), for the rows of dy and x (outer, inner, N)."""
    dx, dweight = load().backward(dy, x, _fitting(x, weight), rstd, needs_dweight, _stream(x))
    return dx, None if dweight is None or weight is None else dweight.to(weight.dtype)


def _fitting(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight as the kernels take it: in the dtype of x, or in the accumulating one (exact: a widening)."""
    if weight is None or weight.dtype == x.dtype:
        return None if weight is None else weight.contiguous()
    return weight.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


def _stream(x: torch.Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream

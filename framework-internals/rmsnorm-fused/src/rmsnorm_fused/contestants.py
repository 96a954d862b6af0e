"""What is timed: this package's implementations beside PyTorch's own ways of doing the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchkit.device import Device
from native_build import BuildError
from rmsnorm_fused import rms_norm
from rmsnorm_fused.backends import IMPLEMENTATIONS, unavailable
from rmsnorm_fused.impl import reference

RmsNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

EPS = 1e-6
COPY = "copy"
EAGER = "eager formula"
TORCH = "F.rms_norm"
COMPILED = "torch.compile"
OWN = ("triton", "cuda", "cpp")

ABOUT = {
    COPY: "a copy of the same bytes, `x.clone()` forward and `x + dy` backward: the limit",
    EAGER: 'the formula in PyTorch operators, one kernel each (`backend="pytorch"`)',
    TORCH: "`torch.nn.functional.rms_norm`, PyTorch's own",
    COMPILED: "`torch.compile` of that formula for this shape",
    "triton": "this package's Triton kernels",
    "cuda": "this package's CUDA C++ kernels",
    "cpp": "this package's C++ kernels",
}


def usable(device: Device) -> tuple[dict[str, RmsNorm], dict[str, str]]:
    """The contestants on a device, but for :func:`compiled`, which is made for each shape.

    Returns:
        The functions (x, weight) -> y by name, and for this package's implementations that are left out: why.
    """
    functions: dict[str, RmsNorm] = {
        EAGER: partial(rms_norm, eps=EPS, backend="pytorch"),
        TORCH: lambda x, weight: torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS),
    }
    absent: dict[str, str] = {}
    for name in IMPLEMENTATIONS:
        if name == "pytorch":
            continue
        if (name == "cuda") != (device == "cuda") and name in ("cuda", "cpp"):
            absent[name] = f"it is not for tensors on {device}, where this run measured"
        elif device == "cpu" and name == "triton":
            absent[name] = "Triton's interpreter, which runs it on a CPU, checks results and says nothing of speed"
        elif (reason := unavailable(name, device) or _build_failure(name, device)) is not None:
            absent[name] = reason
        else:
            functions[name] = partial(rms_norm, eps=EPS, backend=name)
    return functions, absent


def _build_failure(name: str, device: Device) -> str | None:
    """What is wrong when an implementation that seems to be there does not build; builds it if need be."""
    try:
        rms_norm(torch.ones(1, 8, device=device), eps=EPS, backend=name)  # type: ignore[arg-type]
    except BuildError as error:
        return str(error)
    return None


def compiled() -> RmsNorm:
    """The formula under torch.compile, compiled anew for the shape that it is first called with."""
    torch.compiler.reset()

    def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, weight, EPS)

    return torch.compile(formula, dynamic=False, fullgraph=True)

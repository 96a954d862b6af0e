"""The C++ and CUDA C++ kernels (``csrc``), built at their first call or taken from the prebuilt library.

Where there is a compiler they are built: the extension also registers derivatives, which the stable ABI cannot, and a
call costs less. A library that the environment names is taken all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from native_build import load_extension, missing_cuda, missing_cxx, missing_gpu
from rmsnorm_fused import prebuild
from rmsnorm_fused.paths import CSRC

QuickCall = Callable[[Any, Any, Any, Any, Any], Any]

# The instruction set that torch itself found on this processor, not -march=native: it is part of the build's key, so
# that a cache on a file system that machines share never serves one machine's instructions to another.
_INSTRUCTIONS = {"AVX512": ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX2": ("-march=x86-64-v3",)}


def unavailable(device_type: str) -> str | None:
    """Why these kernels cannot be used on such a device here, with the remedy; None where they can.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if device_type == "cuda" and (reason := missing_gpu()) is not None:
        return reason
    if (reason := _cannot_build(device_type)) is None:
        return None
    from rmsnorm_fused.impl import prebuilt

    instead = prebuilt.unavailable(device_type)
    return None if instead is None else f"{reason}; {instead}"


def _cannot_build(device_type: str) -> str | None:
    if prebuild.is_asked_for():
        return f"{prebuild.VARIABLE} is set"
    if not CSRC.is_dir():
        return f"the C++ sources are not in {CSRC} (install the package editable from its checkout)"
    return missing_cuda() if device_type == "cuda" else missing_cxx()


@functools.cache
def load(device_type: str) -> QuickCall | None:
    """Register the kernels for a type of device, built if need be.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        The extension's own entry, see ``backends.quick_call``; None with the prebuilt library.

    Raises:
        BuildError: when they cannot be built.
        LibraryError: when there is no compiler, and the prebuilt library is not for this machine.
    """
    if _cannot_build(device_type) is not None:
        from rmsnorm_fused.impl import prebuilt

        prebuilt.register(device_type)
        return None
    extension = _build_cuda() if device_type == "cuda" else _build_cpu()
    return extension.rms_norm


def _build_cpu() -> ModuleType:
    flags = ("-fopenmp", *_INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()))
    sources = [CSRC / name for name in ("binding.cpp", "parallel_torch.cpp", "rms_norm_cpu.cpp")]
    return load_extension("rms_norm_cpu", sources, cflags=flags)


def _build_cuda() -> ModuleType:
    sources = [CSRC / "binding.cpp", *sorted(CSRC.glob("*.cu"))]
    return load_extension("rms_norm_cuda", sources, cuda=True, cflags=("-DRMS_NORM_CUDA",))

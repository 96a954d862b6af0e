"""The C++ and CUDA C++ kernels, compiled at their first call into a pybind11 module (``csrc/binding.cpp``).

The operators are those of the prebuilt library (``csrc/operators.h``). The module also registers derivatives in C++,
which the stable ABI does not allow, and has an entry for Python, by which a call costs less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from native_build import Unit, instruction_levels, load_module, missing_cuda, missing_cxx
from rmsnorm_fused.impl import prebuild
from rmsnorm_fused.impl.prebuild import CSRC


class QuickCalls(Protocol):
    """The extension's entry points, see :func:`rmsnorm_fused.backends.quick_calls`."""

    @property
    def rms_norm(self) -> Callable[[Any, Any, Any, Any, Any], Any]:
        """A call of rms_norm that skips the dispatcher."""
        ...

    @property
    def layer_norm(self) -> Callable[[Any, Any, Any, Any, Any], Any]:
        """The same of layer_norm."""
        ...


def cannot_build(device_type: str) -> str | None:
    """Say why the extension is not compiled here; None if it is."""
    if prebuild.is_asked_for():
        return f"{prebuild.VARIABLE} is set"
    if not CSRC.is_dir():
        return f"the C++ sources are not in {CSRC} (install the package editable from its checkout)"
    return missing_cuda() if device_type == "cuda" else missing_cxx()


def load(device_type: str) -> QuickCalls:
    """Compile the extension if need be and load it, which registers its kernels and derivatives.

    Returns:
        The extension, see :func:`rmsnorm_fused.backends.quick_calls`.

    Raises:
        BuildError: If the extension does not compile.
        UserError: If ``RMSNORM_FUSED_CPU`` names an instruction set that cannot be used here.
    """
    cuda = device_type == "cuda"
    if cuda:
        units = prebuild.cuda_units()
    else:
        flags = ("-fopenmp-simd", *instruction_levels()[prebuild.cpu_level()])
        units = [Unit(CSRC / "cpu" / "rms_norm.cpp", flags), prebuild.THREADS]
    units.append(Unit(CSRC / "binding.cpp", ("-DRMS_NORM_CUDA",) if cuda else ()))
    module = load_module(f"rms_norm_{device_type}", units, architectures=(_architecture(),) if cuda else ())
    return cast("QuickCalls", module)


def _architecture() -> str:
    """The current GPU's, with the features that only it has."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

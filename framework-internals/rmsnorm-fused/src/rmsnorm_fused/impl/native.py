"""The C++ and CUDA C++ kernels (``csrc``), compiled at their first call.

The extension also registers derivatives in C++, which the stable ABI of the prebuilt library does not allow, and a call
costs less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from native_build import instruction_levels, load_extension, missing_cuda, missing_cxx
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
    """Say why the extension is not compiled here; None if it is.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    if prebuild.is_asked_for():
        return f"{prebuild.VARIABLE} is set"
    if not CSRC.is_dir():
        return f"the C++ sources are not in {CSRC} (install the package editable from its checkout)"
    return missing_cuda() if device_type == "cuda" else missing_cxx()


def load(device_type: str) -> QuickCalls:
    """Compile the extension if need be and load it, which registers its kernels and derivatives.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.

    Returns:
        The extension, see :func:`rmsnorm_fused.backends.quick_calls`.

    Raises:
        BuildError: If the extension does not compile.
        UserError: If ``RMSNORM_FUSED_CPU`` names an instruction set that cannot be used here.
    """
    if device_type == "cuda":
        sources = [CSRC / "binding.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]
        extension = load_extension("rms_norm_cuda", sources, cuda=True, cflags=("-DRMS_NORM_CUDA",))
        return cast("QuickCalls", extension)
    flags = ("-fopenmp", *instruction_levels()[prebuild.cpu_level()])
    sources = [CSRC / name for name in ("binding.cpp", "cpu/parallel_torch.cpp", "cpu/rms_norm.cpp")]
    return cast("QuickCalls", load_extension("rms_norm_cpu", sources, cflags=flags))

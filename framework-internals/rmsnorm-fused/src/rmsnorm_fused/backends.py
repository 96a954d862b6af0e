"""The back ends: which exist, which can be used on this machine, and which one ``auto`` selects."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Literal, get_args

import torch

from lowering.torch_private import constant_under_compile
from native_build import BuildError, LibraryError, missing_gpu
from rmsnorm_fused.ops import eager_triton, fakes, operators

if TYPE_CHECKING:
    from rmsnorm_fused.impl.native import QuickCalls

Backend = Literal["auto", "pytorch", "triton", "cuda", "cpp"]
Implementation = Literal["pytorch", "triton", "cuda", "cpp"]

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

# What `auto` tries on each type of device. CUDA C++ comes before Triton: it is as fast or faster at nearly every
# measured width, and a call takes a tenth of the time (NOTES.md).
_PREFERRED: dict[str, tuple[Implementation, ...]] = {"cuda": ("cuda", "triton"), "cpu": ("cpp",)}

_quick_calls: dict[str, QuickCalls] = {}


def unavailable(implementation: Implementation, device_type: str) -> str | None:
    """Say why an implementation cannot be used for a type of device here, with the remedy; None if it can.

    Nothing is built. A compiler that is present may still fail at the first call.
    """
    if implementation == "pytorch":
        return None
    home = {"triton": ("cuda", "cpu"), "cuda": ("cuda",), "cpp": ("cpu",)}[implementation]
    if device_type not in home:
        return f"it takes tensors on {' or '.join(home)}, got {device_type}; move them or choose another back end"
    if implementation == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install triton; it comes with a CUDA build of torch)"
        from rmsnorm_fused.impl import triton

        return triton.unavailable(device_type)
    from rmsnorm_fused.impl import native, prebuilt

    if device_type == "cuda" and (reason := missing_gpu()) is not None:
        return reason
    if (reason := native.cannot_build(device_type)) is None:
        return None
    instead = prebuilt.unavailable(device_type)
    return None if instead is None else f"{reason}; {instead}"


@constant_under_compile
def resolve(backend: str, device_type: str, wide_residual: bool = False) -> str:
    """Return the name of the implementation to use, compiled and loaded.

    ``"auto"`` tries CUDA C++ and then Triton on a GPU, and C++ on a CPU; if none of these is available, it is the
    PyTorch formula. torch.compile treats the string as a constant instead of tracing this function.

    Raises:
        ValueError: If the back end is unknown or cannot be used here; an explicit request never falls back.
        BuildError: If a requested back end does not compile. ``auto`` warns instead and tries the next one.
    """
    return _resolve(backend, device_type, wide_residual)


@functools.cache  # the search for compilers takes longer than a small normalisation
def _resolve(backend: str, device_type: str, wide_residual: bool) -> str:
    if backend == "auto" and not wide_residual:
        return _first_that_works(device_type)
    if backend == "auto":
        return "triton" if device_type == "cuda" and unavailable("triton", device_type) is None else "pytorch"
    if backend not in IMPLEMENTATIONS:
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")
    if wide_residual and backend in ("cuda", "cpp"):
        raise ValueError(
            f"backend {backend!r} cannot be used: it takes a residual in the dtype of x, got a wider one; convert it, "
            'or use backend="triton" or "pytorch"'
        )
    if (reason := unavailable(backend, device_type)) is not None:
        raise ValueError(f"backend {backend!r} cannot be used: {reason}")
    _make_ready(backend, device_type)
    return backend


def _first_that_works(device_type: str) -> str:
    for candidate in _PREFERRED.get(device_type, ()):
        if unavailable(candidate, device_type) is not None:
            continue
        try:
            _make_ready(candidate, device_type)
        except (BuildError, LibraryError) as error:
            warnings.warn(f"rmsnorm_fused cannot use its {candidate} back end: {error}", stacklevel=2)
            continue
        if candidate in _quick_calls and (device_type == "cuda" or "auto" not in _quick_calls):
            _quick_calls["auto"] = _quick_calls[candidate]  # one for both devices; a GPU's has priority
        return candidate
    return "pytorch"


def _make_ready(implementation: str, device_type: str) -> None:
    if implementation in ("cuda", "cpp") and (quick := _load_native(device_type)) is not None:
        _quick_calls[implementation] = quick
    if implementation == "triton":
        _quick_calls[implementation] = eager_triton


@functools.cache
def _load_native(device_type: str) -> QuickCalls | None:
    """Register the C++ or CUDA C++ kernels: the extension if it can be compiled, else the prebuilt library.

    Returns:
        The extension's own entry points; None with the prebuilt library, which has none.
    """
    from rmsnorm_fused.impl import native, prebuilt

    if native.cannot_build(device_type) is None:
        return native.load(device_type)
    prebuilt_operators = prebuilt.load(operators.SCHEMAS)
    for name in fakes.FAKES:
        kernel = getattr(prebuilt_operators, name).default
        operators.LIBRARY.impl(f"native_{name}", kernel, device_type.upper())
    return None


def family_of(implementation: str) -> Literal["native", "triton"]:
    """The family of operators that an implementation provides."""
    return "triton" if implementation == "triton" else "native"


def quick_calls(backend: str) -> QuickCalls | None:
    """Return the back end's own entry points for ordinary eager calls, if it has some.

    They take (x, residual, weight, eps, weight_offset) and (x, residual, weight, bias, eps), and return the results of
    :func:`rmsnorm_fused.rms_norm` and :func:`rmsnorm_fused.layer_norm`. For other arguments (another device, a wrong
    shape, a subclass) they do nothing and return None.
    """
    return None if torch.compiler.is_compiling() else _quick_calls.get(backend)

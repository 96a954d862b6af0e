"""Which back ends there are, which can be used here, and which one ``auto`` takes."""

from __future__ import annotations

import functools
import importlib.util
from typing import Literal, get_args

from rmsnorm_fused.torch_private import constant_under_compile

Backend = Literal["auto", "pytorch", "triton", "cuda", "cpp"]
Implementation = Literal["pytorch", "triton", "cuda", "cpp"]

IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def unavailable(implementation: Implementation, device_type: str) -> str | None:
    """Why an implementation cannot work on a type of device here, with the remedy; None where it can.

    Builds nothing: a compiler that is there may still fail at the first call.

    Args:
        implementation: one of :data:`IMPLEMENTATIONS`.
        device_type: of the tensors: ``"cpu"``, ``"cuda"`` or any other that torch knows.
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
    if implementation == "cuda":
        from rmsnorm_fused.impl import cuda

        return cuda.unavailable()
    from rmsnorm_fused.impl import cpp

    return cpp.unavailable()


@constant_under_compile
def resolve(backend: str, device_type: str) -> str:
    """The implementation to use; one word, so that torch.compile takes it as a constant instead of tracing this.

    Args:
        backend: what the caller asked for. ``"auto"`` is Triton on a GPU, C++ on a CPU, and the PyTorch formula where
            these are not to be had.
        device_type: of the tensors.

    Raises:
        ValueError: for an unknown word, or an explicit request that cannot be met here: it never falls back.
    """
    return _resolve(backend, device_type)


@functools.cache  # looking for compilers takes longer than a small normalisation
def _resolve(backend: str, device_type: str) -> str:
    if backend == "auto":
        first: Implementation = "triton" if device_type == "cuda" else "cpp"
        return first if unavailable(first, device_type) is None else "pytorch"
    if backend not in IMPLEMENTATIONS:
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")
    if (reason := unavailable(backend, device_type)) is not None:
        raise ValueError(f"backend {backend!r} cannot be used: {reason}")
    return backend

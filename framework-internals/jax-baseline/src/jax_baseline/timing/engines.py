"""The engines that ``bench`` and the report offer by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.spec import EngineSpec

_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"

# What compiler settings beyond these gave on an H200 stands in NOTES.md.
ENGINES: Mapping[str, EngineSpec] = {
    "torch-eager": EngineSpec("torch", compiled=False),
    "torch-compile": EngineSpec("torch"),
    "jit": EngineSpec("jax", donate=False),
    "jit-donated": EngineSpec("jax"),
    "jit-scan": EngineSpec("jax", scan=True),
    "jit-scan-remat": EngineSpec("jax", scan=True, remat=True),
    "jit-4-steps": EngineSpec("jax", steps_per_dispatch=4),
    "cudnn": EngineSpec("jax", attention="cudnn"),
    # Without Triton's matrix products, XLA compiles in half the time and is 1 % faster on an H200 (NOTES.md).
    "cudnn-no-triton-gemm": EngineSpec("jax", attention="cudnn", options=_NO_TRITON_GEMM),
    "cudnn-scan": EngineSpec("jax", attention="cudnn", scan=True),
    "cudnn-4-steps": EngineSpec("jax", attention="cudnn", steps_per_dispatch=4),
    "cudnn-data-2": EngineSpec("jax", attention="cudnn", data=2),
    "cudnn-fsdp-2": EngineSpec("jax", attention="cudnn", fsdp=2),
    "jit-data-2": EngineSpec("jax", data=2),
    "jit-fsdp-2": EngineSpec("jax", fsdp=2),
    "torch-compile-bf16-residual": EngineSpec("torch", low_precision_residual=True),
    "cudnn-bf16-residual": EngineSpec("jax", attention="cudnn", low_precision_residual=True),
    "cudnn-bf16-residual-4-steps": EngineSpec(
        "jax", attention="cudnn", low_precision_residual=True, steps_per_dispatch=4
    ),
}


def named_engines(names: Sequence[str]) -> dict[str, EngineSpec]:
    """Return the engines with these names.

    Raises:
        ValueError: For an unknown name.
    """
    if unknown := [name for name in names if name not in ENGINES]:
        raise ValueError(f"there is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    return {name: ENGINES[name] for name in names}

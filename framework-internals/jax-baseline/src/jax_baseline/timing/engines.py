"""The engines that ``bench`` and the report offer by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.spec import EngineSpec

_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"

# The engines that ``bench`` offers by name. Reports compare the first ones; the others try compiler settings.
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
    # Not measured yet: torch's compiled forward and backward as CUDA graphs.
    "torch-compile-graphs": EngineSpec("torch", options="triton.cudagraphs"),
    # These settings gained little or nothing on an H200; NOTES.md has the figures.
    "torch-compile-flash": EngineSpec("torch", attention="flash"),
    "torch-compile-tuned": EngineSpec("torch", options="coordinate_descent_tuning"),
    "torch-compile-max": EngineSpec("torch", options="max_autotune_gemm,coordinate_descent_tuning"),
    "cudnn-no-triton-gemm-4-steps": EngineSpec("jax", attention="cudnn", steps_per_dispatch=4, options=_NO_TRITON_GEMM),
    "cudnn-triton-fusion": EngineSpec(
        "jax",
        attention="cudnn",
        options=f"{_NO_TRITON_GEMM} --xla_gpu_experimental_enable_triton_heroless_priority_fusion=true",
    ),
    "cudnn-no-graphs": EngineSpec("jax", attention="cudnn", options="--xla_gpu_enable_command_buffer="),
    "cudnn-bf16-residual-no-graphs": EngineSpec(
        "jax",
        attention="cudnn",
        low_precision_residual=True,
        options=f"{_NO_TRITON_GEMM} --xla_gpu_enable_command_buffer=",
    ),
    "cudnn-fusion-autotuner": EngineSpec(
        "jax", attention="cudnn", options="--xla_gpu_experimental_enable_fusion_autotuner=true"
    ),
    "cudnn-gemm-fusion": EngineSpec("jax", attention="cudnn", options="--xla_gpu_cudnn_gemm_fusion_level=2"),
    "cudnn-latency-hiding": EngineSpec(
        "jax", attention="cudnn", options="--xla_gpu_enable_latency_hiding_scheduler=true"
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

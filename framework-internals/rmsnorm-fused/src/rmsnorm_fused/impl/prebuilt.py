"""The C++ and CUDA C++ kernels from the prebuilt library (``csrc/stable.cpp``), on rows.

:func:`rmsnorm_fused.ops.rows.register_row_kernels` documents the arguments and results.
"""

from __future__ import annotations

from typing import Any

import torch

from native_build import LibraryError, load_library, read_record
from rmsnorm_fused.impl import prebuild
from rmsnorm_fused.options import Options
from rmsnorm_fused.validation import wide_dtype


def unavailable(device_type: str) -> str | None:
    """Say why the prebuilt library cannot be used for a type of device, with the remedy; None if it can."""
    library = prebuild.library_path()
    remedy = f"python -m rmsnorm_fused build makes one if there is a compiler; {prebuild.VARIABLE} names one elsewhere"
    if not library.is_file():
        return f"there is no prebuilt library {library} ({remedy})"
    try:
        record = read_record(library)
    except LibraryError as error:
        return str(error)
    reason = record.refusal(torch.__version__)
    if reason is None and device_type == "cuda":
        reason = record.cuda_refusal(torch.cuda.get_device_capability())
    return None if reason is None else f"the prebuilt library {library} cannot be used: {reason} ({remedy})"


def load() -> None:
    """Load the library, which defines ``torch.ops.rmsnorm_fused_prebuilt``."""
    prebuild.cpu_level()  # the library chooses the same one, and keeps silent about a wrong name
    load_library(prebuild.library_path())


def _taken(weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The weight in a dtype that the kernels support: that of x (on a GPU only) or the accumulating one."""
    if weight is None:
        return None
    wide = wide_dtype(x.dtype)
    takes = (x.dtype, wide) if x.is_cuda else (wide,)
    return (weight if weight.dtype in takes else weight.to(wide)).contiguous()


def _optional(result: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    return result if wanted else None


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Y, s and rstd."""
    y, s, rstd = torch.ops.rmsnorm_fused_prebuilt.forward(x, residual, _taken(weight, x), *options)
    return y, _optional(s, residual is not None), rstd


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    llama: bool,
    needs_dweight: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dx and dweight."""
    needs_dweight = needs_dweight and weight is not None
    rest: tuple[Any, ...] = (weight_offset, llama, needs_dweight, deterministic)
    dx, dweight = torch.ops.rmsnorm_fused_prebuilt.backward(dy, ds, s, _taken(weight, s), rstd, *rest)
    return dx, dweight.to(weight.dtype) if needs_dweight and weight is not None else None


def layer_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Y, s and moments."""
    run = torch.ops.rmsnorm_fused_prebuilt.layer_forward
    y, s, moments = run(x, residual, _taken(weight, x), _taken(bias, x), eps)
    return y, _optional(s, residual is not None), moments


def layer_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    moments: torch.Tensor,
    needs_dparameters: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dx and dparameters."""
    run = torch.ops.rmsnorm_fused_prebuilt.layer_backward
    dx, dparameters = run(dy, ds, s, _taken(weight, s), moments, needs_dparameters, deterministic)
    return dx, (dparameters if weight is None else dparameters.to(weight.dtype)) if needs_dparameters else None


def quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Y as float8, s and the row scales."""
    y, s, row_scales = torch.ops.rmsnorm_fused_prebuilt.quantize(x, residual, _taken(weight, x), scale, *options)
    return y, _optional(s, residual is not None), _optional(row_scales, scale is None)

"""The implementations to time: this package's, PyTorch's, and those of two libraries.

quack (Dao-AILab) and Liger (LinkedIn) are optional; the extra ``peers`` installs them. If one is not installed, the
report says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal, cast

import torch

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import first_line
from rmsnorm_fused import RMSNorm, rms_norm
from rmsnorm_fused.backends import IMPLEMENTATIONS, Backend, Implementation, unavailable
from rmsnorm_fused.impl import reference
from rmsnorm_fused.options import Options
from torch_baseline.model import NormFactory

RmsNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
AddRmsNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]
Quantiser = Callable[[torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]

EPS = 1e-6
LAYER_EPS = 1e-5
COPY = "copy"
EAGER = "eager formula"
TORCH = "F.rms_norm"
TORCH_LAYER = "F.layer_norm"
COMPILED = "torch.compile"
AUTOTUNED = "torch.compile, autotuned"
QUACK = "quack"
LIGER = "Liger (Triton)"
LIGER_CUTE = "Liger (CuTe)"
SEPARATE = "F.rms_norm, then float8"
OWN = ("triton", "cuda", "cpp")

ABOUT = {
    COPY: "reads and writes the same number of bytes and does nothing else: the limit",
    EAGER: 'the formula in PyTorch operators, one kernel each (`backend="pytorch"`)',
    TORCH: "`torch.nn.functional.rms_norm`, PyTorch's own",
    TORCH_LAYER: "`torch.nn.functional.layer_norm`, PyTorch's own",
    COMPILED: "`torch.compile` of the eager formula for this shape",
    AUTOTUNED: 'the same with `mode="max-autotune-no-cudagraphs"`',
    QUACK: "`quack.rmsnorm` (Dao-AILab, CuTe DSL)",
    LIGER: '`liger_kernel`\'s Triton kernels with `casting_mode="llama"`, the default, not in place',
    LIGER_CUTE: "`liger_kernel`'s CuTe DSL kernels with the same options",
    SEPARATE: "`torch.nn.functional.rms_norm`, then scaling and rounding in one kernel of torch.compile",
    "triton": "this package's Triton kernels",
    "cuda": "this package's CUDA C++ kernels",
    "cpp": "this package's C++ kernels",
}

_OPTIONS = Options(EPS)
_LIGER_ARGUMENTS = (EPS, 0.0, "llama", False)  # eps, offset, casting mode, in place: dy is the caller's


@dataclass(frozen=True)
class Candidate:
    """One implementation of RMSNorm.

    Attributes:
        plain: Function (x, weight) -> y.
        add: Function (x, residual, weight) -> (y, x + residual), as far as it is fused; None if there is none.
        quantise: Function (x, weight) -> (float8 rows, scale of each row); None if it is not timed.
        norm: Makes a module from (width, eps) for the training step; None if it is not timed.
        widest: Largest number of columns that the implementation supports; None if unlimited.
    """

    plain: RmsNorm
    add: AddRmsNorm | None = None
    quantise: Quantiser | None = None
    norm: NormFactory | None = None
    widest: int | None = None


def usable(device: Device) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates on a device but :func:`compiled`, the most important first, and why the others are absent."""
    usable_here, absent = {EAGER: _of_this_package("pytorch"), TORCH: Candidate(_torch_rms_norm, _torch_add)}, {}
    for own in IMPLEMENTATIONS:
        if own == "pytorch":
            continue
        if (reason := _why_not(own, device)) is not None:
            absent[f"`{own}`"] = reason
        else:
            usable_here[own] = _of_this_package(own)
    if device == "cpu":
        return usable_here, absent | dict.fromkeys(_PEERS, "its kernels are for GPUs")
    peers, why = installed_peers()
    return usable_here | peers, absent | why


def compiled(mode: CompileMode = "default") -> Candidate:
    """The formula under torch.compile, compiled from scratch for the shape of its first call."""
    torch.compiler.reset()

    def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", reference.normalise(x, None, weight, None, _OPTIONS))

    def add_formula(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cast("tuple[torch.Tensor, torch.Tensor]", reference.normalise(x, residual, weight, None, _OPTIONS))

    compile_one: Any = partial(torch.compile, dynamic=False, fullgraph=True, mode=mode)
    return Candidate(compile_one(_copy_of(formula)), compile_one(_copy_of(add_formula)))


def _copy_of(function: Any) -> FunctionType:
    """A copy of a function with a separate code object.

    torch.compile caches at most eight compilations per code object (``torch.compiler.config.recompile_limit``) and
    checks them one after another at each call. Candidates for several shapes would slow down, and exclude, one another.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def compiled_name(mode: CompileMode) -> str:
    """The name of the candidate for a mode of torch.compile."""
    return COMPILED if mode == "default" else AUTOTUNED


def compiled_quantisers() -> dict[str, Quantiser]:
    """The quantisers with torch.compile, by name: the whole formula, and a norm followed by a second kernel."""
    torch.compiler.reset()

    def formula(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, scales = reference.quantize(x, None, weight, None, _OPTIONS, torch.float8_e4m3fn)
        return y, scales

    def to_float8(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = y.float()
        scales = reference.row_scales(wide)
        return (wide / scales).to(torch.float8_e4m3fn), scales

    compile_one: Any = partial(torch.compile, dynamic=False, fullgraph=True)
    second: Any = compile_one(to_float8)
    return {SEPARATE: lambda x, weight: second(_torch_rms_norm(x, weight)), COMPILED: compile_one(formula)}


def installed_peers() -> tuple[dict[str, Candidate], dict[str, str]]:
    """The optional libraries by name, and the reasons for those that are absent."""
    installed: dict[str, Candidate] = {}
    absent: dict[str, str] = {}
    for name, load in _PEERS.items():
        try:
            installed[name] = load()
        except Exception as error:  # an error while an optional library loads must not end the run
            absent[name] = f"it could not be loaded ({first_line(error)}); the extra `peers` installs it"
    return installed, absent


def _of_this_package(backend: Backend) -> Candidate:
    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, weight, eps=EPS, residual=residual, backend=backend)

    def quantise(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, weight, eps=EPS, out_dtype=torch.float8_e4m3fn, scale="dynamic", backend=backend)

    def norm(width: int, eps: float) -> torch.nn.Module:
        return RMSNorm(width, eps, backend=backend)

    return Candidate(partial(rms_norm, eps=EPS, backend=backend), add, quantise, norm)


def _why_not(name: Implementation, device: Device) -> str | None:
    if (name == "cuda") != (device == "cuda") and name in ("cuda", "cpp"):
        return f"it is not for tensors on {device}, where this run measured"
    if device == "cpu" and name == "triton":
        return "Triton's interpreter, which runs it on a CPU, checks results and says nothing of speed"
    return unavailable(name, device) or _build_failure(name, device)


def _build_failure(name: Implementation, device: Device) -> str | None:
    """Build an implementation if needed; returns the first line of the error, or None."""
    try:
        rms_norm(torch.ones(1, 8, device=device), eps=EPS, backend=name)
    except UserError as error:  # no compiler, a compiler's error, a prebuilt library for another machine
        return str(error).strip().splitlines()[0].rstrip(".")
    return None


def _torch_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def _torch_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = x + residual
    return _torch_rms_norm(s, weight), s


def _quack() -> Candidate:
    rmsnorm: Any = importlib.import_module("quack.rmsnorm").rmsnorm
    return Candidate(
        lambda x, weight: rmsnorm(x, weight, eps=EPS),
        lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True),
    )


def _liger() -> Candidate:
    plain: Any = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    add: Any = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return Candidate(
        lambda x, weight: plain.apply(x, weight, *_LIGER_ARGUMENTS),
        lambda x, residual, weight: add.apply(x, residual, weight, *_LIGER_ARGUMENTS),
    )


def _liger_cute() -> Candidate:
    plain: Any = importlib.import_module("liger_kernel.ops.backends._cutedsl.rms_norm").rms_norm_cutedsl
    module = importlib.import_module("liger_kernel.ops.backends._cutedsl.fused_add_rms_norm")
    add: Any = module.fused_add_rms_norm_cutedsl
    return Candidate(
        lambda x, weight: plain(x, weight, *_LIGER_ARGUMENTS),
        lambda x, residual, weight: add(x, residual, weight, *_LIGER_ARGUMENTS),
        widest=32768,  # for wider rows it calls Liger's Triton kernels
    )


_PEERS: dict[str, Callable[[], Candidate]] = {QUACK: _quack, LIGER: _liger, LIGER_CUTE: _liger_cute}

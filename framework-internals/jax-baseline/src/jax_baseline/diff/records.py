"""The records that :mod:`jax_baseline.diff.measurements` writes and :mod:`jax_baseline.report.hlo_sections` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchkit import Quantity
from benchkit.typed_records import TypedRecord
from jax_baseline.diff.region_diff import Diff
from jax_baseline.hlo import Phase, Summary


@dataclass(frozen=True)
class LongKernel:
    """One of the kernels that take longest, with its runs, its work and its time in one step."""

    name: str
    kind: str
    ops: Mapping[str, int]
    region: str
    phase: Phase
    location: str
    flops: int
    bytes: int
    seconds: float | None
    calls: int | None = None


@dataclass(frozen=True)
class CompiledModel:
    """What was compiled."""

    preset: str
    batch_size: int  # number of sequences, over all devices
    dtype: str
    layers: int
    attention: str  # attention of the JAX model
    # Tokens of a sequence where memory decided the size of the step. None stands for the preset's.
    block_size: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A program of XLA in numbers. None stands for what is not known of it."""

    summary: Summary
    longest: tuple[LongKernel, ...]
    stablehlo_operations: Quantity | None = None
    temporaries: Quantity | None = None
    compile_time: Quantity | None = None
    kernel_time: Quantity | None = None  # sum of the times of the kernels in a step
    kernels_timed: Quantity | None = None  # number of kernels that the profiler saw
    step_time: Quantity | None = None  # median time of a step
    xla_flops: Quantity | None = None  # XLA's own count
    xla_bytes: Quantity | None = None  # XLA's own count


@dataclass(frozen=True)
class StepRecord(
    StepFigures,
    CompiledModel,
    TypedRecord,
    name="hlo step",
    labels=("preset", "batch_size", "dtype", "layers", "attention", "repeats"),
):
    """XLA's program of the train step."""

    repeats: int


@dataclass(frozen=True, kw_only=True)
class DiffRecord(
    Diff,
    CompiledModel,
    TypedRecord,
    name="region diff",
    labels=("preset", "batch_size", "dtype", "layers", "attention", "repeats"),
):
    """XLA and Inductor on the loss and gradients of the baseline. Sources are quoted in the explained regions only."""

    repeats: int
    explained: tuple[tuple[str, str], ...]  # (name, phase) of the regions that differ most


@dataclass(frozen=True)
class TargetRecord(
    CompiledModel,
    TypedRecord,
    name="hlo target",
    labels=("preset", "layers", "batch_size", "dtype", "attention", "layout", "devices"),
):
    """XLA's program of the train step for H200s, compiled without a GPU."""

    layout: str
    devices: int
    arguments: Quantity  # bytes of weights, optimizer state and batch on one device
    temporaries: Quantity  # bytes of scratch memory on one device
    compile_time: Quantity
    summary: Summary

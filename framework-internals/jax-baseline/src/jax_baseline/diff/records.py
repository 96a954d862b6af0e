"""The records that :mod:`jax_baseline.diff.measurements` writes and :mod:`jax_baseline.report.hlo_sections` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit import Quantity
from benchkit.typed_records import TypedRecord
from jax_baseline.diff.region_diff import Region
from jax_baseline.hlo import Phase, Summary


@dataclass(frozen=True)
class LongKernel:
    """One of the kernels that take longest, with the work and the time of one step."""

    name: str
    kind: str
    ops: Mapping[str, int]
    region: str
    phase: Phase
    location: str
    flops: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class CompiledModel:
    """What was compiled.

    Attributes:
        batch_size: Number of sequences, over all devices.
        attention: Attention of the JAX model.
    """

    preset: str
    batch_size: int
    dtype: str
    layers: int
    attention: str


@dataclass(frozen=True)
class StepRecord(
    CompiledModel,
    TypedRecord,
    name="hlo step",
    labels=("preset", "batch_size", "dtype", "layers", "attention", "repeats"),
):
    """XLA's program of the train step.

    Attributes:
        kernel_time: Sum of the times of the kernels in a step.
        kernels_timed: Number of kernels that the profiler saw.
        step_time: Median time of a step. None if it was not measured.
        xla_flops: XLA's own count. None if XLA has none.
        xla_bytes: XLA's own count. None if XLA has none.
    """

    repeats: int
    stablehlo_operations: Quantity
    temporaries: Quantity
    compile_time: Quantity
    kernel_time: Quantity
    kernels_timed: Quantity
    summary: Summary
    longest: tuple[LongKernel, ...]
    step_time: Quantity | None = None
    xla_flops: Quantity | None = None
    xla_bytes: Quantity | None = None


@dataclass(frozen=True)
class Assigned:
    """How many kernels were assigned to a part of the model by label, by equal values in memory, and not at all."""

    label: Quantity
    value: Quantity
    nothing: Quantity


@dataclass(frozen=True)
class CompilerTotals:
    """The program of one compiler.

    Attributes:
        only: Bytes of the tensors that the other compiler never writes to memory.
        copies: Bytes of second copies of common tensors.
    """

    kernels: Quantity
    bytes: Quantity
    compile_time: Quantity
    only: Quantity
    copies: Quantity
    assigned: Assigned
    time: Quantity | None = None


@dataclass(frozen=True)
class DiffRecord(
    CompiledModel,
    TypedRecord,
    name="region diff",
    labels=("preset", "batch_size", "dtype", "layers", "attention", "repeats"),
):
    """XLA and Inductor on the loss and gradients of the baseline.

    Attributes:
        common: Bytes of the tensors that both compilers write to memory.
        regions: The regions. Sources are quoted in the explained regions only.
        explained: (name, phase) of the regions that differ most.
        largest_difference: Largest relative difference between two results. None if their numbers differ.
    """

    repeats: int
    common: Quantity
    compilers: Mapping[str, CompilerTotals]
    regions: tuple[Region, ...]
    explained: tuple[tuple[str, str], ...]
    notes: Mapping[str, tuple[str, ...]]
    largest_difference: Quantity | None = None


@dataclass(frozen=True)
class TargetRecord(
    CompiledModel,
    TypedRecord,
    name="hlo target",
    labels=("preset", "layers", "batch_size", "dtype", "attention", "layout", "devices"),
):
    """XLA's program of the train step for H200s, compiled without a GPU.

    Attributes:
        arguments: Bytes of weights, optimizer state and batch on one device.
        temporaries: Bytes of scratch memory on one device.
    """

    layout: str
    devices: int
    arguments: Quantity
    temporaries: Quantity
    compile_time: Quantity
    summary: Summary

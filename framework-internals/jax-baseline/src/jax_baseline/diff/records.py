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
    """One of the kernels of the step that take longest.

    Attributes:
        name: Name of the HLO instruction.
        kind: Kind of kernel.
        ops: Number of operations inside by name.
        region: Scopes of the operation that does most of the work.
        phase: forward, backward or other.
        location: Line of the source. Empty if it is unknown.
        flops: Floating-point operations in one step.
        bytes: Bytes read and written in one step.
        seconds: Time in one step. None if it was not measured.
    """

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
        preset: Preset of the model.
        batch_size: Number of sequences, over all devices.
        dtype: Dtype of the matrix products.
        layers: Number of blocks.
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
        repeats: Number of profiled steps.
        stablehlo_operations: Number of StableHLO operations.
        kernels: Number of kernels.
        flops: Floating-point operations of a step.
        bytes: Bytes that the kernels touch in a step.
        whole_bytes: Bytes with all operands and results whole, as XLA counts them.
        library_flops: Share of ``flops`` in library calls.
        library_bytes: Share of ``whole_bytes`` in library calls.
        arguments: Bytes of the arguments.
        donated: Bytes of the donated arguments.
        temporaries: Bytes of scratch memory.
        compile_time: Time of tracing, lowering and compilation.
        kernel_time: Sum of the times of the kernels in a step.
        kernels_timed: Number of kernels that the profiler saw.
        summary: Counts by kind and by region.
        longest: Kernels that take longest.
        step_time: Median time of a step. None if it was not measured.
        xla_flops: XLA's own count. None if XLA has none.
        xla_bytes: XLA's own count. None if XLA has none.
    """

    repeats: int
    stablehlo_operations: Quantity
    kernels: Quantity
    flops: Quantity
    bytes: Quantity
    whole_bytes: Quantity
    library_flops: Quantity
    library_bytes: Quantity
    arguments: Quantity
    donated: Quantity
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
    """How many kernels were assigned to a part of the model.

    Attributes:
        label: By label.
        value: By equal values in memory.
        nothing: Not assigned.
    """

    label: Quantity
    value: Quantity
    nothing: Quantity


@dataclass(frozen=True)
class CompilerTotals:
    """The program of one compiler.

    Attributes:
        kernels: Number of kernel launches.
        bytes: Bytes that they read and write.
        compile_time: Time of the compilation.
        only: Bytes of the tensors that the other compiler never writes to memory.
        copies: Bytes of second copies of common tensors.
        assigned: Number of kernels by how they were assigned to a part of the model.
        time: Median time of one run. None if it was not measured.
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
        repeats: Number of timed runs.
        common: Bytes of the tensors that both compilers write to memory.
        compilers: Totals by compiler.
        regions: The regions. Sources are quoted in the explained regions only.
        explained: (name, phase) of the regions that differ most.
        notes: By compiler, what could not be observed, and why.
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
        layout: Layout of the weights.
        devices: Number of GPUs.
        kernels: Number of kernels.
        bytes: Bytes that the kernels touch in a step.
        arguments: Bytes of weights, optimizer state and batch on one device.
        temporaries: Bytes of scratch memory on one device.
        compile_time: Time of tracing, lowering and compilation.
        summary: Counts by kind and by region.
    """

    layout: str
    devices: int
    kernels: Quantity
    bytes: Quantity
    arguments: Quantity
    temporaries: Quantity
    compile_time: Quantity
    summary: Summary

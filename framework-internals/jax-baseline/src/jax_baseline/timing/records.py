"""The records of the timing part, see :mod:`benchkit.typed_records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchkit import Quantity
from benchkit.typed_records import TypedRecord
from jax_baseline.timing.engines import EngineSpec


@dataclass(frozen=True)
class EngineFigures:
    """Figures of one engine.

    Attributes:
        rate: Tokens per second, over all devices.
        step: Median time of a step.
        first_step: Time of the first step, compilation included.
        loss: Loss of the first step.
        speedup: Speedup over the reference, paired by round; 1 for the reference.
        compile_stages: Times of ``trace``, ``lower`` and ``compile``. Empty for torch.
        peak_memory: Peak memory in bytes. None on a CPU.
        temporaries: Bytes of scratch memory. None if the compiler does not report them.
        xla_flops: XLA's count of floating-point operations. None for torch.
        mfu: Model FLOPs utilisation. None on a CPU.
    """

    rate: Quantity
    step: Quantity
    first_step: Quantity
    loss: Quantity
    speedup: Quantity
    compile_stages: Mapping[str, Quantity] = field(default_factory=dict)
    peak_memory: Quantity | None = None
    temporaries: Quantity | None = None
    xla_flops: Quantity | None = None
    mfu: Quantity | None = None


@dataclass(frozen=True)
class EngineRecord(TypedRecord, name="engine", labels=("engine", "framework")):
    """One timed engine.

    Attributes:
        engine: Name of the engine.
        framework: ``torch`` or ``jax``.
        spec: The variant of the step.
        figures: The figures.
    """

    engine: str
    framework: str
    spec: EngineSpec
    figures: EngineFigures


@dataclass(frozen=True)
class ModelRecord(TypedRecord, name="model"):
    """The timed model.

    Attributes:
        flops: Floating-point operations that the tokens of a step need.
        model: Fields of the model's configuration.
        training: Fields of the training configuration.
    """

    flops: Quantity
    model: Mapping[str, Any]
    training: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Origin of a record that a later command adds to a run.

    Attributes:
        date: Date of the measurement.
        command: Command line of the measurement.
        commit: Commit of the measurement. None if it is unknown.
        dirty: Whether the commit was changed. None if it is unknown.
    """

    date: str
    command: str
    commit: str | None
    dirty: bool | None


@dataclass(frozen=True)
class ScalingFigures:
    """Figures of the step on several GPUs.

    Attributes:
        rate: Tokens per second, over all GPUs.
        step: Median time of a step.
        step_of_one: Median time of a step on one GPU.
        efficiency: Time of a step on one GPU over that on the mesh.
        peak_memory: Peak memory of a GPU in bytes. None if it was not measured.
    """

    rate: Quantity
    step: Quantity
    step_of_one: Quantity
    efficiency: Quantity
    peak_memory: Quantity | None = None


@dataclass(frozen=True)
class ScalingRecord(TypedRecord, name="scaling", labels=("data", "fsdp")):
    """The step on several GPUs, timed against one GPU, or the reason why it failed.

    Attributes:
        data: Number of replicas of the weights.
        fsdp: Number of GPUs that share one replica.
        source: Origin of the record.
        figures: The figures. None if the measurement failed.
        collectives: Number of collectives in the compiled step by kind.
        failed: The error. Empty if the measurement succeeded.
    """

    data: int
    fsdp: int
    source: Source
    figures: ScalingFigures | None = None
    collectives: Mapping[str, int] = field(default_factory=dict)
    failed: str = ""

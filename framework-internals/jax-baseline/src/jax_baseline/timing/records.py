"""The records of the timing part, see :mod:`benchkit.typed_records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchkit import Quantity
from benchkit.typed_records import TypedRecord
from engines.measure import EngineFigures
from engines.spec import EngineSpec


@dataclass(frozen=True)
class EngineRecord(TypedRecord, name="engine", labels=("engine", "framework")):
    """One timed engine."""

    engine: str
    framework: str
    spec: EngineSpec
    figures: EngineFigures


@dataclass(frozen=True)
class Source:
    """Origin of a record that a later command adds to a run."""

    date: str
    command: str
    commit: str | None  # commit of the measurement. None if it is unknown
    dirty: bool | None  # whether the commit was changed. None if it is unknown


@dataclass(frozen=True)
class ScalingFigures:
    """Figures of the step on several GPUs."""

    rate: Quantity
    step: Quantity
    step_of_one: Quantity  # median time of a step on one GPU
    efficiency: Quantity  # time of a step on one GPU over that on the mesh
    peak_memory: Quantity | None = None


@dataclass(frozen=True)
class ScalingRecord(TypedRecord, name="scaling", labels=("data", "fsdp")):
    """The step on several GPUs, timed against one GPU, or the reason why it failed."""

    data: int  # number of replicas of the weights
    fsdp: int  # number of GPUs that share one replica
    source: Source
    figures: ScalingFigures | None = None  # the figures. None if the measurement failed
    collectives: Mapping[str, int] = field(default_factory=dict)
    failed: str = ""  # the error. Empty if the measurement succeeded

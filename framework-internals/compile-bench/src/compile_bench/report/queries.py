"""The measured cases of a report: each with its eager start and verdict, selected and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchkit.device import Device
from benchkit.results import Results
from compile_bench.capture.phases import PHASES
from compile_bench.measure.measurements import Accuracy, FirstSteps, Steady
from compile_bench.measure.records import (
    CaseRecord,
    Compilation,
    EagerStart,
    FailedCell,
    ShapesRecord,
    SweepCall,
)
from compile_bench.measure.verdict import Verdict, judge
from compile_bench.targets.case import MODES, Case

Model = tuple[str, str]  # target and kind

Entry = TypeVar("Entry", "MeasuredCase", FailedCell, "MeasuredCase | FailedCell")

# States of the caches in which first steps were measured: the field of a case, and a name for a reader.
CACHES = {"cold": "empty caches", "warm": "warm caches", "artifact": "cache artifacts"}
TUNED = "choices of autotuning"

# The part of the first steps that is not compiling.
RUNNING = "running the steps"


@dataclass(frozen=True)
class MeasuredCase:
    """The record of a case with the eager start of its model, for :func:`compile_bench.measure.verdict.judge`."""

    record: CaseRecord  # everything that was measured about the case
    eager: FirstSteps  # first eager steps of its model
    device: Device  # device that the run measured

    @property
    def case(self) -> Case:
        """What was measured."""
        record = self.record
        return Case(record.target, self.device, record.kind == "training", record.mode, None, record.scope)

    @property
    def cold(self) -> FirstSteps:
        """First steps with empty caches, or with what autotuning left in them."""
        return self.record.cold

    @property
    def warm(self) -> FirstSteps | None:
        """First steps with warm caches."""
        return self.record.warm

    @property
    def artifact(self) -> FirstSteps | None:
        """First steps with cache artifacts."""
        return self.record.artifact

    @property
    def steady(self) -> Steady:
        """Steps after all compiling."""
        return self.record.steady

    @property
    def accuracy(self) -> Accuracy:
        """Outputs and gradients against float64."""
        return self.record.accuracy

    @property
    def compilation(self) -> Compilation:
        """What was compiled."""
        return self.record.compilation

    @property
    def verdict(self) -> Verdict:
        """What to do, and why."""
        return judge(self)

    @property
    def model(self) -> Model:
        """Target and kind."""
        return self.record.model

    @property
    def mode(self) -> str:
        """Mode, and scope unless it is the whole model."""
        return self.record.mode if self.record.scope == "whole" else f"{self.record.mode}, {self.record.scope}"

    @property
    def swept(self) -> bool:
        """Whether ``run.py --sweep`` measured the case, not the main job."""
        return self.record.sweep_call > 0

    @property
    def compiled_alone(self) -> bool:
        """Whether its first steps are those of a model that is compiled alone on the machine, from empty caches."""
        return self.record.processes == 1 and not self.swept and not self.record.tuned

    @property
    def starts(self) -> list[tuple[str, FirstSteps]]:
        """The first compiled steps, each with the state of the caches in words."""
        names = {**CACHES, "cold": TUNED} if self.record.tuned else CACHES
        starts = ((name, getattr(self, field)) for field, name in names.items())
        return [(name, start) for name, start in starts if start is not None]


def measured_cases(results: Results) -> list[MeasuredCase]:
    """All cases in the order of their records."""
    eager = {record.model: record.start for record in EagerStart.select(results)}
    device: Device = "cpu" if results.environment.gpu is None else "cuda"
    return [MeasuredCase(record, eager[record.model], device) for record in CaseRecord.select(results)]


def compiled_alone(cases: Iterable[MeasuredCase]) -> list[MeasuredCase]:
    """The cases that were compiled alone on the machine, by the main job."""
    return [case for case in cases if case.compiled_alone]


def opening_case(cases: Sequence[MeasuredCase]) -> MeasuredCase:
    """The case that a report opens with: the first in mode default."""
    return next((case for case in cases if case.mode == "default"), cases[0])


def case_named(cases: Iterable[MeasuredCase], model: Model, mode: str) -> MeasuredCase | None:
    """The case of a model in a mode; None if it was not measured."""
    return next((case for case in cases if case.model == model and case.mode == mode), None)


def title(case: MeasuredCase | FailedCell | ShapesRecord, *, mode: bool = True) -> str:
    """A case for a reader: target, kind, and mode and scope unless they are the usual ones."""
    record: CaseRecord | FailedCell | ShapesRecord = case.record if isinstance(case, MeasuredCase) else case
    text = f"{record.target} {record.kind}"
    unusual = case.mode.removeprefix("default").removeprefix(", ")
    return f"{text}, {unusual}" if mode and unusual else text


def models(results: Results, entries: Iterable[MeasuredCase | FailedCell]) -> list[Model]:
    """Target and kind of all entries: in the order of the sweep's groups after a sweep, else in their own order."""
    present = dict.fromkeys(entry.model for entry in entries)
    if not SweepCall.select(results):
        return list(present)
    order = [target for group in results.configuration["sweep"]["groups"] for target in group]
    return sorted(present, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))


def in_order(results: Results, entries: Sequence[Entry]) -> list[Entry]:
    """Entries sorted by model and kind, and then by mode. A sweep records them in the order in which they end."""
    order = models(results, entries)
    return sorted(entries, key=lambda entry: (order.index(entry.model), mode_index(entry.mode)))


def mode_index(mode: str) -> int:
    """PyTorch's modes in their order, then those with a scope."""
    return [*MODES, mode].index(mode)


def start_parts(start: FirstSteps) -> dict[str, float]:
    """Seconds of the parts of the first steps, in the order they happen; 0 for a part that did not happen."""
    return {
        "import of the compiler": start.import_seconds,
        "toolchain check": start.toolchain_seconds,
        **{phase: start.phases.get(phase, 0.0) for phase in PHASES},
        RUNNING: start.rest,
        "loading artifacts": start.artifact_seconds,
    }


@dataclass(frozen=True)
class NamedStart:
    """First steps with a name for a reader."""

    title: str  # the case, without its mode for eager
    caches: str  # state of the caches, or eager
    start: FirstSteps  # the steps


def named_starts(cases: Iterable[MeasuredCase]) -> list[NamedStart]:
    """The first steps of all cases, each model's eager start before its first case."""
    starts: list[NamedStart] = []
    for case in cases:
        eager = NamedStart(title(case, mode=False), "eager", case.eager)
        starts += [] if eager in starts else [eager]
        starts += [NamedStart(title(case), caches, start) for caches, start in case.starts]
    return starts

"""The measured cases of a report: each with its eager start and verdict, selected and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from benchkit.device import Device
from benchkit.results import Results
from compile_bench.capture.parsing import PHASES
from compile_bench.measure.records import Bench, EagerStart, FailedCell, FirstSteps, ShapeStudy, SweepCall
from compile_bench.targets.case import MODES

Model = tuple[str, str]  # target and kind

Entry = TypeVar("Entry", "Bench", FailedCell, "Bench | FailedCell")

# The part of the first steps that is not compiling.
RUNNING = "running the steps"


def measured_cases(results: Results) -> list[Bench]:
    """All cases in the order of their records."""
    eager = {first.model: first.start for first in EagerStart.select(results)}
    device: Device = "cpu" if results.environment.gpu is None else "cuda"
    return [replace(case, eager=eager[case.model], device=device) for case in Bench.select(results)]


def compiled_alone(cases: Iterable[Bench]) -> list[Bench]:
    """The cases that were compiled alone on the machine, by the main job."""
    return [case for case in cases if case.compiled_alone]


def opening_case(cases: Sequence[Bench]) -> Bench:
    """The case that a report opens with: the first in mode default."""
    return next((case for case in cases if case.variant == "default"), cases[0])


def case_named(cases: Iterable[Bench], model: Model, mode: str) -> Bench | None:
    """The case of a model in a mode; None if it was not measured."""
    return next((case for case in cases if case.model == model and case.variant == mode), None)


def title(case: Bench | FailedCell | ShapeStudy, *, mode: bool = True) -> str:
    """A case for a reader: target, kind, and mode and scope unless they are the usual ones."""
    variant = case.mode if isinstance(case, ShapeStudy) else case.variant
    unusual = variant.removeprefix("default").removeprefix(", ")
    return f"{' '.join(case.model)}, {unusual}" if mode and unusual else " ".join(case.model)


def models(results: Results, entries: Iterable[Bench | FailedCell]) -> list[Model]:
    """Target and kind of all entries: in the order of the sweep's groups after a sweep, else in their own order."""
    present = dict.fromkeys(entry.model for entry in entries)
    if not SweepCall.select(results):
        return list(present)
    order = [target for group in results.configuration["sweep"]["groups"] for target in group]
    return sorted(present, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))


def in_order(results: Results, entries: Sequence[Entry]) -> list[Entry]:
    """Entries sorted by model and kind, and then by mode. A sweep records them in the order in which they end."""
    order = models(results, entries)
    return sorted(entries, key=lambda entry: (order.index(entry.model), mode_index(entry.variant)))


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


def named_starts(cases: Iterable[Bench]) -> list[NamedStart]:
    """The first steps of all cases, each model's eager start before its first case."""
    starts: list[NamedStart] = []
    for case in cases:
        eager = NamedStart(title(case, mode=False), "eager", case.eager)
        starts += [] if eager in starts else [eager]
        starts += [NamedStart(title(case), caches, start) for caches, start in case.starts]
    return starts

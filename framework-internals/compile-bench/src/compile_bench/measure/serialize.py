"""Measurements as records of a report. No record contains a path of the machine that wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchkit.results import Record, Results
from compile_bench.capture.text import neutral_files
from compile_bench.capture.trace import CompileTrace
from compile_bench.measure.measurements import Bench, FirstSteps, Triage
from compile_bench.measure.records import CaseRecord, Compilation, CountedBreaks, EagerStart, ShapesRecord
from compile_bench.measure.shapes import Passes, ShapeStudy
from compile_bench.targets.case import Case


def case_record(
    bench: Bench, root: Path, *, processes: int = 1, sweep_call: int = 0, sweep_seconds: float = 0.0
) -> Record:
    """The record of one measured case, without its first eager steps (:func:`eager_record`)."""
    case = bench.case
    return CaseRecord(
        case.target,
        case.kind,
        case.mode,
        case.scope,
        cold=bench.cold,
        steady=bench.steady,
        compilation=_compilation(bench.trace, root),
        accuracy=bench.accuracy,
        warm=bench.warm,
        artifact=bench.artifact,
        memory=bench.memory,
        eager_profile=bench.eager_profile,
        compiled_profile=bench.compiled_profile,
        no_cudagraphs=bench.no_cudagraphs,
        artifact_bytes=bench.artifact_bytes,
        tuned=bench.tuned,
        processes=processes,
        sweep_call=sweep_call,
        sweep_seconds=sweep_seconds,
    ).record()


def eager_record(case: Case, first: FirstSteps) -> Record:
    """The record of the first eager steps, which all modes of a case share."""
    return EagerStart(case.target, case.kind, first).record()


def new_eager_records(bench: Bench, results: Results) -> list[Record]:
    """The record of a case's first eager steps; empty if ``results`` has it from another mode of the case."""
    known = results.select(EagerStart.record_name, target=bench.case.target, kind=bench.case.kind)
    return [] if known else [eager_record(bench.case, bench.eager)]


def triage_record(triage: Triage, root: Path) -> Record:
    """The record of counted breaks; ``root`` as for :func:`case_record`."""
    case = triage.case
    return CountedBreaks(case.target, case.kind, _compilation(triage.trace, root), triage.calls).record()


def shape_record(study: ShapeStudy, passes: Sequence[int], root: Path) -> Record:
    """The record of a shape study."""
    case = study.case
    strategies: dict[str, Passes] = {
        each.strategy: replace(each, recompiles=neutral_files(each.recompiles, root)) for each in study.passes
    }
    return ShapesRecord(
        case.target, case.kind, case.mode, study.schedule, study.varying, tuple(passes), strategies
    ).record()


def _compilation(trace: CompileTrace, root: Path) -> Compilation:
    checks = [graph.guard_seconds for graph in trace.graphs if graph.guard_seconds is not None]
    return Compilation(
        len(trace.graphs),
        trace.operations,
        trace.guards,
        trace.kernels,
        trace.handler_seconds,
        sum(checks) if checks else None,
        neutral_files(trace.breaks, root),
        neutral_files(trace.recompiles, root),
    )

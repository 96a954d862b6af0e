"""Measurements as records of a report. No record contains a path of the machine that wrote it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from benchkit.results import Record, Results
from compile_bench.capture.frames import Frame, has_packages
from compile_bench.capture.reasons import RECOMPILE_LIMIT
from compile_bench.capture.text import distinct, some
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.measure.measurements import Bench, FirstSteps, Triage
from compile_bench.measure.records import CaseRecord, Compilation, CountedBreaks, EagerStart, ShapesRecord
from compile_bench.measure.shapes import Passes, ShapeStudy
from compile_bench.targets.case import Case

# PyTorch's name and value of the limit, in its explanation.
_LIMIT = re.compile(r"exceeding the (\w+) cache size limit \(currently set to (\d+)\)")

_PYTHONS_OWN = re.compile(r"/lib/(python3\.\d+/.+)")
_PYTHON_FILE = re.compile(r"(?<![\w.\-])/[^\s'\":,()\[\]]+\.py\b")


def case_record(
    bench: Bench, root: Path, *, processes: int = 1, sweep_call: int = 0, sweep_seconds: float = 0.0
) -> Record:
    """The record of one measured case, without its first eager steps (:func:`eager_record`).

    Args:
        bench: What was measured.
        root: Files below it are named relative to it, others by their last part.
        processes: How many processes compiled at the same time.
        sweep_call: Number of the call of the sweep; 0 for the main job.
        sweep_seconds: Seconds that the sweep took for the case.
    """
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
    """The record of a shape study.

    Args:
        study: What was measured.
        passes: Numbers of passes that the report ranks the strategies for.
        root: See :func:`case_record`.
    """
    case = study.case
    strategies: dict[str, Passes] = {
        each.strategy: replace(each, recompiles=_neutral_files(each.recompiles, root)) for each in study.passes
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
        _neutral_files(trace.breaks, root),
        _neutral_files(trace.recompiles, root),
    )


def _neutral_files(entries: tuple[Any, ...], root: Path) -> tuple[Any, ...]:
    return tuple(replace(neutral(entry, root), file=shorten(entry.file, root)) for entry in entries)


def shorten(file: str, root: Path) -> str:
    """A file's name for a reader: relative to ``root``, within its package or Python's library, or its last part."""
    path = Path(file)
    around = path.parents if path.is_absolute() else ()
    if installed := next((folder for folder in around if folder == root or has_packages(folder)), None):
        return str(path.relative_to(installed))
    if library := _PYTHONS_OWN.search(file):
        return library[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def short_place(place: str, root: Path) -> str:
    """``file.py:LINE`` with the file's short name."""
    file, _, line = place.rpartition(":")
    return f"{shorten(file, root)}:{line}"


def break_lines(breaks: Sequence[Break], root: Path) -> list[str]:
    """One line for every cause of breaks, with the user's lines and the library's lines that they call."""
    causes: dict[str, dict[str, dict[str, None]]] = {}
    for met in breaks:
        reason = "; ".join(filter(None, (met.reason, no_longer_compiled(met))))
        called = causes.setdefault(reason, {}).setdefault(short_place(met.place, root), {})
        if met.library:
            called[short_place(met.library, root)] = None
    return [
        _at([place + (f" (in {some(list(called))})" if called else "") for place, called in places.items()], reason)
        for reason, places in causes.items()
    ]


def no_longer_compiled(found: Break, name: Callable[[Frame], str] = attrgetter("function")) -> str:
    """The functions that reached the recompile limit, with the limit; empty for any other break.

    Args:
        found: The break.
        name: Names a compiled function.
    """
    if found.category != RECOMPILE_LIMIT:
        return ""
    functions = distinct(f"{name(frame)} ({Path(frame.file).name}:{frame.line})" for frame in found.compiled)
    setting = _LIMIT.search(found.explanation)
    limit = f": {setting[1]} = {setting[2]}" if setting else ""
    return f"no longer compiled: {functions}{limit}" if functions else ""


def recompile_lines(recompiles: Sequence[Recompile], root: Path) -> list[str]:
    """One line for everything that changed, with the lines where it did and how often a function was compiled again."""
    times = Counter(each.identity for each in recompiles)
    causes: dict[str, list[tuple[str, str]]] = {}
    for each in {each.identity: each for each in reversed(recompiles)}.values():
        often = f" ({times[each.identity]} times)" if times[each.identity] > 1 else ""
        causes.setdefault(each.what_changed, []).insert(0, (recompiled(each, root), often))
    return [
        _at([f"{place}{often}" for place, often in places], what)
        if len(places) > 1
        else f"{places[0][0]}: {what}{places[0][1]}"
        for what, places in reversed(causes.items())
    ]


def recompiled(again: Recompile, root: Path) -> str:
    """Where a guard failed; for a library's line, the user's line that called it comes first."""
    place = short_place(again.place, root)
    return f"{short_place(again.called_from, root)} (in {place})" if again.called_from else place


def _at(places: Sequence[str], what: str) -> str:
    return f"{places[0]}: {what}" if len(places) == 1 else f"{what}, {len(places)} lines: {some(places)}"


def neutral(value: Any, root: Path) -> Any:
    """Apply :func:`shorten` to every absolute path of a Python file in the texts of ``value``.

    Dataclasses keep their type; other sequences become lists.
    """
    if isinstance(value, str):
        return _PYTHON_FILE.sub(lambda found: shorten(found[0], root), value)
    if isinstance(value, dict):
        return {key: neutral(each, root) for key, each in value.items()}
    if is_dataclass(value):
        changed = {field.name: neutral(getattr(value, field.name), root) for field in fields(value)}
        tuples = {name: tuple(each) if isinstance(each, list) else each for name, each in changed.items()}
        return replace(cast(Any, value), **tuples)
    return [neutral(each, root) for each in value] if isinstance(value, (list, tuple)) else value

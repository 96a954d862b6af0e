"""Results as records of a report: figures with units, and plain JSON for the lists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchkit import numbers
from benchkit.results import Json, Label, Quantity, Record
from compile_bench.capture.trace import CompileTrace
from compile_bench.measure.agreement import Agreement
from compile_bench.measure.measurements import Bench, ErrorPair, FirstSteps, StepProfile, Triage
from compile_bench.measure.shapes import ShapeStudy
from compile_bench.measure.verdict import CACHE_STATES, PLAN_RESTARTS, PLAN_STEPS, BreakEven, judge, plan
from compile_bench.targets.case import FIRST_STEPS, Case

_PYTHON_FILE = re.compile(r"(?<![\w.\-])/[^\s'\":,()\[\]]+\.py\b")


def case_labels(case: Case) -> dict[str, Label]:
    """The labels that all records of a case have."""
    mode = case.mode if case.scope == "whole" else f"{case.mode}, {case.scope}"
    return {"target": case.target, "kind": case.kind, "mode": mode}


def bench_records(bench: Bench, root: Path, *, side_by_side: int = 1) -> list[Record]:
    """The records of one measured case, without those of :func:`eager_record`.

    Args:
        bench: the case.
        root: files below it are named relative to it, others by their last part.
        side_by_side: how many processes compiled at the same time.
    """
    labels = case_labels(bench.case)
    starts = {"tuned" if bench.tuned else "cold": bench.cold, "warm": bench.warm, "artifact": bench.mega}
    records = [_first_steps(first, labels, cache, side_by_side) for cache, first in starts.items() if first is not None]
    steady = bench.steady
    values = {"eager": steady.eager, "compiled": steady.compiled, "speedup": steady.speedup}
    if steady.control is not None:
        values["control"] = steady.control
    data: dict[str, Json] = {"method": steady.method, "pressure": steady.pressure}
    if steady.untuned is not None:
        values |= {"untuned": steady.untuned.step, "speedup over untuned": steady.untuned.speedup}
        data["untuned mode"] = steady.untuned.mode
    records.append(Record("steady", labels, values, data))
    records.append(_trace(bench.trace, "compilation", labels, root))
    records.append(_accuracy(bench, labels))
    if bench.memory is not None:
        peaks = asdict(bench.memory)
        records.append(Record("memory", labels, {name: Quantity(peak, "B") for name, peak in peaks.items()}))
    if bench.eager_profile is not None and bench.compiled_profile is not None:
        records.append(_profile(bench.eager_profile, bench.compiled_profile, bench, labels))
    records.append(_verdict(bench, labels, planned=side_by_side == 1))
    return records


def _verdict(bench: Bench, labels: dict[str, Label], *, planned: bool) -> Record:
    """With plans only where the price is that of a machine to itself."""
    verdict = judge(bench)
    plans = [
        plan(bench, steps, restarts, cache)
        for restarts in PLAN_RESTARTS
        for cache in CACHE_STATES
        for steps in PLAN_STEPS
        if planned
    ]
    data = {
        "advice": verdict.advice,
        "why": verdict.why,
        "cold": None if bench.tuned else _plain(verdict.cold),
        "warm": _plain(verdict.warm),
        "artifact": _plain(verdict.mega),
        "plans": [asdict(each) for each in plans if each is not None],
    }
    values = {"price": Quantity(verdict.cost, "s")}
    if bench.artifact_bytes:
        values["artifact"] = Quantity(bench.artifact_bytes, "B")
    return Record("verdict", labels, values, data)


def _profile(eager: StepProfile, compiled: StepProfile, bench: Bench, labels: dict[str, Label]) -> Record:
    values = {"guards": Quantity(compiled.guard_seconds, "s")}
    if compiled.covered is not None:
        values["covered"] = Quantity(compiled.covered, "")
    for name, profile in (("eager", eager), ("compiled", compiled)):
        values[f"{name} operators"] = Quantity(profile.operators, "")
        if profile.kernels is not None and profile.launches is not None:
            values[f"{name} kernels"] = Quantity(profile.kernels, "")
            values[f"{name} launches"] = Quantity(profile.launches, "")
        if profile.busy_seconds is not None:
            values[f"{name} busy"] = Quantity(profile.busy_seconds, "s")
        values[f"{name} fused attention"] = Quantity(profile.fused_attention, "")
    costliest = {
        name: [asdict(kernel) for kernel in profile.costliest]
        for name, profile in (("eager", eager), ("compiled", compiled))
    }
    return Record("profile", labels, values, {"no cudagraphs": list(bench.no_cudagraphs), "dearest": costliest})


def shape_record(study: ShapeStudy, passes: Sequence[int], root: Path) -> Record:
    """The record of a shape study.

    Args:
        study: what was measured.
        passes: numbers of passes that the strategies are ranked for.
        root: as for :func:`bench_records`.
    """
    values: dict[str, Quantity] = {}
    strategies: list[Json] = []
    for each in study.passes:
        if each.later is not None:
            values[f"{each.strategy} first"] = Quantity(each.first, "s")
            values[f"{each.strategy} later"] = each.later
        strategies.append(
            {
                "strategy": each.strategy,
                "failed": each.failed,
                "graphs": each.compilations,
                "recompiles": _listed(each.recompiles, root),
            }
        )
    data = {
        "schedule": list(study.schedule),
        "varying": list(study.varying),
        "strategies": strategies,
        "rankings": {str(count): [each.strategy for each in study.ranking(count)] for count in passes},
    }
    return Record("shapes", case_labels(study.case), values, data)


def shape_passes(record: Record, strategy: str, passes: Any) -> Any:
    """Seconds of so many passes by a strategy of a shape record; a number or an array of them."""
    return record[f"{strategy} first"].value + (passes - 1) * record[f"{strategy} later"].value


def agreement_record(found: Agreement, root: Path) -> Record:
    """The record of three counts; ``root`` as for :func:`bench_records`."""
    values = {
        "graphs": Quantity(found.graphs, ""),
        "breaks": Quantity(len(found.places), ""),
        "met": Quantity(found.met, ""),
        "explain graphs": Quantity(found.explain_graphs, ""),
        "explain breaks": Quantity(found.explain_breaks, ""),
        "log breaks": Quantity(len(found.log_places), ""),
    }

    def neutral(places: tuple[str, ...]) -> tuple[str, ...]:
        parts = (place.rpartition(":") for place in places)
        return tuple(f"{shorten(file, root)}:{line}" for file, _, line in parts)

    shown = replace(found, places=neutral(found.places), log_places=neutral(found.log_places))
    data = {
        "places": list(shown.places),
        "differences": list(shown.differences),
        "explained": shown.explained,
    }
    return Record("agreement", case_labels(found.case), values, data)


def eager_record(case: Case, first: FirstSteps) -> Record:
    """The record of the first eager steps, which all modes of a case are held against."""
    return _first_steps(first, {**case_labels(case), "mode": "eager"}, "none", 1)


def first_steps_of(record: Record) -> FirstSteps:
    """The first eager steps of a record that :func:`eager_record` made."""
    return FirstSteps(tuple(record[f"step {index}"].value for index in range(1, FIRST_STEPS + 1)))


def triage_record(triage: Triage, root: Path) -> Record:
    """The record of a triage; ``root`` as for :func:`bench_records`."""
    record = _trace(triage.trace, "triage", case_labels(triage.case), root)
    return replace(record, values={**record.values, "calls": Quantity(triage.calls, "")})


def case_title(record: Record, *, mode: bool = True) -> str:
    """A record's case for a reader: target, kind, and mode and scope where they are not the usual ones."""
    text = f"{record.labels['target']} {record.labels['kind']}"
    unusual = str(record.labels["mode"]).removeprefix("default").removeprefix(", ")
    return f"{text}, {unusual}" if mode and unusual not in ("", "eager") else text


def shorten(file: str, root: Path) -> str:
    """A file's name for a reader: relative to ``root``, within its package, or its last part."""
    _, installed, within = file.rpartition("/site-packages/")
    if installed:
        return within
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def neutral(value: Any, root: Path) -> Any:
    """Plain data with every absolute path of a Python file in its texts as :func:`shorten` names it."""
    if isinstance(value, str):
        return _PYTHON_FILE.sub(lambda found: shorten(found[0], root), value)
    if isinstance(value, dict):
        return {key: neutral(each, root) for key, each in value.items()}
    return [neutral(each, root) for each in value] if isinstance(value, (list, tuple)) else value


def plural(count: int, noun: str) -> str:
    """1 break, 2 breaks."""
    return f"{numbers.count(count)} {noun}{'' if count == 1 else 's'}"


def _first_steps(first: FirstSteps, labels: dict[str, Label], cache: str, side_by_side: int) -> Record:
    values = {
        "total": Quantity(first.total, "s"),
        "import": Quantity(first.import_seconds, "s"),
        "toolchain": Quantity(first.toolchain_seconds, "s"),
        "artifact": Quantity(first.artifact_seconds, "s"),
        **{f"step {index}": Quantity(seconds, "s") for index, seconds in enumerate(first.steps, 1)},
    }
    phases = dict(first.trace.phases) if first.trace is not None else {}
    values |= {f"phase {name}": Quantity(seconds, "s") for name, seconds in phases.items()}
    # What the spans do not cover: running the steps, and whatever PyTorch does not time.
    values["rest"] = Quantity(max(sum(first.steps) - sum(phases.values()), 0.0), "s")
    events = dict(first.trace.cache_events) if first.trace is not None else {}
    return Record(
        "first steps", {**labels, "cache": cache}, values, {"cache events": events, "side by side": side_by_side}
    )


def _trace(trace: CompileTrace, name: str, labels: dict[str, Label], root: Path) -> Record:
    values = {
        "graphs": Quantity(len(trace.graphs), ""),
        "operations": Quantity(trace.operations, ""),
        "guards": Quantity(trace.guards, ""),
        "breaks": Quantity(len(trace.breaks), ""),
        "recompiles": Quantity(len(trace.recompiles), ""),
        "kernels": Quantity(trace.kernels, ""),
        "handler": Quantity(trace.handler_seconds, "s"),
    }
    checks = [graph.guard_seconds for graph in trace.graphs if graph.guard_seconds is not None]
    if checks:
        values["guard check"] = Quantity(sum(checks), "s")
    data = {"breaks": _listed(trace.breaks, root), "recompiles": _listed(trace.recompiles, root)}
    return Record(name, labels, values, data)


def _listed(entries: tuple[Any, ...], root: Path) -> list[Json]:
    return [{**neutral(asdict(entry), root), "file": shorten(entry.file, root)} for entry in entries]


def _accuracy(bench: Bench, labels: dict[str, Label]) -> Record:
    values: dict[str, Quantity] = {"tensors": Quantity(bench.accuracy.tensors, "")}
    for kind, pair in (("output", bench.accuracy.output), ("gradient", bench.accuracy.gradient)):
        if pair is not None:
            values |= _errors(kind, pair)
    gradient = bench.accuracy.gradient
    data = {
        "holds": bench.accuracy.holds,
        "skipped": bench.accuracy.skipped,
        "gradient": None if gradient is None else gradient.name,
        "attempts": bench.accuracy.attempts,
        "wrong": bench.accuracy.wrong,
    }
    return Record("accuracy", labels, values, data)


def _errors(kind: str, pair: ErrorPair) -> dict[str, Quantity]:
    figures = {"eager": pair.eager, "compiled": pair.compiled, "bound": pair.bound}
    return {f"{kind} {name}": Quantity(value, "") for name, value in figures.items()}


def _plain(even: BreakEven | None) -> Json:
    return None if even is None else asdict(even)

"""Results as records of a report: figures with units, and plain JSON for the lists."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchkit import numbers
from benchkit.results import Json, Label, Quantity, Record
from compile_bench.results import Bench, Case, ErrorPair, FirstSteps, Triage
from compile_bench.trace import CompileTrace
from compile_bench.verdict import BreakEven, judge


def case_labels(case: Case) -> dict[str, Label]:
    """The labels that all records of a case have."""
    return {"target": case.target, "kind": case.kind, "mode": case.mode}


def bench_records(bench: Bench, root: Path) -> list[Record]:
    """The records of one measured case, without those of :func:`eager_record`.

    Args:
        bench: the case.
        root: files below it are named relative to it, others by their last part.
    """
    labels = case_labels(bench.case)
    records = [_first_steps(bench.cold, labels, "cold")]
    if bench.warm is not None:
        records.append(_first_steps(bench.warm, labels, "warm"))
    steady = bench.steady
    records.append(
        Record(
            "steady",
            labels,
            {"eager": steady.eager, "compiled": steady.compiled, "speedup": steady.speedup},
            {"method": steady.method, "pressure": steady.pressure},
        )
    )
    records.append(_trace(bench.trace, "compilation", labels, root))
    records.append(_accuracy(bench, labels))
    if bench.memory is not None:
        peaks = {"eager": bench.memory.eager, "compiled": bench.memory.compiled}
        records.append(Record("memory", labels, {name: Quantity(peak, "B") for name, peak in peaks.items()}))
    verdict = judge(bench)
    data = {"advice": verdict.advice, "why": verdict.why, "cold": _plain(verdict.cold), "warm": _plain(verdict.warm)}
    records.append(Record("verdict", labels, {"price": Quantity(verdict.price, "s")}, data))
    return records


def eager_record(case: Case, first: FirstSteps) -> Record:
    """The record of the first eager steps, which all modes of a case are held against."""
    return _first_steps(first, {**case_labels(case), "mode": "eager"}, "none")


def triage_record(triage: Triage, root: Path) -> Record:
    """The record of a triage; ``root`` as for :func:`bench_records`."""
    record = _trace(triage.trace, "triage", case_labels(triage.case), root)
    return replace(record, values={**record.values, "calls": Quantity(triage.calls, "")})


def case_title(record: Record, *, mode: bool = True) -> str:
    """A record's case for a reader: target, kind, and the mode where it is not the default."""
    text = f"{record.labels['target']} {record.labels['kind']}"
    return f"{text}, {record.labels['mode']}" if mode and record.labels["mode"] not in ("default", "eager") else text


def shorten(file: str, root: Path) -> str:
    """A file's name for a reader: relative to ``root``, or its last part."""
    path = Path(file)
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def plural(count: int, noun: str) -> str:
    """1 break, 2 breaks."""
    return f"{numbers.count(count)} {noun}{'' if count == 1 else 's'}"


def _first_steps(first: FirstSteps, labels: dict[str, Label], cache: str) -> Record:
    values = {
        "total": Quantity(first.total, "s"),
        "import": Quantity(first.import_seconds, "s"),
        "toolchain": Quantity(first.toolchain_seconds, "s"),
        **{f"step {index}": Quantity(seconds, "s") for index, seconds in enumerate(first.steps, 1)},
    }
    phases = dict(first.trace.phases) if first.trace is not None else {}
    values |= {f"phase {name}": Quantity(seconds, "s") for name, seconds in phases.items()}
    # What the spans do not cover: running the steps, and whatever PyTorch does not time.
    values["rest"] = Quantity(max(sum(first.steps) - sum(phases.values()), 0.0), "s")
    events = dict(first.trace.cache_events) if first.trace is not None else {}
    return Record("first steps", {**labels, "cache": cache}, values, {"cache events": events})


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
    return [{**asdict(entry), "file": shorten(entry.file, root)} for entry in entries]


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
    }
    return Record("accuracy", labels, values, data)


def _errors(kind: str, pair: ErrorPair) -> dict[str, Quantity]:
    figures = {"eager": pair.eager, "compiled": pair.compiled, "bound": pair.bound}
    return {f"{kind} {name}": Quantity(value, "") for name, value in figures.items()}


def _plain(even: BreakEven | None) -> Json:
    return None if even is None else asdict(even)

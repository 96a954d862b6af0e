"""Turns the records of results.json as version 0.1 wrote them into today's.

Version 0.1 (schema 1) had eight records for a case, with composed names for their figures (``"phase Dynamo"``,
``"eager kernels"``), and stored totals, verdicts and rankings, which the report now computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from benchkit.results import Quantity, Record, Results
from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import Break, Recompile
from compile_bench.measure.measurements import (
    Accuracy,
    ErrorPair,
    FirstSteps,
    KernelTime,
    Memory,
    Steady,
    StepProfile,
    Untuned,
    kernel_name,
)
from compile_bench.measure.records import (
    CaseRecord,
    Compilation,
    CountedBreaks,
    EagerStart,
    FailedCell,
    ShapesRecord,
    SweepCall,
    Toolchain,
)
from compile_bench.measure.shapes import Passes, Strategy
from compile_bench.targets.case import FIRST_STEPS, Mode, Scope
from compile_bench.triage.migrate import migrate_triage_record

# The records of one case by name; of first steps by state of the caches.
_Parts = dict[str, Record]


def migrate(results: Results) -> Results:
    """Results with today's records, in the order of the old ones; every measured figure is kept as it is."""
    parts: dict[tuple[object, ...], _Parts] = defaultdict(dict)
    for record in results.records:
        labels = record.labels
        if "mode" in labels:
            parts[labels["target"], labels["kind"], labels["mode"]][str(labels.get("cache", record.name))] = record
    records = tuple(
        new
        for record in results.records
        for new in _migrated(record, parts[tuple(map(record.labels.get, ("target", "kind", "mode")))])
    )
    return replace(results, records=records, configuration=_configuration(results.configuration))


def _configuration(old: Mapping[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in old.items() if key != "agreement"}
    if "triage_bill" in new:
        new["triage_in_full"] = new.pop("triage_bill")
    if "sweep" in old:
        sweep = dict(old["sweep"])
        new["sweep"] = {"processes": sweep.pop("side_by_side"), **sweep}
    return new


def _migrated(record: Record, case: _Parts) -> Iterator[Record]:
    """The records that stand where an old one stood."""
    labels, data = record.labels, record.data or {}
    if record.name == "toolchain":
        yield Toolchain(data["seconds"], data.get("forked", False)).record()
    elif record.name == "sweep call":
        source = {name: data[name] for name in ("date", "command", "commit", "dirty")}
        yield SweepCall(cast(int, labels["call"]), **source).record()
    elif record.name == "first steps" and labels["mode"] == "eager":
        yield EagerStart(*_model(record), _start(record)).record()
    elif record.name == "verdict":
        yield _case(case).record()
    elif record.name == "cell" and data["failed"]:
        mode = cast(Mode, labels["mode"])
        seconds = record["seconds"].value
        yield FailedCell(*_model(record), mode, data["failed"], seconds, data["call"]).record()
    elif record.name == "shapes":
        yield _shapes(record).record()
    elif record.name == "triage":
        calls = int(record["calls"].value)
        yield CountedBreaks(*_model(record), _compilation(record), calls).record()
    elif (triage := migrate_triage_record(record)) is not None:
        yield triage


def _model(record: Record) -> tuple[str, str]:
    return str(record.labels["target"]), str(record.labels["kind"])


def _case(parts: _Parts) -> CaseRecord:
    steady, profile, cell = parts["steady"], parts.get("profile"), parts.get("cell")
    mode, _, scope = str(steady.labels["mode"]).partition(", ")
    cold = parts.get("cold") or parts["tuned"]
    artifact = parts["verdict"].values.get("artifact")
    return CaseRecord(
        *_model(steady),
        cast(Mode, mode),
        cast(Scope, scope or "whole"),
        cold=_start(cold),
        steady=_steady(steady),
        compilation=_compilation(parts["compilation"]),
        accuracy=_accuracy(parts["accuracy"]),
        warm=_start(parts["warm"]) if "warm" in parts else None,
        artifact=_start(parts["artifact"]) if "artifact" in parts else None,
        memory=_memory(parts["memory"]) if "memory" in parts else None,
        eager_profile=_profile(profile, "eager") if profile else None,
        compiled_profile=_profile(profile, "compiled") if profile else None,
        no_cudagraphs=tuple(profile.data["no cudagraphs"]) if profile else (),
        artifact_bytes=int(artifact.value) if artifact else 0,
        tuned="tuned" in parts,
        processes=cold.data.get("side by side", 1),
        sweep_call=cell.data["call"] if cell else 0,
        sweep_seconds=cell["seconds"].value if cell else 0.0,
    )


def _start(record: Record) -> FirstSteps:
    return FirstSteps(
        tuple(record[f"step {index}"].value for index in range(1, FIRST_STEPS + 1)),
        record["import"].value,
        record["toolchain"].value,
        record["artifact"].value,
        {name.removeprefix("phase "): each.value for name, each in record.values.items() if name.startswith("phase ")},
        record.data["cache events"],
    )


def _steady(record: Record) -> Steady:
    untuned = None
    if "untuned" in record.values:
        untuned = Untuned(record.data["untuned mode"], record["untuned"], record["speedup over untuned"])
    return Steady(
        record["eager"],
        record["compiled"],
        record["speedup"],
        record.data["method"],
        record.data["pressure"],
        record.values.get("control"),
        untuned,
    )


def _compilation(record: Record) -> Compilation:
    check = record.values.get("guard check")
    return Compilation(
        int(record["graphs"].value),
        int(record["operations"].value),
        int(record["guards"].value),
        int(record["kernels"].value),
        record["handler"].value,
        None if check is None else check.value,
        tuple(_break(entry) for entry in record.data["breaks"]),
        _recompiles(record.data["recompiles"]),
    )


def _break(entry: Mapping[str, Any]) -> Break:
    columns = entry.get("columns")
    stack = tuple(Frame(**frame) for frame in entry.get("stack", ()))
    texts = {name: tuple(entry[name]) for name in ("hints", "compile_ids") if name in entry}
    return Break(**{**entry, **texts, "stack": stack, "columns": None if columns is None else tuple(columns)})


def _recompiles(entries: list[Mapping[str, Any]]) -> tuple[Recompile, ...]:
    kept = [{name: each for name, each in entry.items() if name != "cause"} for entry in entries]  # the guard says it
    return tuple(Recompile(**{**entry, "file": entry["file"].rpartition("site-packages/")[2]}) for entry in kept)


def _accuracy(record: Record) -> Accuracy:
    def pair(kind: str, name: str) -> ErrorPair | None:
        if f"{kind} eager" not in record.values:
            return None
        return ErrorPair(name, *(record[f"{kind} {part}"].value for part in ("eager", "compiled", "bound")))

    data = record.data
    return Accuracy(
        pair("output", "output"),
        pair("gradient", data["gradient"]),
        int(record["tensors"].value),
        data["skipped"],
        data.get("attempts", 1),
        data.get("wrong", ""),
    )


def _memory(record: Record) -> Memory:
    return Memory(*(int(record[name].value) for name in ("eager", "compiled", "captured")))


def _profile(record: Record, program: str) -> StepProfile:
    def value(name: str) -> float | None:
        figure: Quantity | None = record.values.get(f"{program} {name}")
        return None if figure is None else figure.value

    compiled = program == "compiled"
    covered = record.values.get("covered")
    return StepProfile(
        covered=covered.value if covered and compiled else None,
        operators=record[f"{program} operators"].value,
        kernels=value("kernels"),
        launches=value("launches"),
        guard_seconds=record["guards"].value if compiled else 0.0,
        busy_seconds=value("busy"),
        costliest=tuple(
            KernelTime(kernel_name(kernel["name"]), kernel["calls"], kernel["seconds"])
            for kernel in record.data["dearest"][program]
        ),
        fused_attention=value("fused attention") or 0.0,
    )


def _shapes(record: Record) -> ShapesRecord:
    strategies: dict[str, Passes] = {}
    for entry in record.data["strategies"]:
        name = cast(Strategy, entry["strategy"])
        first = record.values.get(f"{name} first")
        strategies[name] = Passes(
            name,
            0.0 if first is None else first.value,
            record.values.get(f"{name} later"),
            entry["graphs"],
            _recompiles(entry["recompiles"]),
            entry["failed"],
        )
    return ShapesRecord(
        *_model(record),
        cast(Mode, record.labels["mode"]),
        tuple(record.data["schedule"]),
        tuple(record.data["varying"]),
        tuple(int(count) for count in record.data["rankings"]),
        strategies,
    )

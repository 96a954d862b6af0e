"""Turns the triage records of ``results.json`` as version 0.1 wrote them into today's. Nothing here imports torch."""

from __future__ import annotations

from typing import Any, cast

from benchkit.results import Record
from compile_bench.fixes.types import Figures
from compile_bench.measure.survey.types import BreakCost
from compile_bench.triage.serialize import CombinedFix, FailedGuard, FindingRecord, TriageSummary, TriedFix

_KINDS = {"function given up": "skipped frame"}
_TITLES = {"all mends together": "all verified fixes", "mends that hold together": "verified fixes without conflicts"}


def migrate_triage_record(record: Record) -> Record | None:
    """Today's form of a triage record of version 0.1, with the same figures; None of any other record."""
    if record.name == "bill":
        return _summary(record).record()
    # Today's findings have the same name; their data contains how often each was met.
    if record.name == "finding" and "met" in record.values:
        return _finding(record).record()
    if record.name == "mended":
        return _combined(record).record()
    return None


def _summary(old: Record) -> TriageSummary:
    return TriageSummary(
        str(old.labels["target"]),
        tuple(old.data["kinds"]),
        old["tracing"].value,
        old["collecting"].value,
        tuple(
            FailedGuard(each["file"], each["line"], each["guard"], each.get("source", ""), each.get("called from", ""))
            for each in old.data["recompiles"]
        ),
        tuple(old.data["absent"]),
    )


def _finding(old: Record) -> FindingRecord:
    data = old.data
    return FindingRecord(
        target=str(old.labels["target"]),
        number=cast(int, old.labels["number"]),
        kind=_KINDS.get(data["kind"], data["kind"]),
        **{name: data[name] for name in ("place", "source", "category", "reason", "case", "advice")},
        kinds=tuple(data["kinds"]),
        times=int(old["met"].value),
        cost=_cost(old) if "crossing" in old.values else None,
        fix=None if data["mend"] is None else _fix(old, data["mend"]),
    )


def _cost(old: Record) -> BreakCost:
    return BreakCost(
        old.values.get("gap"),
        old.data["share"],
        int(old["crossing"].value),
        old["compiling"].value,
        old.data.get("no gap", ""),
    )


def _fix(old: Record, tried: dict[str, Any]) -> TriedFix:
    accepted = tried["accepted"]
    return TriedFix(
        tried["title"],
        tried["verdict"],
        accepted,
        tried["effect"],
        tried.get("apart", ""),
        old.data["patch"],
        _figures(old, "before") if accepted else None,
        _figures(old, "after") if accepted else None,
    )


def _combined(old: Record) -> CombinedFix:
    title = old.data.get("title", "all mends together")  # older records have none
    return CombinedFix(
        str(old.labels["target"]),
        old.data["cases"],
        _TITLES.get(title, title),
        old.data["effect"],
        _figures(old, "before"),
        _figures(old, "after"),
    )


def _figures(old: Record, when: str) -> Figures:
    first = old.values.get(f"first steps {when}")
    return Figures(
        int(old[f"graphs {when}"].value),
        int(old[f"breaks {when}"].value),
        old.values.get(f"step {when}"),
        None if first is None else first.value,
    )

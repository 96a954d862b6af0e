"""A triage bill as records of a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchkit.results import Json, Quantity, Record
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.serialize import neutral, shorten
from compile_bench.triage.types import Finding, TriageReport


def triage_report_records(report: TriageReport, root: Path) -> list[Record]:
    """One record for the whole, one for every finding (dearest first), one for all mends together.

    Args:
        report: the bill.
        root: files below it are named relative to it, others by their last part.
    """
    labels = {"target": report.target}
    traced = sum(survey.trace_seconds for survey in report.surveys)
    values = {
        "findings": Quantity(len(report.findings), ""),
        "recompiles": Quantity(len(report.recompiles), ""),
        "tracing": Quantity(traced, "s"),
        "collecting": Quantity(sum(survey.collect_seconds for survey in report.surveys), "s"),
    }
    data: dict[str, Json] = {
        "kinds": [survey.case.kind for survey in report.surveys],
        "recompiles": [
            {
                "file": shorten(each.file, root),
                "line": each.line,
                "guard": neutral(each.guard, root),
                "source": neutral(each.source, root),
                "called from": neutral(each.called_from, root),
            }
            for each in report.recompiles
        ],
        "absent": [*report.raised, *report.absent],
    }
    records = [Record("bill", labels, values, data)]
    records += [_finding(each, index, report.target, root) for index, each in enumerate(report.findings, 1)]
    if report.together is not None:
        records.append(_together(report.together, report.target))
    return records


def _finding(finding: Finding, index: int, target: str, root: Path) -> Record:
    values: dict[str, Quantity] = {"met": Quantity(finding.times, "")}
    if finding.cost is not None:
        values["crossing"] = Quantity(finding.cost.crossing, "B")
        values["compiling"] = Quantity(finding.cost.compile_seconds, "s")
        if finding.cost.gap is not None:
            values["gap"] = finding.cost.gap
    fix = finding.fix
    if fix is not None and fix.accepted:
        assert fix.before is not None
        assert fix.after is not None
        values |= _counts("before", fix.before) | _counts("after", fix.after)
    data: dict[str, Any] = {
        "kind": finding.kind,
        "place": f"{shorten(finding.file, root)}:{finding.line}",
        "source": finding.source,
        "category": finding.category,
        "reason": neutral(finding.reason, root),
        "case": finding.case,
        "advice": finding.advice,
        "kinds": list(finding.kinds),
        "share": 1 if finding.cost is None else finding.cost.share,
        "no gap": "" if finding.cost is None else finding.cost.no_gap,
        "mend": None
        if fix is None
        else {
            "title": fix.title,
            "effect": fix.effect,
            "accepted": fix.accepted,
            "verdict": neutral(fix.verdict, root),
            "apart": neutral(fix.apart, root),
        },
        "patch": fix.patch if fix is not None else "",
    }
    return Record("finding", {"target": target, "number": index}, values, data)


def _together(fix: Fix, target: str) -> Record:
    assert fix.before is not None
    assert fix.after is not None
    values = _counts("before", fix.before) | _counts("after", fix.after)
    return Record("mended", {"target": target}, values, {"title": fix.title, "effect": fix.effect, "cases": fix.case})


def _counts(when: str, figures: Figures) -> dict[str, Quantity]:
    values = {
        f"breaks {when}": Quantity(figures.breaks, ""),
        f"graphs {when}": Quantity(figures.graphs, ""),
    }
    if figures.step is not None:
        values[f"step {when}"] = figures.step
    if figures.compile_seconds is not None:
        values[f"first steps {when}"] = Quantity(figures.compile_seconds, "s")
    return values

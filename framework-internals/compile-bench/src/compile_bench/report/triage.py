"""The report's section on triage: what keeps a model's lines out of graphs, what that costs, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchkit import numbers
from benchkit.results import Results
from compile_bench.capture.reasons import cause_of
from compile_bench.fixes.types import Fix
from compile_bench.measure.serialize import plural
from compile_bench.report.breaks import recompile_advice, without_folders
from compile_bench.report.tables import table
from compile_bench.triage.serialize import CombinedFix, FailedGuard, FindingRecord, TriageSummary
from compile_bench.triage.types import Finding

# The columns of :func:`cost_cells`.
COST_HEADER = ("in", "time lost per step", "bytes handed over", "compile time", "verified fix")

_FINDING_HEADER = ("line", "code", "category", *COST_HEADER)
_RECOMPILE_HEADER = ("recompiled at", "cause", "guard that failed", "what to do")


def triage_context(results: Results) -> dict[str, Any]:
    """The variables of ``triage.md.j2`` that are about triage reports."""
    return {"triage_reports": [_triage_report(each, results) for each in TriageSummary.select(results)]}


def _triage_report(summary: TriageSummary, results: Results) -> dict[str, Any]:
    """Tables and sentences on one target."""
    findings = FindingRecord.select(results, target=summary.target)
    rows = [
        (_place(each), f"`{each.source}`" if each.source else "", each.category, *cost_cells(each)) for each in findings
    ]
    trace_seconds = summary.trace_seconds
    return {
        "target": summary.target,
        "kinds": " and ".join(summary.kinds),
        "count": plural(len(findings), "finding"),
        "costliest": _costliest(findings),
        "table": table(_FINDING_HEADER, rows, left=4),
        "not_measured": _not_measured(findings),
        "shared": any(each.cost is not None and each.cost.breaks_between > 1 for each in findings),
        "recompiles": plural(len(summary.recompiles), "cause"),
        "recompile_table": table(_RECOMPILE_HEADER, [_recompile_row(each) for each in summary.recompiles], left=4),
        "fixed": [_fixed(each) for each in findings if each.fix is not None and each.fix.accepted],
        "refused": [
            {"place": _place(each), "title": each.fix.title, "verdict": each.fix.verdict}
            for each in findings
            if each.fix is not None and not each.fix.accepted
        ],
        "combined": next((combined_table(each) for each in CombinedFix.select(results, target=summary.target)), ""),
        "collecting": numbers.percent(summary.collect_seconds / trace_seconds) if trace_seconds else "",
        "absent": summary.absent,
    }


def cost_cells(finding: Finding | FindingRecord) -> tuple[str, ...]:
    """The kinds of step in which a line breaks, what that costs, and whether there is a verified fix."""
    cost, fix = finding.cost, finding.fix
    return (
        "both" if len(finding.kinds) > 1 else finding.kinds[0],
        "–" if cost is None or cost.time_lost is None else numbers.with_unit(cost.time_lost.value, "s"),
        "–" if cost is None else numbers.with_unit(cost.output_bytes, "B"),
        "–" if cost is None else numbers.with_unit(cost.compile_seconds, "s"),
        "–" if fix is None else ("yes" if fix.accepted else "no"),
    )


def _place(each: FindingRecord) -> str:
    return f"`{without_folders(each.place)}`"


def _costliest(findings: Sequence[FindingRecord]) -> str:
    """The break that loses most time; empty where none was measured."""
    measured = [(each, each.cost.time_lost) for each in findings if each.cost is not None]
    times = [(each, time_lost.value) for each, time_lost in measured if time_lost is not None]
    if not times:
        return ""
    first, seconds = max(times, key=lambda each: each[1])
    return f"{_place(first)}, which loses {numbers.with_unit(seconds, 's')} of Python time per step"


def _not_measured(findings: Sequence[FindingRecord]) -> list[str]:
    """One sentence for every reason why the time that breaks lose was not measured."""
    places: dict[str, list[str]] = {}
    for each in findings:
        if each.cost is not None and each.cost.not_measured:
            places.setdefault(each.cost.not_measured, []).append(_place(each))
    return [
        f"The time lost at {', '.join(dict.fromkeys(lines))} could not be measured: {why}."
        for why, lines in places.items()
    ]


def _recompile_row(each: FailedGuard) -> tuple[str, ...]:
    place = f"`{Path(each.file).name}:{each.line}`"
    place += f", called from `{without_folders(each.called_from)}`" if each.called_from else ""
    return place, cause_of(each.guard), f"`{each.guard}`", recompile_advice(each.guard, each.source)


def _fixed(each: FindingRecord) -> dict[str, Any]:
    fix = each.fix
    assert fix is not None
    assert fix.before is not None
    assert fix.after is not None
    return {
        "place": _place(each),
        "title": fix.title,
        "effect": fix.effect,
        "conflict": fix.conflict,
        "breaks": f"{plural(fix.before.breaks, 'break')} before, {fix.after.breaks} after",
        "patch": fix.patch.rstrip("\n"),
    }


def combined_table(combined: CombinedFix | Fix) -> str:
    """The model before and after the combined fix."""
    rows = [
        (
            when,
            numbers.count(figures.breaks),
            numbers.count(figures.graphs),
            "–" if figures.step is None else numbers.quantity(figures.step),
            "–" if figures.compile_seconds is None else numbers.with_unit(figures.compile_seconds, "s"),
        )
        for when, figures in (("before", combined.before), ("after", combined.after))
        if figures is not None
    ]
    return table([combined.title, "breaks", "graphs", "step (p20–p80)", "first steps"], rows)

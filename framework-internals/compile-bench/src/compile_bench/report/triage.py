"""The report's section on triage: what keeps a model's lines out of graphs, what that costs, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchkit import numbers
from benchkit.results import Results
from compile_bench.capture.guards import cause_of, what_changed
from compile_bench.fixes.types import Fix
from compile_bench.measure.serialize import distinct, plural
from compile_bench.measure.verdict import BUSY, difference
from compile_bench.report.breaks import without_folders
from compile_bench.report.tables import table
from compile_bench.triage.advice import advice_from_guard
from compile_bench.triage.serialize import CombinedFix, FailedGuard, FindingRecord, TriageSummary
from compile_bench.triage.types import Finding

AnyFinding = TypeVar("AnyFinding", Finding, FindingRecord)

# The columns of :func:`cost_cells`.
COST_HEADER = ("in", "time lost per step", "bytes handed over", "compile time", "verified fix")

_FINDING_HEADER = ("line", "code", "category", *COST_HEADER)
_RECOMPILE_HEADER = ("recompiled at", "cause", "what changed", "what to do")


def triage_context(results: Results) -> dict[str, Any]:
    """The variables of ``triage.md.j2`` that are about triage reports."""
    return {"triage_reports": [_triage_report(each, results) for each in TriageSummary.select(results)]}


def _triage_report(summary: TriageSummary, results: Results) -> dict[str, Any]:
    """Tables and sentences on one target."""
    findings = FindingRecord.select(results, target=summary.target)
    lines = by_line(findings)
    rows = [
        (
            _place(each[0]),
            f"`{each[0].source}`" if each[0].source else "",
            distinct(finding.category for finding in each),
            *cells,
        )
        for each, cells in zip(lines, cost_cells(lines), strict=True)
    ]
    trace_seconds = summary.trace_seconds
    return {
        "target": summary.target,
        "kinds": " and ".join(summary.kinds),
        "count": plural(len(findings), "finding"),
        "costliest": _costliest(findings),
        "table": table(_FINDING_HEADER, rows, left=4),
        "not_measured": [
            f"The time lost at {', '.join(f'`{line}`' for line in lines)} could not be measured: {why}."
            for why, lines in not_measured(findings).items()
        ],
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


def by_line(findings: Sequence[AnyFinding]) -> list[list[AnyFinding]]:
    """The findings of each line, which share a cost and a fix."""
    lines: dict[str, list[AnyFinding]] = {}
    for each in findings:
        lines.setdefault(each.place, []).append(each)
    return list(lines.values())


def cost_cells(lines: Sequence[Sequence[AnyFinding]]) -> list[tuple[str, ...]]:
    """For each line: in which kinds of step it breaks, what that costs, and whether there is a verified fix.

    A cost that several lines share stands with the first one.
    """
    places = [without_folders(line[0].place) for line in lines]
    costs = [line[0].cost for line in lines]
    gaps = [None if cost is None or cost.time_lost is None else (cost.time_lost, cost.output_bytes) for cost in costs]
    compiling = [None if cost is None else cost.compile_seconds for cost in costs]
    lost = _once(gaps, ["–" if gap is None else numbers.with_unit(gap[0].value, "s") for gap in gaps], places)
    compiled = _once(
        compiling, ["–" if seconds is None else numbers.with_unit(seconds, "s") for seconds in compiling], places
    )
    rows: list[tuple[str, ...]] = []
    for index, (line, cost) in enumerate(zip(lines, costs, strict=True)):
        handed_over = "–" if cost is None else numbers.with_unit(cost.output_bytes, "B")
        fix = line[0].fix
        rows.append(
            (
                "both" if len({kind for each in line for kind in each.kinds}) > 1 else line[0].kinds[0],
                lost[index],
                "″" if gaps[index] in gaps[:index] and gaps[index] else handed_over,
                compiled[index],
                "–" if fix is None else ("yes" if fix.accepted else "no"),
            )
        )
    return rows


def _once(values: Sequence[object], texts: Sequence[str], places: Sequence[str]) -> list[str]:
    """The texts of values. One that several places share stands with the first, and the others name that place."""
    shown = []
    for index, (value, text) in enumerate(zip(values, texts, strict=True)):
        first, count = values.index(value), values.count(value)
        if not value or count == 1:
            shown.append(text)
        else:
            shown.append(f"{text} for {count} lines" if index == first else f"shared with {places[first]}")
    return shown


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


def not_measured(findings: Sequence[AnyFinding]) -> dict[str, list[str]]:
    """For every reason why a lost time was not measured, the places of the findings, each once."""
    places: dict[str, list[str]] = {}
    for each in findings:
        if each.cost is not None and each.cost.not_measured:
            places.setdefault(each.cost.not_measured, []).append(without_folders(each.place))
    return {why: list(dict.fromkeys(lines)) for why, lines in places.items()}


def _recompile_row(each: FailedGuard) -> tuple[str, ...]:
    place = f"`{Path(each.file).name}:{each.line}`"
    place += f", called from `{without_folders(each.called_from)}`" if each.called_from else ""
    return (
        place,
        cause_of(each.guard),
        what_changed(each.guard),
        (advice_from_guard(each.guard, each.source, each.package) if each.advice is None else each.advice) or "–",
    )


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
    """The model before and after the combined fix, and what may be said about its speed."""
    sides = [
        (when, figures)
        for when, figures in (("before", combined.before), ("after", combined.after))
        if figures is not None
    ]
    rows = [
        (
            when,
            numbers.count(figures.breaks),
            numbers.count(figures.graphs),
            "–" if figures.step is None else numbers.quantity(figures.step),
            "–" if figures.compile_seconds is None else numbers.with_unit(figures.compile_seconds, "s"),
        )
        for when, figures in sides
    ]
    text = table([combined.title, "breaks", "graphs", "step (p20–p80)", "first steps"], rows)
    eager = [
        f"{when.capitalize()}: still eager: recompile limit at {', '.join(map(without_folders, figures.still_eager))}"
        for when, figures in sides
        if figures.still_eager
    ]
    return "\n\n".join([text, *eager, *_speed(combined)])


def _speed(combined: CombinedFix | Fix) -> list[str]:
    """What the paired ratio shows, next to the control: the step before against itself."""
    speedup, control = combined.speedup, combined.control
    if speedup is None:
        return []
    seen = difference(speedup, control)
    claim = {"faster": "faster", "slower": "slower", "none": "no difference that the control does not show"}[seen]
    ratio = f"Step before / after, in alternation: {numbers.quantity(speedup)}: {claim}"
    if control is not None:
        ratio += f" (before against itself: {numbers.quantity(control)})"
    if combined.pressure is not None and combined.pressure > BUSY:
        ratio += f"; the machine was busy, some task waited for a core in {combined.pressure:.0f} % of the time"
    return [ratio]

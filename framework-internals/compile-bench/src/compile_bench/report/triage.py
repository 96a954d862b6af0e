"""The report's section on triage: what keeps a model's lines out of graphs, what that costs, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchkit import markdown, numbers
from benchkit.report import Column, Section, Table
from benchkit.results import Results
from compile_bench.capture.guards import cause_of, what_changed
from compile_bench.capture.text import distinct, plural
from compile_bench.fixes.types import Fix
from compile_bench.measure.verdict import BUSY, difference
from compile_bench.report.breaks import without_folders
from compile_bench.report.details import seconds_cell
from compile_bench.triage.advice import advice_from_guard
from compile_bench.triage.serialize import CombinedFix, FailedGuard, FindingRecord, TriageSummary
from compile_bench.triage.types import Finding

AnyFinding = TypeVar("AnyFinding", Finding, FindingRecord)

# The findings of a line, and the cells of what they cost.
Line = tuple[list[AnyFinding], tuple[str, ...]]


def triage_sections(results: Results) -> list[Section]:
    """What triage found in every target, what it tried, and what could not be done."""
    return [_triage_section(summary, results) for summary in TriageSummary.select(results)]


def _triage_section(summary: TriageSummary, results: Results) -> Section:
    findings = FindingRecord.select(results, target=summary.target)
    shared = any(finding.cost is not None and finding.cost.breaks_between > 1 for finding in findings)
    return Section(
        "",
        [
            Section("", [_counted(summary, findings)]),
            Section(
                "",
                [
                    findings_table(
                        findings,
                        Column("line", _place_of),
                        Column("code", lambda line: f"`{line[0].source}`" if line[0].source else ""),
                    ),
                    "*Time lost* is the Python time between the graph before a break and the next graph, in the "
                    "forward pass. *Bytes handed over* are the tensors that the graph before returns to Python. "
                    "*Compile time* is that of the functions that exist because the graph was split.",
                    "Breaks between the same two graphs have one time, which stands with the first of them."
                    if shared
                    else "",
                    *not_measured_lines(findings, code=True),
                ],
            ),
            Section("", [_collecting(summary)]),
            *(combined_section(combined) for combined in CombinedFix.select(results, target=summary.target)),
            Section(
                "",
                [
                    f"The model is recompiled for {plural(len(summary.recompiles), 'cause')}:",
                    guards_table(summary.recompiles),
                ],
                fold=f"Recompilations of `{summary.target}`, and what to do",
            ),
            Section(
                "",
                [text for finding in findings if finding.fix and finding.fix.accepted for text in _verified(finding)]
                + [_refused(finding) for finding in findings if finding.fix and not finding.fix.accepted],
                fold=f"The fixes of `{summary.target}` as patches",
            ),
            Section("", [f"Not done: {what}." for what in summary.absent]),
        ],
    )


def _counted(summary: TriageSummary, findings: Sequence[FindingRecord]) -> str:
    costliest = _costliest(findings)
    return (
        f"Triage of `{summary.target}`, a model with planted breaks ({' and '.join(summary.kinds)}): "
        f"{plural(len(findings), 'finding')}{f'. The costliest is {costliest}' if costliest else ''}."
    )


def _collecting(summary: TriageSummary) -> str:
    if not summary.trace_seconds:
        return ""
    return f"The collector took {numbers.percent(summary.collect_seconds / summary.trace_seconds)} of the tracing time."


def findings_table(
    findings: Sequence[AnyFinding], place: Column[list[AnyFinding]], what: Column[list[AnyFinding]]
) -> Table[Line[AnyFinding]]:
    """A row for each line with findings, and what it costs.

    Args:
        findings: The findings, the costliest first.
        place: How a line is named.
        what: What stands there.
    """
    lines = by_line(findings)

    def cost(index: int) -> Callable[[Line[AnyFinding]], str]:
        return lambda row: row[1][index]

    return Table(
        list(zip(lines, cost_cells(lines), strict=True)),
        [
            Column(place.header, lambda row: place.cell(row[0])),
            Column(what.header, lambda row: what.cell(row[0])),
            Column("category", lambda row: distinct(finding.category for finding in row[0])),
            Column("in", cost(0), left=True),
            Column("time lost per step", cost(1)),
            Column("bytes handed over", cost(2)),
            Column("compile time", cost(3)),
            Column("verified fix", cost(4)),
        ],
    )


def guards_table(guards: Sequence[FailedGuard]) -> Table[FailedGuard]:
    """What failed, so that a function was compiled again."""
    return Table(
        guards,
        [
            Column("recompiled at", _failed_at),
            Column("cause", lambda failed: cause_of(failed.guard)),
            Column("what changed", lambda failed: what_changed(failed.guard)),
            Column("what to do", _advice, left=True),
        ],
    )


def by_line(findings: Sequence[AnyFinding]) -> list[list[AnyFinding]]:
    """The findings of each line, which share a cost and a fix."""
    lines: dict[str, list[AnyFinding]] = {}
    for finding in findings:
        lines.setdefault(finding.place, []).append(finding)
    return list(lines.values())


def cost_cells(lines: Sequence[Sequence[AnyFinding]]) -> list[tuple[str, ...]]:
    """For each line: in which kinds of step it breaks, what that costs, and whether there is a verified fix.

    A cost that several lines share stands with the first one.
    """
    places = [without_folders(line[0].place) for line in lines]
    costs = [line[0].cost for line in lines]
    losses = [None if cost is None or cost.time_lost is None else (cost.time_lost, cost.output_bytes) for cost in costs]
    compiling = [None if cost is None else cost.compile_seconds for cost in costs]
    lost = _once(losses, ["–" if loss is None else numbers.with_unit(loss[0].value, "s") for loss in losses], places)
    compiled = _once(
        compiling, ["–" if seconds is None else numbers.with_unit(seconds, "s") for seconds in compiling], places
    )
    rows: list[tuple[str, ...]] = []
    for index, (line, cost) in enumerate(zip(lines, costs, strict=True)):
        handed_over = "–" if cost is None else numbers.with_unit(cost.output_bytes, "B")
        fix = line[0].fix
        rows.append(
            (
                "both" if len({kind for finding in line for kind in finding.kinds}) > 1 else line[0].kinds[0],
                lost[index],
                "″" if losses[index] in losses[:index] and losses[index] else handed_over,
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


def _place(finding: FindingRecord) -> str:
    return f"`{without_folders(finding.place)}`"


def _place_of(line: Sequence[FindingRecord]) -> str:
    return _place(line[0])


def _costliest(findings: Sequence[FindingRecord]) -> str:
    """The break that loses most time; empty where none was measured."""
    measured = [(finding, finding.cost.time_lost) for finding in findings if finding.cost is not None]
    times = [(finding, time_lost.value) for finding, time_lost in measured if time_lost is not None]
    if not times:
        return ""
    first, seconds = max(times, key=lambda pair: pair[1])
    return f"{_place(first)}, which loses {numbers.with_unit(seconds, 's')} of Python time per step"


def not_measured(findings: Sequence[AnyFinding]) -> dict[str, list[str]]:
    """For every reason why a lost time was not measured, the places of the findings, each once."""
    places: dict[str, list[str]] = {}
    for finding in findings:
        if finding.cost is not None and finding.cost.not_measured:
            places.setdefault(finding.cost.not_measured, []).append(without_folders(finding.place))
    return {why: list(dict.fromkeys(lines)) for why, lines in places.items()}


def not_measured_lines(findings: Sequence[AnyFinding], *, code: bool = False) -> list[str]:
    """A sentence for every reason why a lost time was not measured; with ``code``, places are marked as code."""
    return [
        f"The time lost at {', '.join(f'`{place}`' if code else place for place in places)} could not be measured: "
        f"{why}."
        for why, places in not_measured(findings).items()
    ]


def _failed_at(failed: FailedGuard) -> str:
    place = f"`{Path(failed.file).name}:{failed.line}`"
    return place + (f", called from `{without_folders(failed.called_from)}`" if failed.called_from else "")


def _advice(failed: FailedGuard) -> str | None:
    if failed.advice is None:
        return advice_from_guard(failed.guard, failed.source, failed.package) or None
    return failed.advice or None


def _verified(finding: FindingRecord) -> list[str]:
    """A verified fix: its effect on the breaks, its patch, and why the combined fix leaves it out."""
    fix = finding.fix
    assert fix is not None
    assert fix.before is not None
    assert fix.after is not None
    note = f". Note: {fix.effect}" if fix.effect else ""
    return [
        f"{_place(finding)} — {fix.title}: {plural(fix.before.breaks, 'break')} before, {fix.after.breaks} after; "
        f"outputs and gradients are within their float64 bounds{note}.",
        markdown.block(fix.patch.rstrip("\n"), "diff"),
        f"The combined fix leaves it out: {fix.conflict}." if fix.conflict else "",
    ]


def _refused(finding: FindingRecord) -> str:
    assert finding.fix is not None
    return f"{_place(finding)} — {finding.fix.title} was tried and refused: {finding.fix.verdict}."


def combined_section(combined: CombinedFix | Fix) -> Section:
    """The model before and after the combined fix, and what may be said about its speed."""
    sides = [
        (when, figures)
        for when, figures in (("before", combined.before), ("after", combined.after))
        if figures is not None
    ]
    return Section(
        "",
        [
            Table(
                sides,
                [
                    Column(combined.title, lambda side: side[0]),
                    Column("breaks", lambda side: side[1].breaks),
                    Column("graphs", lambda side: side[1].graphs),
                    Column("step (p20–p80)", lambda side: side[1].step),
                    Column("first steps", lambda side: seconds_cell(side[1].compile_seconds)),
                ],
            ),
            *(
                f"{when.capitalize()}: still eager: recompile limit at "
                f"{', '.join(map(without_folders, figures.still_eager))}"
                for when, figures in sides
                if figures.still_eager
            ),
            *_speed(combined),
        ],
    )


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

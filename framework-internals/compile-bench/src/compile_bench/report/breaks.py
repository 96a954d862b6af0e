"""The report's tables of graph breaks and recompilations, and its section on triage: cost and fix of each line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchkit import markdown, numbers
from benchkit.report import Column, Section, Table
from benchkit.report.rendering import block_text
from benchkit.results import Results
from compile_bench.capture.text import distinct, plural
from compile_bench.capture.trace import Break, Recompile
from compile_bench.fixes.types import Fix
from compile_bench.measure.records import Bench, Compilation, CountedBreaks
from compile_bench.measure.verdict import BUSY, difference
from compile_bench.report.details import seconds_cell
from compile_bench.report.queries import in_order, mode_index
from compile_bench.triage.findings import Finding, TriageReport, advice_from_guard


def counted_breaks(results: Results) -> list[Section]:
    """The breaks of every target whose breaks were counted without a code generator."""
    return [
        Section(
            "",
            [
                Section("", [_counted(record)]),
                break_table(record.compilation),
                recompile_table(record.compilation),
            ],
        )
        for record in CountedBreaks.select(results)
    ]


def _counted(record: CountedBreaks) -> str:
    compilation = record.compilation
    return (
        f"Graph breaks and recompilations of `{record.target}`, a model with planted ones, in "
        f"{numbers.count(record.calls)} calls: {plural(compilation.graphs, 'graph')}, "
        f"{plural(len(compilation.breaks), 'break')}, {plural(len(compilation.recompiles), 'recompilation')}."
    )


def natural_breaks(results: Results, cases: Sequence[Bench]) -> Section:
    """The breaks of every measured model with breaks or recompilations. Modes with equal tables share one."""
    shared: dict[tuple[object, ...], list[Bench]] = {}
    for case in in_order(results, cases):
        if case.compilation.breaks or case.compilation.recompiles:
            text = block_text(break_table(case.compilation)), block_text(recompile_table(case.compilation))
            shared.setdefault((case.model, text), []).append(case)
    return Section(
        "",
        [_natural(equal[0], sorted({case.variant for case in equal}, key=mode_index)) for equal in shared.values()],
        fold="Breaks and recompilations of the measured models",
    )


def _natural(case: Bench, modes: Sequence[str]) -> Section:
    of_modes = "" if list(modes) == ["default"] else f" (mode{'s' * (len(modes) > 1)} {', '.join(modes)})"
    return Section(
        "",
        [
            f"**{' '.join(case.model)}**{of_modes} breaks or is compiled again:",
            break_table(case.compilation),
            recompile_table(case.compilation),
        ],
    )


def without_folders(place: str) -> str:
    """``file.py:LINE`` for a table, without the folders of the file."""
    return place.rpartition("/")[2]


def break_table(compilation: Compilation) -> Table[Break]:
    """The graph breaks of a compilation."""
    return Table(
        compilation.breaks,
        [
            Column("line", lambda entry: f"`{without_folders(entry.place)}`"),
            Column("code, and where a library breaks that it calls", _code),
            Column("category", "category"),
            Column("reason", _reason, left=True),
            Column("met", lambda entry: str(entry.times)),
        ],
    )


def recompile_table(compilation: Compilation) -> Table[Recompile]:
    """What a compilation compiled again."""
    return Table(
        compilation.recompiles,
        [
            Column("place", lambda again: f"`{without_folders(again.place)}`"),
            Column("compiled again", lambda again: f"`{again.function}`"),
            *_of_a_guard(),
        ],
    )


def _code(entry: Break) -> str:
    """The line's code; for a break in a library, the library's line and its place instead."""
    if entry.library:
        source = entry.stack[-1].source
        return f"`{without_folders(entry.library)}`" + (f" `{source}`" if source else "")
    source = entry.stack[-1].source if entry.stack else entry.source
    return f"`{source}`" if source else "(the whole function)"


def _reason(entry: Break) -> str:
    """PyTorch's title of the break. If a backend failed, the first sentence of the explanation, which says why."""
    if entry.category != "backend failed":
        return entry.reason
    return entry.explanation.split("\n")[0].partition(". ")[0]


# The findings of a line, and the cells of what they cost.
Line = tuple[list[Finding], tuple[str, ...]]


def triage_sections(results: Results) -> list[Section]:
    """What triage found in every target, what it tried, and what could not be done."""
    return [_triage_section(triage, results) for triage in TriageReport.select(results)]


def _triage_section(triage: TriageReport, results: Results) -> Section:
    findings = Finding.select(results, target=triage.target)
    shared = any(finding.cost is not None and finding.cost.breaks_between > 1 for finding in findings)
    return Section(
        "",
        [
            Section("", [_triage_counted(triage, findings)]),
            Section(
                "",
                [
                    findings_table(
                        findings,
                        Column("line", lambda line: _line(line[0])),
                        Column("code", lambda line: f"`{line[0].source}`" if line[0].source else ""),
                    ),
                    "*Time lost* is the Python time between the graph before a break and the next graph, in the "
                    "forward pass. *Bytes handed over* are the tensors that the graph before returns to Python. "
                    "*Compile time* is that of the functions that exist because the graph was split; at the recompile "
                    "limit, that of compiling the function again.",
                    "Breaks between the same two graphs have one time, which stands with the first of them."
                    if shared
                    else "",
                    *not_measured_lines(findings, code=True),
                ],
            ),
            Section("", [_collecting(triage)]),
            *(combined_section(combined) for combined in Fix.select(results, target=triage.target)),
            Section(
                "",
                [
                    f"The model is recompiled for {plural(len(triage.recompiles), 'cause')}:",
                    guards_table(triage.recompiles),
                ],
                fold=f"Recompilations of `{triage.target}`, and what to do",
            ),
            Section(
                "",
                [text for finding in findings if finding.fix and finding.fix.accepted for text in _verified(finding)]
                + [_refused(finding) for finding in findings if finding.fix and not finding.fix.accepted],
                fold=f"The fixes of `{triage.target}` as patches",
            ),
            Section("", [f"Not done: {what}." for what in triage.absent]),
        ],
    )


def _triage_counted(triage: TriageReport, findings: Sequence[Finding]) -> str:
    costliest = _costliest(findings)
    return (
        f"Triage of `{triage.target}`, a model with planted breaks ({' and '.join(triage.kinds)}): "
        f"{plural(len(findings), 'finding')}{f'. The costliest is {costliest}' if costliest else ''}."
    )


def _collecting(triage: TriageReport) -> str:
    if not triage.trace_seconds:
        return ""
    return f"The collector took {numbers.percent(triage.collect_seconds / triage.trace_seconds)} of the tracing time."


def findings_table(
    findings: Sequence[Finding], place: Column[list[Finding]], what: Column[list[Finding]]
) -> Table[Line]:
    """A row for each line with findings, the costliest first: how it is named, what stands there, and what it costs."""
    lines = by_line(findings)

    def cost(index: int) -> Callable[[Line], str]:
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


def guards_table(guards: Sequence[Recompile]) -> Table[Recompile]:
    """What again, so that a function was compiled again."""
    return Table(guards, [Column("recompiled at", _again_at), *_of_a_guard()])


def _of_a_guard() -> list[Column[Recompile]]:
    return [
        Column("cause", "cause"),
        Column("what changed", "what_changed"),
        Column("what to do", _advice, left=True),
    ]


def by_line(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The findings of each line, which share a cost and a fix."""
    lines: dict[str, list[Finding]] = {}
    for finding in findings:
        lines.setdefault(finding.place, []).append(finding)
    return list(lines.values())


def cost_cells(lines: Sequence[Sequence[Finding]]) -> list[tuple[str, ...]]:
    """For each line: in which kinds of step it breaks, what that costs, and whether there is a verified fix.

    A cost that several lines share stands with the first one.
    """
    places = [without_folders(line[0].place) for line in lines]
    costs = [line[0].cost for line in lines]
    losses = [None if cost is None or cost.time_lost is None else (cost.time_lost, cost.output_bytes) for cost in costs]
    compiling = [None if cost is None else cost.compile_seconds for cost in costs]
    lost = _shown_once(
        losses, ["–" if loss is None else numbers.with_unit(loss[0].value, "s") for loss in losses], places
    )
    compiled = _shown_once(
        compiling, [numbers.with_unit(seconds, "s") if seconds else "–" for seconds in compiling], places
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


def _shown_once(values: Sequence[object], texts: Sequence[str], places: Sequence[str]) -> list[str]:
    """The texts of values. One that several places share stands with the first, and the others name that place."""
    shown = []
    for index, (value, text) in enumerate(zip(values, texts, strict=True)):
        first, count = values.index(value), values.count(value)
        if not value or count == 1:
            shown.append(text)
        else:
            shown.append(f"{text} for {count} lines" if index == first else f"shared with {places[first]}")
    return shown


def _line(finding: Finding) -> str:
    return f"`{without_folders(finding.place)}`"


def _costliest(findings: Sequence[Finding]) -> str:
    """The break that loses most time; empty where none was measured."""
    measured = [(finding, finding.cost.time_lost) for finding in findings if finding.cost is not None]
    times = [(finding, time_lost.value) for finding, time_lost in measured if time_lost is not None]
    if not times:
        return ""
    first, seconds = max(times, key=lambda pair: pair[1])
    return f"{_line(first)}, which loses {numbers.with_unit(seconds, 's')} of Python time per step"


def not_measured(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """For every reason why a lost time was not measured, the places of the findings, each once."""
    places: dict[str, list[str]] = {}
    for finding in findings:
        if finding.cost is not None and finding.cost.not_measured:
            places.setdefault(finding.cost.not_measured, []).append(without_folders(finding.place))
    return {why: list(dict.fromkeys(lines)) for why, lines in places.items()}


def not_measured_lines(findings: Sequence[Finding], *, code: bool = False) -> list[str]:
    """A sentence for every reason why a lost time was not measured; with ``code``, places are marked as code."""
    return [
        f"The time lost at {', '.join(f'`{place}`' if code else place for place in places)} could not be measured: "
        f"{why}."
        for why, places in not_measured(findings).items()
    ]


def _again_at(again: Recompile) -> str:
    place = f"`{Path(again.file).name}:{again.line}`"
    return place + (f", called from `{without_folders(again.called_from)}`" if again.called_from else "")


def _advice(again: Recompile) -> str | None:
    if again.advice is None:
        return advice_from_guard(again.guard, again.source, again.package) or None
    return again.advice or None


def _verified(finding: Finding) -> list[str]:
    """A verified fix: its effect on the breaks, its patch, and why the combined fix leaves it out."""
    fix = finding.fix
    assert fix is not None
    assert fix.before is not None
    assert fix.after is not None
    note = f". Note: {fix.effect}" if fix.effect else ""
    return [
        f"{_line(finding)} — {fix.title}: {plural(fix.before.breaks, 'break')} before, {fix.after.breaks} after; "
        f"outputs and gradients are within their float64 bounds{note}.",
        markdown.block(fix.patch.rstrip("\n"), "diff"),
        f"The combined fix leaves it out: {fix.conflict}." if fix.conflict else "",
    ]


def _refused(finding: Finding) -> str:
    assert finding.fix is not None
    return f"{_line(finding)} — {finding.fix.title} was tried and refused: {finding.fix.verdict}."


def combined_section(combined: Fix) -> Section:
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


def _speed(combined: Fix) -> list[str]:
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

"""The report's tables of graph breaks and recompilations, of any compilation that has some."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit import numbers
from benchkit.report import Column, Section, Table
from benchkit.report.rendering import block_text
from benchkit.results import Results
from compile_bench.capture.text import plural
from compile_bench.capture.trace import Break, Recompile
from compile_bench.measure.records import Bench, Compilation, CountedBreaks
from compile_bench.report.queries import in_order, mode_index
from compile_bench.triage.advice import advice_from_guard


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
            Column("cause", "cause"),
            Column("what changed", "what_changed"),
            Column(
                "what to do",
                lambda again: advice_from_guard(again.guard, again.source, again.package) or None,
                left=True,
            ),
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

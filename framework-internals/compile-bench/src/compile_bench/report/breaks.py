"""The report's tables of graph breaks and recompilations, of any compilation that has some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import numbers
from benchkit.results import Results
from compile_bench.capture.trace import Break
from compile_bench.measure.records import Compilation, CountedBreaks
from compile_bench.measure.serialize import plural
from compile_bench.report.queries import MeasuredCase, in_order, mode_index
from compile_bench.report.tables import table
from compile_bench.targets.case import FIRST_STEPS
from compile_bench.triage.advice import advice_from_guard

_BREAK_HEADER = ("line", "code, and where a library breaks that it calls", "category", "reason", "met")
_RECOMPILE_HEADER = ("place", "compiled again", "cause", "what changed", "what to do")


def counted_breaks(results: Results) -> list[dict[str, Any]]:
    """Tables of every target whose breaks were counted without a code generator."""
    return [
        _tables(f"{each.target} {each.kind}", each.target, each.compilation, each.calls)
        for each in CountedBreaks.select(results)
    ]


def natural_breaks(results: Results, cases: Sequence[MeasuredCase]) -> list[dict[str, Any]]:
    """Tables of every measured model with breaks or recompilations. Modes with equal tables share one."""
    found: dict[tuple[str, ...], tuple[dict[str, Any], list[str]]] = {}
    for case in in_order(results, cases):
        if case.compilation.breaks or case.compilation.recompiles:
            tables = _tables(" ".join(case.model), case.record.target, case.compilation, FIRST_STEPS)
            key = tuple(tables[name] for name in ("title", "break_table", "recompile_table"))
            found.setdefault(key, (tables, []))[1].append(case.mode)
    return [{**tables, "modes": ", ".join(sorted(modes, key=mode_index))} for tables, modes in found.values()]


def without_folders(place: str) -> str:
    """``file.py:LINE`` for a table, without the folders of the file."""
    return place.rpartition("/")[2]


def _tables(title: str, target: str, compilation: Compilation, calls: int) -> dict[str, Any]:
    """Both tables; empty strings where there is nothing."""
    breaks = [
        (f"`{without_folders(each.place)}`", _code(each), each.category, _reason(each), str(each.times))
        for each in compilation.breaks
    ]
    recompiles = [
        (
            f"`{without_folders(each.place)}`",
            f"`{each.function}`",
            each.cause,
            each.what_changed,
            advice_from_guard(each.guard, each.source, each.package) or "–",
        )
        for each in compilation.recompiles
    ]
    return {
        "title": title,
        "target": target,
        "graphs": plural(compilation.graphs, "graph"),
        "breaks": plural(len(breaks), "break"),
        "recompiles": plural(len(recompiles), "recompilation"),
        "calls": numbers.count(calls),
        "break_table": table(_BREAK_HEADER, breaks, left=4),
        "recompile_table": table(_RECOMPILE_HEADER, recompiles, left=5),
    }


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

"""The report's section on shapes that change."""

from __future__ import annotations

from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from compile_bench.measure.records import ShapesRecord
from compile_bench.measure.shapes import Passes, cheapest
from compile_bench.report.queries import title
from compile_bench.report.tables import table


def shapes_section(record: ShapesRecord) -> dict[str, Any]:
    """What changes, a table of the strategies, and the cheapest strategy for each number of passes."""
    strategies = list(record.strategies.values())
    again = [
        (each.strategy, f"`{entry.place}`", entry.cause, entry.what_changed)
        for each in strategies
        for entry in each.recompiles
    ]
    header = ["strategy", "first pass", "later pass (p20–p80)", "graphs", *map(_passes, record.ranked_for)]
    return {
        "title": title(record, mode=False),
        "calls": " → ".join(f"`{call}`" for call in record.schedule),
        "varying": ", ".join(f"`{name}`" for name in record.varying),
        "table": markdown_table(header, [_row(each, record.ranked_for) for each in strategies]),
        "recompile_table": table(["strategy", "place", "cause", "what changed"], again, left=4),
        "cheapest": [(_passes(count), text) for count in record.ranked_for if (text := cheapest(strategies, count))],
    }


def _row(passes: Passes, counts: tuple[int, ...]) -> tuple[str, ...]:
    if passes.later is None:
        return passes.strategy, f"fails: {passes.failed}", "", "", *[""] * len(counts)
    return (
        passes.strategy,
        numbers.with_unit(passes.first, "s"),
        numbers.quantity(passes.later),
        f"{passes.compilations}",
        *(numbers.with_unit(passes.total(count)[0], "s") for count in counts),
    )


def _passes(count: int) -> str:
    return f"{numbers.count(count)} pass{'' if count == 1 else 'es'}"

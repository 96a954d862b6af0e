"""The report's section on breaks and recompilations."""

from __future__ import annotations

from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from benchkit.results import Quantity, Record, Results
from compile_bench.records import case_title, plural
from compile_bench.results import FIRST_STEPS


def triage_context(results: Results) -> dict[str, Any]:
    """The variables of ``triage.md.j2``."""
    return {
        "triages": [_triage(record) for record in results.select("triage")],
        "natural": [_triage(record) for record in results.select("compilation") if _has_list(record)],
    }


def _triage(record: Record) -> dict[str, Any]:
    """Break and recompilation tables of one record; empty strings where there are none."""
    breaks = [
        (
            f"`{entry['file']}:{entry['line']}`",
            f"`{entry['source']}`" if entry["source"] else "",
            entry["category"],
            entry["reason"],
            entry["times"],
        )
        for entry in record.data["breaks"]
    ]
    recompiles = [
        (f"`{entry['file']}:{entry['line']}`", f"`{entry['function']}`", entry["cause"], f"`{entry['guard']}`")
        for entry in record.data["recompiles"]
    ]
    return {
        "title": case_title(record, mode=False),
        "target": record.labels["target"],
        "graphs": plural(int(record["graphs"].value), "graph"),
        "breaks": plural(len(breaks), "break"),
        "recompiles": plural(len(recompiles), "recompilation"),
        "calls": numbers.count(record.values.get("calls", Quantity(FIRST_STEPS, "")).value),
        "break_table": markdown_table(["break", "line", "category", "reason", "met"], breaks, left=4) if breaks else "",
        "recompile_table": (
            markdown_table(["place", "compiled again", "cause", "guard that failed"], recompiles, left=4)
            if recompiles
            else ""
        ),
    }


def _has_list(record: Record) -> bool:
    return bool(record.data["breaks"] or record.data["recompiles"])

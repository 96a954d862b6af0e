"""What the results say: the sentences, tables and figures of the report, computed from the records alone.

Parity and throughput are in ``training_findings``; the compiled program is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import Record, Results, numbers
from benchkit.report import Figure
from jax_baseline import training_findings


def finding(results: Results) -> str:
    """The report in one sentence."""
    sentence = "; ".join(training_findings.clauses(results)) or "this run was interrupted before it had anything to say"
    return f"{sentence[0].upper()}{sentence[1:]}."


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    shown = next((record for record in results.select("engine") if record.data), None)
    return {**training_findings.context(results), "hlo": _hlo(results, shown) if shown else None}


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records allow."""
    return training_findings.figures(results)


def _hlo(results: Results, record: Record) -> dict[str, Any]:
    """The summary of one engine's compiled step, with the numbers that the text quotes."""
    summary = record.data
    regions: dict[str, dict[str, tuple[int, int]]] = {}
    for group in summary["regions"]:
        regions.setdefault(group["region"] or "(no scope)", {})[group["phase"]] = (group["kernels"], group["dots"])

    def cell(region: str, phase: str) -> str:
        kernels, dots = regions[region].get(phase, (0, 0))
        return "–" if not kernels else f"{kernels}" + (f" ({dots} product{'s' if dots > 1 else ''})" if dots else "")

    flops = results.one("model")["FLOPs"].value if results.select("model") else None
    counted = record.values.get("XLA FLOPs")
    return {
        **summary,
        "engine": record.labels["engine"],
        "kind_rows": [[kind, numbers.count(count)] for kind, count in summary["kinds"].items()],
        "region_rows": [
            [region, *(cell(region, phase) for phase in ("forward", "backward", "other"))] for region in regions
        ],
        "temporaries": numbers.quantity(record["temporaries"]) if "temporaries" in record.values else None,
        "flops": None if counted is None else numbers.quantity(counted),
        "model_flops": None if flops is None else numbers.with_unit(flops, "FLOP"),
        "flops_ratio": None if flops is None or counted is None else numbers.significant(counted.value / flops),
    }

"""The report's section on models and modes: speed-ups, what each cell showed, and what is missing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchkit import numbers
from benchkit.environment import commit_label
from benchkit.report import markdown_table
from benchkit.results import Results
from compile_bench.measure.measurements import Accuracy
from compile_bench.measure.records import FailedCell, SweepCall
from compile_bench.measure.serialize import plural
from compile_bench.report.autotuning import MARK
from compile_bench.report.queries import MeasuredCase, Model, case_named, in_order, models, title
from compile_bench.report.tables import eager_to_compiled, peak_memory, profile_counts, table
from compile_bench.sweep.cells import missing
from compile_bench.targets.case import MODES

# Marks the accuracy of cells whose results could not be compared.
NOT_COMPARED = "ᵇ"

# Marks the compile cost of a model that was compiled alone, in a table of models that were not.
ALONE = "ᶜ"


def sweep_section(results: Results, cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """Speed-up by model and mode, and the cells that a sweep has not measured.

    Empty without a sweep if there are fewer than three models.
    """
    failed = FailedCell.select(results)
    outcomes: list[MeasuredCase | FailedCell] = [*cases, *failed]
    rows = models(results, outcomes)
    calls = SweepCall.select(results)
    if len(rows) < 3 and not calls:
        return {}
    modes = [mode for mode in MODES if any(each.mode == mode for each in outcomes)]
    advices = [case.verdict.advice for case in cases if case.mode in MODES]
    processes = max((case.record.processes for case in cases), default=1)
    costs = [_compile_cost(case_named(cases, model, "default"), processes) for model in rows]
    broken = {(each.model, each.mode) for each in failed}
    speedups = [[_speedup(case_named(cases, model, mode), (model, mode) in broken) for mode in modes] for model in rows]
    swept = [case for case in cases if case.swept]
    return {
        "table": markdown_table(
            ["case", "compile cost, default", *modes],
            [(" ".join(model), cost, *cells) for model, cost, cells in zip(rows, costs, speedups, strict=True)],
        ),
        "counts": {advice: advices.count(advice) for advice in ("compile", "inconclusive", "don't")},
        "processes": processes,
        "alone": any(ALONE in cost for cost in costs),
        "not_compared": _not_compared(swept),
        "models": len({target for target, _ in rows}),
        "kinds": " and ".join(sorted({kind for _, kind in rows}, reverse=True)),
        "calls": [_call(call, cases, failed) for call in calls],
        "cells": _cell_table(in_order(results, swept), on_gpu=results.environment.gpu is not None),
        "drift": _drift(swept),
        "failed": [(title(each), each.why) for each in in_order(results, failed)],
        "missing": _missing(results) if calls else [],
    }


def _compile_cost(case: MeasuredCase | None, processes: int) -> str:
    if case is None:
        return "–"
    return numbers.with_unit(case.verdict.cost, "s") + (ALONE if processes > 1 and case.compiled_alone else "")


def _speedup(case: MeasuredCase | None, failed: bool) -> str:
    if case is None:
        return "failed" if failed else "–"
    text = numbers.quantity(case.steady.speedup)
    return {"compile": text, "inconclusive": f"({text})", "don't": f"**{text}**"}[case.verdict.advice]


def _call(call: SweepCall, cases: Sequence[MeasuredCase], failed: Sequence[FailedCell]) -> str:
    """How many cells a call of the sweep measured, when, and at which commit."""
    own = [case.record for case in cases if case.record.sweep_call == call.number]
    own_failed = [each for each in failed if each.sweep_call == call.number]
    commit = commit_label(call.commit, call.dirty)
    return f"{plural(len(own) + len(own_failed), 'cell')} on {call.date} at {commit}"


def _missing(results: Results) -> list[tuple[str, str]]:
    """Models and kinds with modes that no call of the sweep has reached, and these modes."""
    modes: dict[str, list[str]] = {}
    for case in missing(results):
        modes.setdefault(f"{case.target} {case.kind}", []).append(case.mode)
    return [(model, ", ".join(left)) for model, left in modes.items()]


def _cell_table(cases: Sequence[MeasuredCase], *, on_gpu: bool) -> str:
    """What each cell of a sweep showed besides its speed-up."""
    rows = []
    for case in cases:
        counts = [profile_counts(case, name) for name in ("kernels", "launches") if on_gpu]
        rows.append(
            (
                title(case, mode=False),
                case.mode,
                numbers.with_unit(case.cold.total, "s") + MARK * case.record.tuned,
                numbers.with_unit(sum(case.cold.phases.values()), "s"),
                eager_to_compiled(case.steady.eager.value, case.steady.compiled.value, "s"),
                peak_memory(case),
                *counts,
                numbers.count(case.compilation.graphs),
                numbers.count(len(case.compilation.breaks)),
                _within(case.accuracy),
            )
        )
    gpu_columns = ["GPU kernels", "launches"] if on_gpu else []
    header = ["case", "mode", "first steps", "compiling", "step", "peak memory", *gpu_columns]
    return table([*header, "graphs", "breaks", "within bounds"], rows, left=2)


def _within(accuracy: Accuracy) -> str:
    if accuracy.skipped:
        return f"not compared{NOT_COMPARED}"
    return "yes" if accuracy.holds else "**no**"


def _drift(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """Ratio of the longest to the shortest eager step of a model's cells; empty without two cells of any model."""
    steps: dict[Model, list[float]] = {}
    for case in cases:
        steps.setdefault(case.model, []).append(case.steady.eager.value)
    ratios = {model: max(each) / min(each) for model, each in steps.items() if len(each) > 1}
    if not ratios:
        return {}
    most = max(ratios, key=lambda model: ratios[model])
    return {
        "case": " ".join(most),
        "middle": numbers.with_unit(statistics.median(ratios.values()), "×"),
        "most": numbers.with_unit(ratios[most], "×"),
    }


def _not_compared(cases: Sequence[MeasuredCase]) -> list[tuple[str, str]]:
    """Models whose results could not be compared, by reason."""
    found: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.accuracy.skipped:
            found.setdefault(case.accuracy.skipped, {})[title(case, mode=False)] = None
    return [(", ".join(titles), why) for why, titles in found.items()]

"""The report's section on models and modes: speed-ups, what each cell showed, what is missing, max-autotune's worth."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchkit import numbers
from benchkit.environment import commit_label
from benchkit.report import markdown_table
from benchkit.results import Quantity, Record, Results
from compile_bench.measure.serialize import case_title, plural
from compile_bench.measure.verdict import difference
from compile_bench.report.queries import (
    CaseKey,
    alone,
    case_key,
    compiled_first,
    in_order,
    models,
    same_case,
    side_by_side,
    swept_cases,
    verdict_of,
)
from compile_bench.sweep.cells import missing
from compile_bench.targets.case import MODES

# Behind first steps that found in the caches what another mode's autotuning had chosen.
MARK = "ᵃ"

# Behind the accuracy of cells whose results could not be compared.
NOT_COMPARED = "ᵇ"

# Behind the price of a model that was compiled alone, in a table of those that were not.
ALONE = "ᶜ"


def sweep_context(results: Results, verdicts: Sequence[Record]) -> dict[str, Any]:
    """Speed-up by model and mode, and what a sweep has left out; empty for fewer than three models and no sweep."""
    rows = models(results, _outcomes(results, verdicts))
    if len(rows) < 3 and not results.select("sweep call"):
        return {}
    modes = [mode for mode in MODES if any(record.labels["mode"] == mode for record in _outcomes(results, verdicts))]
    failed = _failed(results)
    beside = max((side_by_side(record) for record in results.select("first steps")), default=1)
    crowded = beside > 1
    table = []
    for target, kind in rows:
        by_mode = {mode: verdict for mode in modes if (verdict := _find(verdicts, target, kind, mode))}
        start = by_mode.get("default")
        cells = [_speedup(results, by_mode.get(mode), (target, kind, mode) in failed) for mode in modes]
        cost = "–"
        if start is not None:
            cost = numbers.with_unit(start["price"].value, "s") + (ALONE if crowded and alone(results, [start]) else "")
        table.append((f"{target} {kind}", cost, *cells))
    advices = [verdict.data["advice"] for verdict in verdicts if verdict.labels["mode"] in MODES]
    return {
        "table": markdown_table(["case", "price, default", *modes], table),
        "counts": {advice: advices.count(advice) for advice in ("compile", "inconclusive", "don't")},
        "side_by_side": beside,
        "alone": any(ALONE in row[1] for row in table),
        "not_compared": _not_compared(results),
        "models": len({target for target, _ in rows}),
        "kinds": " and ".join(sorted({kind for _, kind in rows}, reverse=True)),
        "calls": _calls(results),
        "cells": _cells(results, verdicts),
        "drift": _drift(results, verdicts),
        "failed": [(case_title(record), record.data["failed"]) for record in in_order(results, [*failed.values()])],
        "missing": _missing(results),
    }


def _outcomes(results: Results, verdicts: Sequence[Record]) -> list[Record]:
    return [*verdicts, *_failed(results).values()]


def _failed(results: Results) -> dict[CaseKey, Record]:
    return {case_key(record): record for record in results.select("cell") if record.data["failed"]}


def _find(verdicts: Sequence[Record], target: str, kind: str, mode: str) -> Record | None:
    return next((verdict for verdict in verdicts if case_key(verdict) == (target, kind, mode)), None)


def _speedup(results: Results, verdict: Record | None, failed: bool) -> str:
    if verdict is None:
        return "failed" if failed else "–"
    text = numbers.quantity(same_case(results, "steady", verdict)["speedup"])
    return {"compile": text, "inconclusive": f"({text})", "don't": f"**{text}**"}[verdict.data["advice"]]


def _calls(results: Results) -> list[str]:
    """A line for every call of the sweep: how many cells, when, at which commit."""
    lines = []
    for call in results.select("sweep call"):
        own = [record for record in results.select("cell") if record.data["call"] == call.labels["call"]]
        commit = commit_label(call.data["commit"], call.data["dirty"])
        lines.append(f"{plural(len(own), 'cell')} on {call.data['date']} at {commit}")
    return lines


def _missing(results: Results) -> list[tuple[str, str]]:
    """Model and kind, and the modes that no call has come to."""
    if not results.select("sweep call"):
        return []
    modes: dict[str, list[str]] = {}
    for case in missing(results):
        modes.setdefault(f"{case.target} {case.kind}", []).append(case.mode)
    return [(model, ", ".join(left)) for model, left in modes.items()]


def _cells(results: Results, verdicts: Sequence[Record]) -> str:
    """What each cell of a sweep showed beside its speed-up, as a table."""
    swept = swept_cases(results)
    own = [verdict for verdict in verdicts if case_key(verdict) in swept]
    on_gpu = results.environment.gpu is not None
    rows = []
    for verdict in in_order(results, own):
        first = compiled_first(results, verdict)[0]
        phases = sum(quantity.value for name, quantity in first.values.items() if name.startswith("phase "))
        compilation, profile, memory, steady = (
            same_case(results, name, verdict) for name in ("compilation", "profile", "memory", "steady")
        )
        started = [_arrow(profile, f" {what}", numbers.count) for what in ("kernels", "launches") if on_gpu]
        rows.append(
            (
                case_title(verdict, mode=False),
                verdict.labels["mode"],
                numbers.with_unit(first["total"].value, "s") + (MARK if _tuned(results, verdict) else ""),
                numbers.with_unit(phases, "s"),
                _arrow(steady, "", lambda value: numbers.with_unit(value, "s")),
                _arrow(memory, "", lambda value: numbers.with_unit(value, "B")),
                *started,
                numbers.count(compilation["graphs"].value),
                numbers.count(compilation["breaks"].value),
                _within(same_case(results, "accuracy", verdict)),
            )
        )
    gpu_columns = ["GPU kernels", "launches"] if on_gpu else []
    header = [
        "case",
        "mode",
        "first steps",
        "compiling",
        "step",
        "peak memory",
        *gpu_columns,
        "graphs",
        "breaks",
        "within bounds",
    ]
    return markdown_table(header, rows, left=2) if rows else ""


def _drift(results: Results, verdicts: Sequence[Record]) -> dict[str, str]:
    """How far eager's steps of one model lie apart, longest over shortest of its cells; empty without two of any."""
    steps: dict[tuple[str, str], list[float]] = {}
    swept = swept_cases(results)
    for verdict in verdicts:
        if case_key(verdict) in swept:
            step = same_case(results, "steady", verdict)["eager"].value
            steps.setdefault(case_key(verdict)[:2], []).append(step)
    apart = {model: max(each) / min(each) for model, each in steps.items() if len(each) > 1}
    if not apart:
        return {}
    most = max(apart, key=lambda model: apart[model])
    middle = statistics.median(apart.values())
    return {
        "case": " ".join(most),
        "middle": numbers.with_unit(middle, "×"),
        "most": numbers.with_unit(apart[most], "×"),
    }


def _arrow(record: Record, what: str, shown: Any) -> str:
    values = [record.values.get(f"{name}{what}") for name in ("eager", "compiled")]
    return " → ".join(shown(value.value) for value in values if value is not None) or "–"


def _within(accuracy: Record) -> str:
    if accuracy.data["skipped"]:
        return f"not compared{NOT_COMPARED}"
    return "yes" if accuracy.data["holds"] else "**no**"


def _not_compared(results: Results) -> list[tuple[str, str]]:
    """Why results of swept cells could not be compared: models and kinds of a reason together, and the reason."""
    swept = swept_cases(results)
    found: dict[str, dict[str, None]] = {}
    for record in results.select("accuracy"):
        if record.data["skipped"] and case_key(record) in swept:
            found.setdefault(record.data["skipped"], {})[case_title(record, mode=False)] = None
    return [(", ".join(titles), why) for why, titles in found.items()]


def _tuned(results: Results, verdict: Record) -> bool:
    """Whether a case found in its caches what autotuning had chosen in another mode."""
    return any(record.labels["cache"] == "tuned" for record in compiled_first(results, verdict))


@dataclass(frozen=True)
class Autotuned:
    """A mode that autotunes, held against the same without.

    Attributes:
        verdict: the record of the one.
        before: the other one's mode.
        speed: step of the other one over its own, paired, with its interval.
        gain: seconds a step; 0 where the two cannot be told apart.
        more: seconds that autotuning adds to the first steps; None where that is not known.
        borrowed: whether these are those of the mode that autotuned the same kernels.
    """

    verdict: Record
    before: str
    speed: Quantity
    gain: float
    more: float | None
    borrowed: bool


def autotuned(results: Results) -> list[Autotuned]:
    """Every case that autotunes, held against the same without in the same rounds."""
    found = []
    for verdict in in_order(results, results.select("verdict")):
        steady = same_case(results, "steady", verdict)
        if "untuned" not in steady.values:
            continue
        speed, before = steady["speedup over untuned"], str(steady.data["untuned mode"])
        seen = difference(speed, steady.values.get("control"))
        gain = 0.0 if seen == "none" else steady["untuned"].value * (1 - 1 / speed.value)
        found.append(Autotuned(verdict, before, speed, gain, *_more(results, verdict, before)))
    return found


def _more(results: Results, verdict: Record, before: str) -> tuple[float | None, bool]:
    """Seconds that autotuning adds to the first steps, and whether they are those of the mode that did it."""
    borrowed = _tuned(results, verdict)
    tuner = verdict_of(results, verdict, "max-autotune-no-cudagraphs") if borrowed else verdict
    plain = verdict_of(results, verdict, "default" if borrowed else before)
    if tuner is None or plain is None:
        return None, False
    return tuner["price"].value - plain["price"].value, borrowed


def autotuning_context(results: Results) -> dict[str, Any]:
    """What autotuning costs and gives over the mode without it: a table, and how often a step was faster or slower."""
    found = autotuned(results)
    rows = []
    for each in found:
        cost = after = "–"
        if each.more is not None:
            cost = f"{'+' if each.more >= 0 else '−'}{numbers.with_unit(abs(each.more), 's')}{MARK * each.borrowed}"
            after = f"{numbers.count(max(each.more, 0) / each.gain)} steps" if each.gain > 0 else "never"
        rows.append((case_title(each.verdict), each.before, numbers.quantity(each.speed), cost, after))
    if not rows:
        return {}
    header = ["case", "held against", "step, times as fast", "first steps", "paid for after"]
    return {
        "table": markdown_table(header, rows, left=2),
        "all": len(found),
        "faster": sum(each.gain > 0 for each in found),
        "slower": sum(each.gain < 0 for each in found),
        "equal": sum(each.gain == 0 for each in found),
        "borrowed": any(each.borrowed for each in found),
    }

"""The report's sections on models and modes: verdicts, what each cell showed, and what is missing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from benchkit import numbers
from benchkit.device import Device
from benchkit.environment import commit_label
from benchkit.results import Results
from compile_bench.measure.measurements import Accuracy
from compile_bench.measure.records import FailedCell, SweepCall
from compile_bench.measure.serialize import plural
from compile_bench.measure.verdict import Advice
from compile_bench.report.autotuning import MARK
from compile_bench.report.queries import MeasuredCase, Model, in_order, mode_index, title
from compile_bench.report.regressions import explain_slower
from compile_bench.report.tables import eager_to_compiled, peak_memory, profile_counts, table
from compile_bench.sweep.cells import missing
from compile_bench.targets.case import MODES
from compile_bench.targets.workloads import workload

_Cell = MeasuredCase | FailedCell

# Marks the accuracy of cells whose results could not be compared.
NOT_COMPARED = "ᵇ"

# Marks the compile cost of a model that was compiled alone, in a table of models that were not.
ALONE = "ᶜ"


def models_section(results: Results, cases: Sequence[MeasuredCase]) -> dict[str, Any]:
    """A table of the models for each mode, what the cells showed together, and the cells that are missing.

    The speed-ups of two modes have no common table: each was measured in a process of its own.
    """
    failed = in_order(results, FailedCell.select(results))
    whole = [case for case in cases if case.record.scope == "whole"]
    entries: list[_Cell] = in_order(results, [*whole, *failed])
    device: Device = "cpu" if results.environment.gpu is None else "cuda"
    by_mode = {mode: own for mode in MODES if (own := [each for each in entries if each.mode == mode])}
    swept = [case for case in whole if case.swept]
    calls = SweepCall.select(results)
    return {
        "table": models_table(by_mode.get("default", []), cases, device),
        "modes": [
            {
                "mode": mode,
                "counts": _counts(own),
                "table": models_table(own, cases, device) if mode != "default" else "",
                "cells": _cell_table(
                    [each for each in own if isinstance(each, MeasuredCase) and each.swept], on_gpu=device == "cuda"
                ),
            }
            for mode, own in by_mode.items()
            if mode != "default" or swept
        ],
        "counts": _counts(entries),
        "all": len(entries),
        "processes": max((case.record.processes for case in cases), default=1),
        "alone": any(_marked_alone(case, cases) for case in whole),
        "not_compared": _not_compared([each for each in entries if isinstance(each, MeasuredCase)]),
        "models": len({each.model[0] for each in entries}),
        "calls": [_call(call, cases, failed) for call in calls],
        "drift": _drift(swept),
        "failed": [(title(each), each.why) for each in failed],
        "failed_models": _failed_models(failed),
        "missing": _missing(results) if calls else [],
    }


def models_table(shown: Sequence[_Cell], cases: Sequence[MeasuredCase], device: Device) -> str:
    """What each case of a mode is, whether compiling it is worth its price, and what that rests on."""
    rows = []
    for each in shown:
        name = (" ".join(each.model), str(workload(each.model[0], device) or "–"))
        if isinstance(each, FailedCell):
            rows.append((*name, "failed", *["–"] * 4))
            continue
        rows.append(
            (
                *name,
                _emphasised(numbers.quantity(each.steady.speedup), each),
                _verdict(each, cases),
                numbers.quantity(each.steady.control) if each.steady.control else "–",
                numbers.with_unit(each.verdict.cost, "s")
                + MARK * each.record.tuned
                + ALONE * _marked_alone(each, cases),
                _compared(each.accuracy),
            )
        )
    header = ["case", "model, batch", "speed-up: eager / compiled step (95 %)", "compile? (break-even, empty caches)"]
    return table([*header, "control: eager / eager (95 %)", "compile cost", "results compared"], rows, left=4)


def _verdict(case: MeasuredCase, cases: Sequence[MeasuredCase]) -> str:
    """The verdict with its price or its reason; for a slower step with the cause and what to do."""
    verdict = case.verdict
    if verdict.advice == "don't" and case.accuracy.holds:
        return f"**don't**: {explain_slower(case, cases)}"
    return verdict.text


def _emphasised(text: str, case: MeasuredCase) -> str:
    return f"**{text}**" if case.verdict.advice == "don't" else text


def _marked_alone(case: MeasuredCase, cases: Sequence[MeasuredCase]) -> bool:
    """Whether the compile cost stands among others that were measured while several models compiled."""
    return case.compiled_alone and any(each.record.processes > 1 for each in cases)


def _counts(cells: Sequence[_Cell]) -> dict[str, int]:
    """How many cells have each verdict and how many failed; of those worth compiling, how many by speed alone."""
    verdicts = [each.verdict for each in cells if isinstance(each, MeasuredCase)]
    counts = Counter(verdict.advice for verdict in verdicts)
    return {
        **{advice: counts[advice] for advice in get_args(Advice)},
        "by speed alone": sum(verdict.advice == "compile" and bool(verdict.not_compared) for verdict in verdicts),
        "failed": len(cells) - len(verdicts),
    }


def _failed_models(failed: Sequence[FailedCell]) -> str:
    """The models with failed cells, each with the modes."""
    modes: dict[str, set[str]] = {}
    for each in failed:
        modes.setdefault(each.target, set()).add(each.mode)
    return "; ".join(f"{target} in {', '.join(sorted(found, key=mode_index))}" for target, found in modes.items())


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
    """What the cells of a mode cost, and what their step does, eager → compiled."""
    rows = []
    for case in cases:
        counts = [profile_counts(case, name) for name in ("kernels", "launches") if on_gpu]
        rows.append(
            (
                " ".join(case.model),
                numbers.with_unit(case.cold.total, "s") + MARK * case.record.tuned,
                numbers.with_unit(sum(case.cold.phases.values()), "s"),
                eager_to_compiled(case.steady.eager.value, case.steady.compiled.value, "s"),
                peak_memory(case),
                *counts,
                numbers.count(case.compilation.graphs),
                numbers.count(len(case.compilation.breaks)),
            )
        )
    gpu_columns = ["GPU kernels", "launches"] if on_gpu else []
    header = ["case", "first steps", "compiling", "step", "peak memory", *gpu_columns]
    return table([*header, "graphs", "breaks"], rows)


def _compared(accuracy: Accuracy) -> str:
    if accuracy.skipped:
        return f"no{NOT_COMPARED}"
    return "yes, within bounds" if accuracy.holds else "yes, **outside their bounds**"


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

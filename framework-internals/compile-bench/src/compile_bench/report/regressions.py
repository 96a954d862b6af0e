"""The report's sections on what compiling made worse: steps that are slower, and attention that is no longer fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchkit import numbers
from benchkit.report import markdown_table
from benchkit.results import Record, Results
from compile_bench.measure.serialize import case_title
from compile_bench.report.queries import case_key, in_order, same_case, value_of

# Kernels of either side that a row names.
_NAMED = 3

# Backends of fused attention differ in their number of kernels, forward and backward 3 to 5: with fewer than this share
# of eager's, no other backend was chosen but some attention is fused no more.
_STILL_FUSED = 0.5


def slower_table(results: Results) -> str:
    """A row for every model and kind with a step that is slower compiled, in the first such mode; empty without any.

    Only where the GPU's own time was recorded: on a CPU there is none.
    """
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for verdict in in_order(results, results.select("verdict")):
        steady = same_case(results, "steady", verdict)
        profiles = results.select("profile", **verdict.labels)
        if steady["speedup"].value >= 1 or verdict.data["advice"] != "don't" or not profiles:
            continue
        if "compiled busy" in profiles[0].values:
            rows.setdefault(case_key(verdict)[:2], _row(verdict, steady, profiles[0]))
    header = ["case", "step", "GPU at work", "dearest kernels, eager", "dearest kernels, compiled"]
    return markdown_table(header, list(rows.values())) if rows else ""


def attention_table(results: Results) -> str:
    """A row for every model and kind that runs less fused attention compiled than in eager; empty without any."""
    rows: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for profile in in_order(results, results.select("profile")):
        eager, compiled = (value_of(profile, f"{name} fused attention") for name in ("eager", "compiled"))
        if compiled < eager * _STILL_FUSED:
            model, kind, mode = case_key(profile)
            count = f"{numbers.count(eager)} → {numbers.count(compiled)}"
            rows.setdefault((model, kind), (count, []))[1].append(mode)
    header = ["case", "modes", "fused attention a step, eager → compiled"]
    found = [(f"{model} {kind}", ", ".join(modes), count) for (model, kind), (count, modes) in rows.items()]
    return markdown_table(header, found) if found else ""


def _row(verdict: Record, steady: Record, profile: Record) -> tuple[str, ...]:
    steps = [steady[name].value for name in ("eager", "compiled")]
    busy = [profile[f"{name} busy"].value for name in ("eager", "compiled")]
    kernels = [_kernels(profile.data["dearest"][name]) for name in ("eager", "compiled")]
    return case_title(verdict), _seconds(steps), _seconds(busy), *kernels


def _seconds(pair: Sequence[float]) -> str:
    return " → ".join(numbers.with_unit(value, "s") for value in pair)


def _kernels(costliest: Sequence[Mapping[str, Any]]) -> str:
    shown = (
        f"`{kernel['name']}` {kernel['calls']:.3g} × in {numbers.with_unit(kernel['seconds'], 's')}"
        for kernel in costliest[:_NAMED]
    )
    return "; ".join(shown) or "–"

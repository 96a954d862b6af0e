"""The report's sections on what compiling made worse: slower steps, and attention that is no longer fused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchkit import numbers
from benchkit.results import Results
from compile_bench.measure.measurements import KernelTime, StepProfile
from compile_bench.report.queries import MeasuredCase, Model, case_named, in_order, title
from compile_bench.report.tables import eager_to_compiled, table

# Number of kernels that a row names for eager, and for compiled.
_NAMED = 3

# Backends of fused attention differ in their number of kernels: 3 to 5, forward and backward. With fewer than this
# share of eager's kernels, some attention is no longer fused.
_STILL_FUSED = 0.5


def explain_slower(case: MeasuredCase, cases: Iterable[MeasuredCase]) -> str:
    """Why a compiled step is slower and what to do, by its profiles; the verdict's reason without profiles of a GPU."""
    before, after = case.record.eager_profile, case.record.compiled_profile
    if before is None or after is None:
        return case.verdict.why
    if _unfused(before, after):
        count = f"{numbers.count(before.fused_attention)} → {numbers.count(after.fused_attention)}"
        return (
            f"attention is no longer fused ({count} fused kernels a step); "
            "often a mask that torch up to 2.11 adds: use a later torch, or tell the model that nothing is masked"
        )
    if before.busy_seconds is None or after.busy_seconds is None:
        return case.verdict.why
    if after.busy_seconds > before.busy_seconds:
        busy = eager_to_compiled(before.busy_seconds, after.busy_seconds, "s")
        return f"the compiler's kernels are slower (GPU at work {busy}); leave this model eager"
    busy, step = (numbers.with_unit(each, "s") for each in (after.busy_seconds, case.steady.compiled.value))
    text = f"the GPU waits for the host (at work for {busy} of {step}); use CUDA graphs"
    graphs = case_named(cases, case.model, "reduce-overhead")
    if graphs is not None and graphs.verdict.advice == "compile":
        text += f", mode reduce-overhead: {numbers.quantity(graphs.steady.speedup)} of eager"
    return text


def slower_table(results: Results, cases: Sequence[MeasuredCase]) -> str:
    """A row for every model and kind with a slower compiled step, in the first such mode; empty without any.

    Only a run on a GPU has rows, since they show the GPU's time.
    """
    rows: dict[Model, tuple[str, ...]] = {}
    for case in in_order(results, cases):
        if case.steady.speedup.value < 1 and case.verdict.advice == "don't" and (row := _row(case)):
            rows.setdefault(case.model, row)
    header = ["case", "step", "GPU at work", "costliest kernels, eager", "costliest kernels, compiled"]
    return table(header, list(rows.values()))


def attention_table(results: Results, cases: Sequence[MeasuredCase]) -> str:
    """A row for every model and kind that runs less fused attention compiled than in eager; empty without any."""
    rows: dict[Model, tuple[str, list[str]]] = {}
    for case in in_order(results, cases):
        before, after = case.record.eager_profile, case.record.compiled_profile
        if before is None or after is None:
            continue
        if _unfused(before, after):
            count = f"{numbers.count(before.fused_attention)} → {numbers.count(after.fused_attention)}"
            rows.setdefault(case.model, (count, []))[1].append(case.mode)
    header = ["case", "modes", "fused attention a step, eager → compiled"]
    return table(header, [(" ".join(model), ", ".join(modes), count) for model, (count, modes) in rows.items()], left=2)


def _unfused(before: StepProfile, after: StepProfile) -> bool:
    return after.fused_attention < before.fused_attention * _STILL_FUSED


def _row(case: MeasuredCase) -> tuple[str, ...]:
    before, after = case.record.eager_profile, case.record.compiled_profile
    if before is None or after is None or before.busy_seconds is None or after.busy_seconds is None:
        return ()
    steps = eager_to_compiled(case.steady.eager.value, case.steady.compiled.value, "s")
    busy = eager_to_compiled(before.busy_seconds, after.busy_seconds, "s")
    return title(case), steps, busy, _kernels(before.costliest), _kernels(after.costliest)


def _kernels(costliest: Sequence[KernelTime]) -> str:
    shown = (
        f"`{kernel.name}` {kernel.calls:.3g} × in {numbers.with_unit(kernel.seconds, 's')}"
        for kernel in costliest[:_NAMED]
    )
    return "; ".join(shown) or "–"

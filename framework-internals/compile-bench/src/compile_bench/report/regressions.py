"""The report's sections on what compiling made worse: slower steps, and attention that is no longer fused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchkit import numbers
from benchkit.report import Column, Section, Table
from benchkit.results import Results
from compile_bench.measure.records import Bench, StepProfile
from compile_bench.measure.verdict import judge
from compile_bench.report.details import eager_to_compiled, profile_counts
from compile_bench.report.queries import Model, case_named, in_order, title

# Number of kernels that a row names for eager, and for compiled.
_NAMED = 3

# Backends of fused attention differ in their number of kernels: 3 to 5, forward and backward. With fewer than this
# share of eager's kernels, some attention is no longer fused.
_STILL_FUSED = 0.5


def explain_slower(case: Bench, cases: Iterable[Bench]) -> str:
    """Why a compiled step is slower and what to do, by its profiles; the verdict's reason without profiles of a GPU."""
    before, after = case.eager_profile, case.compiled_profile
    if before is None or after is None:
        return judge(case).why
    if _unfused(before, after):
        count = f"{numbers.count(before.fused_attention)} → {numbers.count(after.fused_attention)}"
        return (
            f"attention is no longer fused ({count} fused kernels a step); "
            "often a mask that torch up to 2.11 adds: use a later torch, or tell the model that nothing is masked"
        )
    if before.busy_seconds is None or after.busy_seconds is None:
        return judge(case).why
    if after.busy_seconds > before.busy_seconds:
        busy = eager_to_compiled(before.busy_seconds, after.busy_seconds, "s")
        return f"the compiler's kernels are slower (GPU at work {busy}); leave this model eager"
    busy, step = (numbers.with_unit(seconds, "s") for seconds in (after.busy_seconds, case.steady.compiled.value))
    text = f"the GPU waits for the host (at work for {busy} of {step}); use CUDA graphs"
    graphs = case_named(cases, case.model, "reduce-overhead")
    if graphs is not None and judge(graphs).advice == "compile":
        text += f", mode reduce-overhead: {numbers.quantity(graphs.steady.speedup)} of eager"
    return text


def slower_section(results: Results, cases: Sequence[Bench]) -> Section:
    """The slower models with their costliest kernels, and the attention that compiling takes apart."""
    on_gpu = results.environment.gpu is not None
    return Section(
        "Slower when compiled",
        [
            Section(
                "",
                [
                    "The cause and what to do stand beside each slower case in the tables of the modes.",
                    Section(
                        "",
                        [
                            "One line for each such model, in its first such mode; all figures are of one step. Where "
                            "the GPU is at work for longer, the compiler's kernels are slower than those that they "
                            "replace; where it is not, the host launches them more slowly.",
                            slower_table(results, cases),
                        ],
                        fold="The costliest kernels of each model with a slower compiled step",
                    ),
                ],
            ),
            Section(
                "Attention that compiling takes apart",
                [_attention_text(on_gpu=on_gpu), attention_table(results, cases)],
            ),
        ],
    )


def slower_table(results: Results, cases: Sequence[Bench]) -> Table[Bench]:
    """A row for every model and kind with a slower compiled step, in the first such mode; empty without any.

    Only a run on a GPU has rows, since they show the GPU's time.
    """
    slower: dict[Model, Bench] = {}
    for case in in_order(results, cases):
        if case.steady.speedup.value < 1 and judge(case).advice == "don't" and _busy(case):
            slower.setdefault(case.model, case)
    return Table(
        list(slower.values()),
        [
            Column("case", title),
            Column("step", lambda case: eager_to_compiled(case.steady.eager.value, case.steady.compiled.value, "s")),
            Column("GPU at work", _busy),
            Column("costliest kernels, eager", lambda case: _kernels(case.eager_profile)),
            Column("costliest kernels, compiled", lambda case: _kernels(case.compiled_profile)),
        ],
    )


def attention_table(results: Results, cases: Sequence[Bench]) -> Table[tuple[Bench, list[str]]]:
    """A row for every model and kind that runs less fused attention compiled than in eager; empty without any."""
    rows: dict[Model, tuple[Bench, list[str]]] = {}
    for case in in_order(results, cases):
        before, after = case.eager_profile, case.compiled_profile
        if before is not None and after is not None and _unfused(before, after):
            rows.setdefault(case.model, (case, []))[1].append(case.variant)
    return Table(
        list(rows.values()),
        [
            Column("case", lambda row: " ".join(row[0].model)),
            Column("modes", lambda row: ", ".join(row[1]), left=True),
            Column("fused attention a step, eager → compiled", lambda row: profile_counts(row[0], "fused_attention")),
        ],
    )


def _attention_text(*, on_gpu: bool) -> str:
    by_what, stride = "by fused operators", ""
    if on_gpu:
        by_what = "in fused kernels"
        stride = (
            " The mask is expanded along the keys and has stride 0 there, while every fused kernel on a GPU needs "
            "stride 1."
        )
    return (
        f"Eager runs the attention of these steps {by_what}. The compiled steps have less than half as many: the "
        "scores go through memory between the two products. One cause: up to torch 2.11 "
        "`torch.compiler.is_exporting()` is true in every compilation "
        "([pytorch#176347](https://github.com/pytorch/pytorch/issues/176347)). A model that calls it, as those of "
        f"transformers do, then makes a mask that masks nothing, which eager leaves out.{stride} A later torch keeps "
        "such attention fused, and so does a model that is told that nothing is masked."
    )


def _unfused(before: StepProfile, after: StepProfile) -> bool:
    return after.fused_attention < before.fused_attention * _STILL_FUSED


def _busy(case: Bench) -> str | None:
    before, after = case.eager_profile, case.compiled_profile
    if before is None or after is None or before.busy_seconds is None or after.busy_seconds is None:
        return None
    return eager_to_compiled(before.busy_seconds, after.busy_seconds, "s")


def _shortened(name: str, limit: int = 60) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _kernels(profile: StepProfile | None) -> str | None:
    shown = (
        f"`{_shortened(kernel.name)}` {kernel.calls:.3g} × in {numbers.with_unit(kernel.seconds, 's')}"
        for kernel in (profile.costliest[:_NAMED] if profile else ())
    )
    return "; ".join(shown) or None

"""The report: its finding, its first lines and the variables of its template, computed from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchkit import numbers
from benchkit.report import ReportSpec
from benchkit.results import Results
from compile_bench.measure.records import ShapesRecord, Toolchain
from compile_bench.measure.serialize import plural
from compile_bench.measure.verdict import BUSY, NOT_COMPARED
from compile_bench.report.autotuning import autotuning_section
from compile_bench.report.breaks import counted_breaks, natural_breaks
from compile_bench.report.figures import figures
from compile_bench.report.queries import (
    CACHES,
    MeasuredCase,
    compiled_alone,
    headline,
    measured_cases,
    named_starts,
    title,
)
from compile_bench.report.regressions import attention_table, slower_table
from compile_bench.report.shapes import shapes_section
from compile_bench.report.sweep import models_section
from compile_bench.report.tables import (
    accuracy_table,
    break_even_table,
    compilation_table,
    cudagraph_reasons,
    first_steps_table,
    plan_table,
    profile_table,
    scope_table,
    steady_table,
)
from compile_bench.report.triage import triage_context
from compile_bench.targets.case import FIRST_STEPS
from compile_bench.targets.workloads import workload


def finding(results: Results) -> str:
    """What the run found, in at most two sentences: the case that opens the report, and the range of all others."""
    cases = measured_cases(results)
    if not cases:
        return "No case could be measured to the end."
    case = headline(cases)
    about = workload(case.record.target, case.device)
    name = f"{title(case)} ({about})" if about else title(case)
    seen = _seen(case) if case.verdict.advice != "compile" else NOT_COMPARED * bool(case.verdict.not_compared)
    sentence = f"A compiled step of {name} is {numbers.quantity(case.steady.speedup)} as fast as the eager one"
    sentence += f" ({seen})" if seen else ""
    sentence += f", for {numbers.with_unit(case.verdict.cost, 's')} of compiling"
    if case.verdict.advice == "compile":
        sentence += f", paid for after {_paid_after(case)}"
    return f"{sentence}. {_others(case, cases)}".strip()


def one_sentence(results: Results) -> str:
    """The finding in at most 30 words, for the index: the best and the worst case."""
    cases = measured_cases(results)
    found = [case for case in cases if case.mode == "default"]
    if len(found) > 2:
        return _others(headline(cases), cases)
    shown = [f"{title(case)} {numbers.with_unit(case.steady.speedup.value, '×')} ({_seen(case)})" for case in found]
    return f"A compiled step beside the eager one: {', '.join(shown) or 'no case could be measured to the end'}."


def _paid_after(case: MeasuredCase) -> str:
    """The break-even with empty caches, and the earliest other one."""
    verdict = case.verdict
    others = [
        (even.steps, name)
        for even, name in ((verdict.warm, CACHES["warm"]), (verdict.mega, CACHES["mega"]))
        if even is not None and even.steps is not None
    ]
    text = verdict.cold.text
    if others:
        steps, name = min(others)
        text += f", or {numbers.count(steps)} with {name}"
    return text


def _others(case: MeasuredCase, cases: Sequence[MeasuredCase]) -> str:
    """The best and the worst case of mode default, as a sentence; empty without another case."""
    found = sorted(
        (each for each in cases if each.mode == "default"), key=lambda each: each.steady.speedup.value, reverse=True
    )
    if len(found) < 2:
        return ""
    if len(found) == 2:
        other = found[found[0] is case]
        return f"{title(other)}: {numbers.quantity(other.steady.speedup)}, {_seen(other)}."
    advices = [each.verdict.advice for each in found]
    faster, slower = advices.count("compile"), advices.count("don't")
    best, worst = (
        f"{numbers.with_unit(each.steady.speedup.value, '×')} ({title(each)})" for each in (found[0], found[-1])
    )
    targets = plural(len({each.record.target for each in found}), "model")
    return (
        f"In mode default {faster} of {len(found)} cases ({targets}) are faster and {slower} slower, "
        f"from {best} down to {worst}."
    )


def _seen(case: MeasuredCase) -> str:
    if not case.accuracy.holds:
        return "results outside their bounds"
    return {"compile": "faster", "don't": "slower", "inconclusive": "inconclusive"}[case.verdict.advice]


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    cases = measured_cases(results)
    main_job, undisturbed = [case for case in cases if not case.swept], compiled_alone(cases)
    on_gpu = results.environment.gpu is not None
    toolchain = Toolchain.select(results)
    return {
        "answers": _answers(headline(cases)) if cases else [],
        "case_names": list(dict.fromkeys(title(case, mode=False) for case in main_job)),
        "break_even_table": break_even_table(undisturbed),
        "plan": plan_table(undisturbed),
        "models": models_section(results, cases),
        "slower_table": slower_table(results, cases),
        "attention_table": attention_table(results, cases),
        "autotuning": autotuning_section(results, cases),
        "scopes": scope_table(cases),
        "first_table": first_steps_table(named_starts(undisturbed)),
        "steady_table": steady_table(undisturbed),
        "step_table": profile_table(main_job, on_gpu=on_gpu),
        "cudagraphs": cudagraph_reasons(cases),
        "compilation_table": compilation_table(main_job),
        "accuracy_table": accuracy_table(main_job),
        "natural": natural_breaks(results, cases),
        "triages": counted_breaks(results),
        "shapes": [shapes_section(record) for record in ShapesRecord.select(results)],
        "toolchain": numbers.with_unit(toolchain[0].seconds, "s") if toolchain else "",
        "forked": any(each.forked for each in toolchain),
        "pressures": [case.steady.pressure for case in cases if case.steady.pressure is not None],
        "controls": _controls(cases),
        "clocks": sorted({case.steady.method for case in cases}),
        "on_gpu": on_gpu,
        "recorder_share": _recorder_share(headline(cases)) if cases else "",
        "first_steps": FIRST_STEPS,
        "busy": BUSY,
        **triage_context(results),
    }


REPORT = ReportSpec("compile_bench", context, figures, finding, one_sentence)


def _answers(case: MeasuredCase) -> list[tuple[str, str]]:
    """The four lines on the case that opens the report: what it costs, gives and breaks, and when to use it."""
    compilation, accuracy = case.compilation, case.accuracy
    breaks = plural(len(compilation.breaks), "graph break")
    recompiles = plural(len(compilation.recompiles), "recompilation")
    compared = "outputs and gradients" if accuracy.gradient else "outputs"
    within = f"{compared} {'within' if accuracy.holds else 'outside'} their bound against float64"
    right = accuracy.skipped or accuracy.wrong or within
    return [
        ("It costs", f"{_costs(case)} than eager for the first {FIRST_STEPS} steps ({title(case)})."),
        ("It gives", f"a step {numbers.quantity(case.steady.speedup)} as fast{_memory_clause(case)}."),
        ("It breaks", f"{breaks} and {recompiles} in {plural(compilation.graphs, 'graph')}; {right}."),
        ("Use it", f"{_advice(case)}."),
    ]


def _costs(case: MeasuredCase) -> str:
    """Seconds that the first steps take longer than eager's, for every state of the caches."""
    parts = []
    for caches, start in case.starts:
        extra = start.total - case.eager.total
        amount = f"{numbers.with_unit(extra, 's')} more" if extra > 0 else "no more"
        parts.append(f"{amount} with {caches}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _memory_clause(case: MeasuredCase) -> str:
    memory = case.record.memory
    if memory is None:
        return ""
    share = memory.compiled / memory.eager - 1
    return f", with {numbers.percent(abs(share), 0)} {'less' if share < 0 else 'more'} memory at the peak of a step"


def _advice(case: MeasuredCase) -> str:
    verdict = case.verdict
    text = verdict.text
    for even, name in ((verdict.warm, CACHES["warm"]), (verdict.mega, CACHES["mega"])):
        text += f", with {name} {even.text}" if even and verdict.advice == "compile" else ""
    return text


def _controls(cases: Sequence[MeasuredCase]) -> dict[str, int]:
    """How many comparisons of eager with itself have an interval around 1, and how many there are."""
    controls = [case.steady.control for case in cases if case.steady.control is not None]
    within = sum(control.low is not None and control.low <= 1 <= (control.high or 0) for control in controls)
    return {"within": within, "all": len(controls)}


def _recorder_share(case: MeasuredCase) -> str:
    seconds, total = case.compilation.recorder_seconds, case.cold.total
    return (
        f"{numbers.with_unit(seconds, 's')} of {numbers.with_unit(total, 's')} ({numbers.percent(seconds / total, 2)})"
    )

"""What a run found, in words: the case that opens the report, and the best and the worst of all others."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit import numbers
from benchkit.results import Results
from compile_bench.capture.text import plural
from compile_bench.measure.records import CACHES, Bench
from compile_bench.measure.verdict import NOT_COMPARED, judge
from compile_bench.report.queries import measured_cases, opening_case, title
from compile_bench.targets.case import FIRST_STEPS
from compile_bench.targets.workloads import workload


def finding(results: Results) -> str:
    """What the run found, in at most two sentences: the case that opens the report, and the range of all others."""
    cases = measured_cases(results)
    if not cases:
        return "No case could be measured to the end."
    case = opening_case(cases)
    about = workload(case.target, case.device)
    name = f"{title(case)} ({about})" if about else title(case)
    seen = _seen(case) if judge(case).advice != "compile" else NOT_COMPARED * bool(judge(case).not_compared)
    sentence = f"A compiled step of {name} is {numbers.quantity(case.steady.speedup)} as fast as the eager one"
    sentence += f" ({seen})" if seen else ""
    sentence += f", for {numbers.with_unit(judge(case).cost, 's')} of compiling"
    if judge(case).advice == "compile":
        sentence += f", paid for after {_paid_after(case)}"
    return f"{sentence}. {_others(case, cases)}".strip()


def headline(results: Results) -> str:
    """The finding in at most 30 words, for the index: the best and the worst case."""
    cases = measured_cases(results)
    default = [case for case in cases if case.variant == "default"]
    if len(default) > 2:
        return _others(opening_case(cases), cases)
    shown = [f"{title(case)} {numbers.with_unit(case.steady.speedup.value, '×')} ({_seen(case)})" for case in default]
    return f"A compiled step beside the eager one: {', '.join(shown) or 'no case could be measured to the end'}."


def _paid_after(case: Bench) -> str:
    """The break-even with empty caches, and the earliest other one."""
    verdict = judge(case)
    others = [
        (even.steps, name)
        for even, name in ((verdict.warm, CACHES["warm"]), (verdict.artifact, CACHES["artifact"]))
        if even is not None and even.steps is not None
    ]
    text = verdict.cold.text
    if others:
        steps, name = min(others)
        text += f", or {numbers.count(steps)} with {name}"
    return text


def _others(opening: Bench, cases: Sequence[Bench]) -> str:
    """The best and the worst case of mode default, as a sentence; empty without another case."""
    default = sorted(
        (case for case in cases if case.variant == "default"), key=lambda case: case.steady.speedup.value, reverse=True
    )
    if len(default) < 2:
        return ""
    if len(default) == 2:
        other = default[default[0] is opening]
        return f"{title(other)}: {numbers.quantity(other.steady.speedup)}, {_seen(other)}."
    advices = [judge(case).advice for case in default]
    faster, slower = advices.count("compile"), advices.count("don't")
    best, worst = (
        f"{numbers.with_unit(case.steady.speedup.value, '×')} ({title(case)})" for case in (default[0], default[-1])
    )
    targets = plural(len({case.target for case in default}), "model")
    return (
        f"In mode default {faster} of {len(default)} cases ({targets}) are faster and {slower} slower, "
        f"from {best} down to {worst}."
    )


def _seen(case: Bench) -> str:
    if not case.accuracy.holds:
        return "results outside their bounds"
    return {"compile": "faster", "don't": "slower", "inconclusive": "inconclusive"}[judge(case).advice]


def answers(case: Bench) -> list[str]:
    """The four lines on the case that opens the report: what it costs, gives and breaks, and when to use it."""
    compilation, accuracy = case.compilation, case.accuracy
    breaks = plural(len(compilation.breaks), "graph break")
    recompiles = plural(len(compilation.recompiles), "recompilation")
    compared = "outputs and gradients" if accuracy.gradient else "outputs"
    within = f"{compared} {'within' if accuracy.holds else 'outside'} their bound against float64"
    right = accuracy.skipped or accuracy.wrong or within
    return [
        f"**It costs:** {_costs(case)} than eager for the first {FIRST_STEPS} steps ({title(case)}).",
        f"**It gives:** a step {numbers.quantity(case.steady.speedup)} as fast{_memory_clause(case)}.",
        f"**It breaks:** {breaks} and {recompiles} in {plural(compilation.graphs, 'graph')}; {right}.",
        f"**Use it:** {_advice(case)}.",
    ]


def _costs(case: Bench) -> str:
    """Seconds that the first steps take longer than eager's, for every state of the caches."""
    parts = []
    for caches, start in case.starts:
        extra = start.total - case.eager.total
        amount = f"{numbers.with_unit(extra, 's')} more" if extra > 0 else "no more"
        parts.append(f"{amount} with {caches}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _memory_clause(case: Bench) -> str:
    memory = case.memory
    if memory is None:
        return ""
    share = memory.compiled / memory.eager - 1
    return f", with {numbers.percent(abs(share), 0)} {'less' if share < 0 else 'more'} memory at the peak of a step"


def _advice(case: Bench) -> str:
    verdict = judge(case)
    text = verdict.text
    for even, name in ((verdict.warm, CACHES["warm"]), (verdict.artifact, CACHES["artifact"])):
        text += f", with {name} {even.text}" if even and verdict.advice == "compile" else ""
    return text

"""What a run found, in words: the best and the worst case, when compiling pays and when not."""

from __future__ import annotations

from benchkit import numbers
from benchkit.results import Results
from compile_bench.measure.records import CACHES, Bench
from compile_bench.measure.verdict import NOT_COMPARED, judge
from compile_bench.report.queries import measured_cases, opening_case, title
from compile_bench.targets.workloads import workload


def headline(results: Results) -> str:
    """The slowest and the fastest compiled step beside eager, and how many are slower: the first sentence."""
    cases = _of_default(results)
    if not cases:
        return "No case could be measured to the end."
    worst, *_, best = cases * 2 if len(cases) == 1 else cases
    ends = dict.fromkeys(
        f"{numbers.with_unit(case.steady.speedup.value, '×')} ({title(case)})" for case in (worst, best)
    )
    slower = sum(judge(case).advice == "don't" for case in cases)
    lost = "none is" if not slower else "1 case is" if slower == 1 else f"{slower} cases are"
    wrong = sum(not case.accuracy.holds for case in cases)
    told = f", with results outside their bounds in {wrong}" if wrong else ""
    return f"Compiled steps run at {' to '.join(ends)} of eager's speed, and {lost} slower{told}."


def use(results: Results) -> str:
    """When compiling has paid for itself, of the case that opens the report."""
    cases = measured_cases(results)
    paid = [case for case in (opening_case(cases),) if judge(case).advice == "compile"] if cases else []
    for case in paid:
        about = workload(case.target, case.device)
        name = f"{title(case)} ({about})" if about else title(case)
        not_compared = f", {NOT_COMPARED}" if judge(case).not_compared else ""
        return (
            f"a run is longer than its break-even: {name} is {numbers.quantity(case.steady.speedup)} as fast"
            f"{not_compared}, and {numbers.with_unit(judge(case).cost, 's')} of compiling are paid after "
            f"{_paid_after(case)}."
        )
    return "your own case is faster: the table says for each which runs are long enough." if cases else ""


def avoid(results: Results) -> str:
    """The cases that compiling slows down, or that need the longest run."""
    cases = _of_default(results)
    slower = [case for case in cases if judge(case).advice == "don't"]
    if slower:
        named = ", ".join(f"{title(case)} ({numbers.with_unit(case.steady.speedup.value, '×')})" for case in slower)
        return f"your model is one of those that lose, or runs are short: {named}. The table says why."
    longest = max(
        (case for case in cases if judge(case).cold.steps), key=lambda case: judge(case).cold.steps or 0, default=None
    )
    if longest is None:
        return "eager is as fast: no case here pays for its compiling."
    return f"the run is shorter: {title(longest)} pays only after {judge(longest).cold.text}."


def worst(results: Results) -> str:
    """The slowest compiled step of all modes, and the largest memory beside eager's."""
    cases = measured_cases(results)
    if not cases:
        return ""
    slowest = min(cases, key=lambda case: case.steady.speedup.value)
    sentences = [f"{numbers.quantity(slowest.steady.speedup)} of eager's speed, for {title(slowest)}."]
    memory = max((case for case in cases if case.memory), key=_of_eagers_memory, default=None)
    if memory is not None and _of_eagers_memory(memory) > 1:
        times = numbers.with_unit(_of_eagers_memory(memory), "×")
        sentences.append(f"Memory at the peak of a step: {times} of eager's, for {title(memory)}.")
    return " ".join(sentences)


def _of_eagers_memory(case: Bench) -> float:
    memory = case.memory
    return memory.compiled / memory.eager if memory and memory.eager else 0.0


def _of_default(results: Results) -> list[Bench]:
    """The cases of mode default, the slowest first."""
    cases = (case for case in measured_cases(results) if case.variant == "default")
    return sorted(cases, key=lambda case: case.steady.speedup.value)


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

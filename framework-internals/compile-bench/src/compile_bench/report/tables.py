"""The report's tables about the cases of the main job: verdicts, first steps, steady steps, counts, accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit import numbers
from benchkit.report import markdown_table
from compile_bench.measure.measurements import ErrorPair
from compile_bench.measure.serialize import plural
from compile_bench.measure.verdict import CACHE_STATES, PLAN_STEPS, plan_rows
from compile_bench.report.queries import CACHES, MeasuredCase, NamedStart, case_named, start_parts, title


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table; empty without rows."""
    return markdown_table(header, rows, left=left) if rows else ""


def break_even_table(cases: Sequence[MeasuredCase]) -> str:
    """Break-even by what a process finds in its caches, of the cases that were measured with more than empty ones."""
    rows = []
    for case in cases:
        verdict = case.verdict
        if verdict.warm or verdict.mega:
            evens = (verdict.cold, verdict.warm, verdict.mega)
            rows.append((title(case), *("–" if even is None else even.text for even in evens)))
    return table(["break-even", *CACHES.values()], rows)


def plan_table(cases: Sequence[MeasuredCase]) -> dict[str, str]:
    """Compile or not, by length of the run, restarts and caches, for the first case; empty without a case."""
    if not cases:
        return {}
    rows = [
        (
            numbers.count(restarts),
            CACHE_STATES[cache],
            *(plan.text for plan in plans),
        )
        for restarts, cache, plans in plan_rows(cases[0])
    ]
    header = ["restarts", "each process finds", *(f"{numbers.count(count)} steps" for count in PLAN_STEPS)]
    return {"case": title(cases[0]), "table": markdown_table(header, rows, left=2)}


def scope_table(cases: Sequence[MeasuredCase]) -> str:
    """Compiled blocks beside the whole model."""
    shown: list[MeasuredCase] = []
    for case in cases:
        whole = case_named(cases, case.model, case.record.mode)
        if case.record.scope != "whole" and whole is not None:
            shown += [each for each in (whole, case) if each not in shown]
    rows = [
        (
            title(case, mode=False),
            case.record.scope,
            numbers.with_unit(case.cold.total, "s"),
            numbers.quantity(case.steady.speedup),
            numbers.count(case.compilation.graphs),
            numbers.count(case.compilation.kernels),
            case.verdict.cold.text,
        )
        for case in shown
    ]
    header = ["case", "compiled", "first steps", "speed-up (95 %)", "graphs", "kernels", "break-even"]
    return table(header, rows, left=2)


def first_steps_table(starts: Sequence[NamedStart]) -> str:
    """Where the first steps of each process go."""
    parts = [start_parts(each.start) for each in starts]
    names = [name for name in (parts[0] if parts else ()) if any(each[name] for each in parts)]
    rows = [
        (
            f"{each.title}, {each.caches}",
            numbers.with_unit(each.start.total, "s"),
            *(numbers.significant(seconds[name]) if seconds[name] else "–" for name in names),
        )
        for each, seconds in zip(starts, parts, strict=True)
    ]
    return table(["process", "total", *(f"{name}, s" for name in names)], rows)


def steady_table(cases: Sequence[MeasuredCase]) -> str:
    """Steps after all compiling."""
    rows = []
    for case in cases:
        steady = case.steady
        rows.append(
            (
                title(case),
                numbers.quantity(steady.eager),
                numbers.quantity(steady.compiled),
                numbers.quantity(steady.speedup),
                numbers.quantity(steady.control) if steady.control else "–",
                steady.speedup.samples,
            )
        )
    header = ["case", "eager (p20–p80)", "compiled (p20–p80)", "speed-up (95 %)", "eager against itself", "rounds"]
    return table(header, rows)


def profile_table(cases: Sequence[MeasuredCase], *, on_gpu: bool) -> str:
    """What a step does, eager → compiled: operators, kernels, launches, memory, and how much of it is compiled."""
    rows = []
    for case in cases:
        compiled = case.record.compiled_profile
        if compiled is None:
            continue
        counts = [profile_counts(case, name) for name in ("operators", *(("kernels", "launches") if on_gpu else ()))]
        covered = "–" if compiled.covered is None else numbers.percent(compiled.covered)
        rows.append((title(case), covered, *counts, numbers.with_unit(compiled.guard_seconds, "s"), peak_memory(case)))
    header = ["case", "inside compiled regions", "operators called", *(["GPU kernels", "launches"] if on_gpu else [])]
    return table([*header, "looking up compiled code", "peak memory"], rows)


def profile_counts(case: MeasuredCase, name: str) -> str:
    """A count of the profiles, eager → compiled; a dash where the profiler has none."""
    counts = [getattr(profile, name, None) for profile in (case.record.eager_profile, case.record.compiled_profile)]
    return "–" if None in counts else " → ".join(numbers.count(count) for count in counts if count is not None)


def peak_memory(case: MeasuredCase) -> str:
    """Peak memory of a step, eager → compiled."""
    memory = case.record.memory
    return "–" if memory is None else eager_to_compiled(memory.eager, memory.compiled, "B")


def eager_to_compiled(eager: float, compiled: float, unit: str) -> str:
    """A figure of eager and of compiled, eager → compiled."""
    return f"{numbers.with_unit(eager, unit)} → {numbers.with_unit(compiled, unit)}"


def cudagraph_reasons(cases: Sequence[MeasuredCase]) -> list[tuple[str, str]]:
    """Cases that asked for CUDA graphs and did not get them, grouped by reason."""
    titles: dict[str, list[str]] = {}
    for case in cases:
        if case.record.no_cudagraphs:
            titles.setdefault("; ".join(case.record.no_cudagraphs), []).append(title(case))
    return [("; ".join(each), reasons) for reasons, each in titles.items()]


def compilation_table(cases: Sequence[MeasuredCase]) -> str:
    """Counts of each compilation."""
    rows = []
    for case in cases:
        found = case.compilation
        counts = (found.graphs, found.operations, len(found.breaks), len(found.recompiles), found.guards, found.kernels)
        check = found.guard_check_seconds
        rows.append((title(case), *map(numbers.count, counts), "–" if check is None else numbers.with_unit(check, "s")))
    header = ["case", "graphs", "operations", "breaks", "recompiles", "guards", "generated kernels", "one guard check"]
    return table(header, rows)


def accuracy_table(cases: Sequence[MeasuredCase]) -> str:
    """Errors against float64 and their bounds."""
    rows: list[tuple[str, ...]] = []
    for case in cases:
        accuracy = case.accuracy
        if accuracy.skipped or accuracy.wrong:
            why = accuracy.skipped or accuracy.wrong
            rows.append((title(case), why, "", "", "", "" if accuracy.skipped else "**no**"))
            continue
        moved = accuracy.attempts - 1
        note = f", with the weights moved {plural(moved, 'time')}" if moved else ""
        rows += [_error_row(case, pair, note) for pair in (accuracy.output, accuracy.gradient) if pair is not None]
    return table(["case", "tensor", "eager error", "compiled error", "bound", "within"], rows, left=2)


def _error_row(case: MeasuredCase, pair: ErrorPair, note: str) -> tuple[str, ...]:
    name = "output" if pair is case.accuracy.output else f"gradient of `{pair.name}`"
    errors = (numbers.error_size(error) for error in (pair.eager, pair.compiled, pair.bound))
    return title(case), name, *errors, f"{'yes' if pair.holds else '**no**'}{note}"

"""The commands ``run`` and ``check``."""

from __future__ import annotations

from typing import Annotated

import typer

from benchkit import numbers
from benchkit.progress import working
from benchkit.report import markdown_table
from compile_bench.cli_common import (
    OVER_BUDGET,
    DeviceName,
    Dynamic,
    Limit,
    Mode,
    Seconds,
    TargetName,
    Train,
    case_of,
    leave,
    place,
)
from compile_bench.cli_triage import describe_triage
from compile_bench.harness import DEFAULT_LIMIT, Harness
from compile_bench.records import plural
from compile_bench.results import Bench, Triage
from compile_bench.verdict import judge


def run(
    target: TargetName,
    train: Train = True,
    mode: Mode = "default",
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
    seconds: Seconds = 10.0,
) -> None:
    """Measure everything: price, gain, break-even, breaks, recompiles, accuracy."""

    def measure() -> int:
        case = case_of(target, train, mode, dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"measuring {target}"):
            bench = harness.bench(case, steady_seconds=seconds)
        print(describe_bench(bench))
        return 0

    leave(measure)


def check(
    target: TargetName,
    max_breaks: Annotated[int, typer.Option(help="Graph breaks allowed.")] = 0,
    max_recompiles: Annotated[int, typer.Option(help="Recompilations allowed.")] = 1,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            help="Measure, and fail if the whole interval of the speed-up is below this. Without it: no timing."
        ),
    ] = None,
    train: Train = True,
    mode: Mode = "default",
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
    seconds: Seconds = 10.0,
) -> None:
    """Hold a target to a budget. Exit status: 0 kept, 1 exceeded, 2 unusable target, 3 could not be measured."""

    def judge_budget() -> int:
        case = case_of(target, train, mode, dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"checking {target}"):
            found = harness.triage(case)
            bench = None if min_speedup is None else harness.bench(case, steady_seconds=seconds, warm=False)
        exceeded = budget_exceeded(found, bench, max_breaks, max_recompiles, min_speedup)
        for line in exceeded:
            print(f"{target}: {line}")
        if not exceeded:
            print(f"{target}: within budget")
        return OVER_BUDGET if exceeded else 0

    leave(judge_budget)


def budget_exceeded(
    found: Triage, bench: Bench | None, max_breaks: int, max_recompiles: int, min_speedup: float | None
) -> list[str]:
    """One line for every part of a budget that is exceeded; the breaks and recompilations themselves follow theirs."""
    lines = []
    trace = found.trace
    if len(trace.breaks) > max_breaks:
        lines.append(f"{plural(len(trace.breaks), 'graph break')}, {max_breaks} allowed")
        lines += [f"  {place(entry.file, entry.line)}: {entry.reason}" for entry in trace.breaks]
    if len(trace.recompiles) > max_recompiles:
        lines.append(f"{plural(len(trace.recompiles), 'recompilation')}, {max_recompiles} allowed")
        lines += [f"  {place(entry.file, entry.line)}: {entry.guard} no longer held" for entry in trace.recompiles]
    if bench is not None and min_speedup is not None:
        speedup = bench.steady.speedup
        assert speedup.high is not None
        if speedup.high < min_speedup:
            lines.append(
                f"speed-up {numbers.quantity(speedup)}, at least {numbers.significant(min_speedup)}× asked for"
            )
        if not bench.accuracy.holds:
            lines.append("the compiled results are further from float64 than the bound allows")
    return lines


def describe_bench(bench: Bench) -> str:
    """Everything about a case as Markdown, the verdict first."""
    verdict = judge(bench)
    steady = bench.steady
    rows = [
        ("verdict", f"{verdict.advice}: {verdict.why}"),
        ("speed-up", f"{numbers.quantity(steady.speedup)}, {steady.speedup.interval}"),
        ("step, eager", numbers.quantity(steady.eager)),
        ("step, compiled", numbers.quantity(steady.compiled)),
        ("price, caches empty", numbers.with_unit(verdict.price, "s")),
        ("break-even, caches empty", _steps(verdict.cold.steps)),
    ]
    if verdict.warm is not None and bench.warm is not None:
        rows.append(("break-even, caches warm", _steps(verdict.warm.steps)))
    rows += [(f"compiling: {name}", numbers.with_unit(seconds, "s")) for name, seconds in bench.trace.phases.items()]
    rows.append(("accuracy", _accuracy(bench)))
    if bench.memory is not None:
        eager, compiled = (numbers.with_unit(peak, "B") for peak in (bench.memory.eager, bench.memory.compiled))
        rows.append(("peak memory", f"eager {eager}, compiled {compiled}"))
    table = markdown_table([f"{bench.case.target}, {bench.case.kind}, {bench.case.mode}", ""], rows, left=2)
    return table + "\n\n" + describe_triage(Triage(bench.case, bench.trace, len(bench.cold.steps)))


def _accuracy(bench: Bench) -> str:
    accuracy = bench.accuracy
    if accuracy.skipped:
        return f"not compared: {accuracy.skipped}"
    assert accuracy.output is not None
    size = numbers.error_size
    text = f"{'within' if accuracy.holds else 'OUTSIDE'} the bound, {accuracy.tensors} tensors against float64"
    return f"{text}; output error {size(accuracy.output.compiled)}, eager {size(accuracy.output.eager)}"


def _steps(steps: float | None) -> str:
    return "never" if steps is None else f"{numbers.count(steps)} steps"

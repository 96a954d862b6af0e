"""The command ``compile-bench``: ``run``, ``triage`` and ``check``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchkit import UserError, numbers
from benchkit.device import resolve_device
from benchkit.progress import working
from benchkit.report import markdown_table
from compile_bench.harness import DEFAULT_LIMIT, Harness, WorkerFailure
from compile_bench.records import plural, shorten
from compile_bench.results import MODES, Bench, Case, Triage
from compile_bench.verdict import judge

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="What torch.compile costs, what it gives and what breaks the graph, for any model.",
)

OVER_BUDGET, UNUSABLE, NOT_MEASURED = 1, 2, 3

TargetName = Annotated[
    str, typer.Argument(help="file.py:function or module:attribute that returns (model, args), or a name of the zoo.")
]
Train = Annotated[bool, typer.Option("--train/--infer", help="A training step, or a forward pass without gradients.")]
Mode = Annotated[str, typer.Option(help=f"Mode of torch.compile: {', '.join(MODES)}.")]
Dynamic = Annotated[
    bool | None,
    typer.Option("--dynamic/--static", help="Sizes symbolic from the start, or never; PyTorch's choice else."),
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Limit = Annotated[float, typer.Option(help="Seconds after which a measuring process is ended.")]
Seconds = Annotated[float, typer.Option(help="Seconds of sampling steady steps.")]


@app.command()
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
        case = _case(target, train, mode, dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"measuring {target}"):
            bench = harness.bench(case, steady_seconds=seconds)
        print(describe_bench(bench))
        return 0

    _exit(measure)


@app.command()
def triage(
    target: TargetName,
    train: Train = True,
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
) -> None:
    """List every graph break and recompilation with its line, its reason and its category."""

    def trace() -> int:
        case = _case(target, train, "default", dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"tracing {target}"):
            found = harness.triage(case)
        print(describe_triage(found))
        return 0

    _exit(trace)


@app.command()
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
        case = _case(target, train, mode, dynamic, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"checking {target}"):
            found = harness.triage(case)
            bench = None if min_speedup is None else harness.bench(case, steady_seconds=seconds, warm=False)
        exceeded = budget_exceeded(found, bench, max_breaks, max_recompiles, min_speedup)
        for line in exceeded:
            print(f"{target}: {line}")
        if not exceeded:
            print(f"{target}: within budget")
        return OVER_BUDGET if exceeded else 0

    _exit(judge_budget)


def budget_exceeded(
    found: Triage, bench: Bench | None, max_breaks: int, max_recompiles: int, min_speedup: float | None
) -> list[str]:
    """One line for every part of a budget that is exceeded; the breaks and recompilations themselves follow theirs."""
    lines = []
    trace = found.trace
    if len(trace.breaks) > max_breaks:
        lines.append(f"{plural(len(trace.breaks), 'graph break')}, {max_breaks} allowed")
        lines += [f"  {_place(entry.file, entry.line)}: {entry.reason}" for entry in trace.breaks]
    if len(trace.recompiles) > max_recompiles:
        lines.append(f"{plural(len(trace.recompiles), 'recompilation')}, {max_recompiles} allowed")
        lines += [f"  {_place(entry.file, entry.line)}: {entry.guard} no longer held" for entry in trace.recompiles]
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


def describe_triage(found: Triage) -> str:
    """Breaks and recompilations as Markdown."""
    trace = found.trace
    lines = [
        f"{found.case.target}, {found.case.kind}: {len(trace.graphs)} graphs, {trace.operations} operations, "
        f"{trace.guards} guards, {len(trace.breaks)} breaks, {len(trace.recompiles)} recompilations "
        f"in {found.calls} calls"
    ]
    if trace.breaks:
        rows = [
            (
                _place(e.file, e.line),
                e.category,
                e.reason + (" (whole function eager)" if e.whole_frame else ""),
                e.source,
            )
            for e in trace.breaks
        ]
        lines += ["", markdown_table(["break", "category", "reason", "line"], rows, left=4)]
    if trace.recompiles:
        rows = [(_place(e.file, e.line), e.cause, e.guard, e.function) for e in trace.recompiles]
        lines += ["", markdown_table(["recompiled", "cause", "guard that failed", "function"], rows, left=4)]
    return "\n".join(lines)


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


def _place(file: str, line: int) -> str:
    return f"{shorten(file, Path.cwd())}:{line}"


def _case(target: str, train: bool, mode: str, dynamic: bool | None, device: str) -> Case:
    known = next((known for known in MODES if known == mode), None)
    if known is None:
        raise UserError(f"--mode takes {', '.join(MODES)}, got {mode!r}")
    return Case(target, resolve_device(device), train, known, dynamic)


def _exit(action: Callable[[], int]) -> None:
    try:
        status = action()
    except UserError as error:
        print(f"compile-bench: {error}", file=sys.stderr)
        status = UNUSABLE
    except WorkerFailure as error:
        print(f"compile-bench: {error}", file=sys.stderr)
        status = NOT_MEASURED
    raise typer.Exit(status)

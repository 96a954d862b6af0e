"""The commands ``check`` and ``lock``: a target against a budget, or against its lock file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchkit import numbers
from benchkit.command.progress import working
from benchkit.processes import deferred_module
from compile_bench.cli.options import (
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
)
from compile_bench.lock import DEFAULT_FILE, key_of, locked, update_lock
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness
from compile_bench.measure.measurements import Bench, Inventory, Triage
from compile_bench.measure.serialize import break_lines, plural, recompile_lines
from compile_bench.measure.verdict import busy
from compile_bench.targets.case import Case

if TYPE_CHECKING:
    from compile_bench.measure import steps
else:
    steps = deferred_module("compile_bench.measure.steps")


def check(
    target: TargetName,
    max_breaks: Annotated[int, typer.Option(min=0, help="Graph breaks allowed; breaks at one line count once.")] = 0,
    max_recompiles: Annotated[int, typer.Option(min=0, help="Recompilations allowed.")] = 1,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            help="Fail if the whole interval of the speed-up is below this. Nothing is timed without this option."
        ),
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(help="Also fail if graphs, breaks, recompilations, guards or kernels differ from this lock file."),
    ] = None,
    train: Train = True,
    mode: Mode = "default",
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
    seconds: Seconds = 10.0,
) -> None:
    """Check a target against a budget. Exit status: 0 within, 1 exceeded, 2 unusable target, 3 not measured."""

    def judge_budget() -> int:
        case = case_of(target, train, mode, dynamic, device)
        before = None if lock is None else locked(lock, key_of(case))
        with Harness.open(case.device, limit=limit) as harness, working(f"checking {target}"):
            found = harness.triage(case)
            bench = None if min_speedup is None else harness.bench(case, steady_seconds=seconds, warm=False)
            now = None if before is None else _inventory(harness, case)
        exceeded = budget_exceeded(found, bench, max_breaks, max_recompiles, min_speedup)
        if before is not None and now is not None:
            exceeded += before.drift(now)
        for line in exceeded:
            print(f"{target}: {line}")
        if not exceeded:
            print(f"{target}: within budget")
        return OVER_BUDGET if exceeded else 0

    leave(judge_budget)


def lock(
    target: TargetName,
    file: Annotated[Path, typer.Option(help="The lock file. An entry of the same target is replaced.")] = (
        DEFAULT_FILE
    ),
    train: Train = True,
    mode: Mode = "default",
    dynamic: Dynamic = None,
    device: DeviceName = "auto",
    limit: Limit = DEFAULT_LIMIT,
) -> None:
    """Record how many graphs, breaks, recompilations, guards and kernels a target has, for check --lock."""

    def write() -> int:
        case = case_of(target, train, mode, dynamic, device)
        file.parent.mkdir(parents=True, exist_ok=True)  # it may fail, and counting takes long
        with Harness.open(case.device, limit=limit) as harness, working(f"counting {target}"):
            now = _inventory(harness, case)
        update_lock(file, key_of(case), now)
        counts = ", ".join(
            plural(count, noun)
            for count, noun in (
                (now.graphs, "graph"),
                (now.breaks, "break"),
                (now.recompiles, "recompilation"),
                (now.guards, "guard"),
                (now.kernels, "kernel"),
            )
        )
        print(f"{file}: {key_of(case)}: {counts}")
        return 0

    leave(write)


def _inventory(harness: Harness, case: Case) -> Inventory:
    harness.toolchain_seconds()
    return harness.ask(steps.inventory, case)


def budget_exceeded(
    found: Triage, bench: Bench | None, max_breaks: int, max_recompiles: int, min_speedup: float | None
) -> list[str]:
    """One line for every part of a budget that is exceeded, followed by the breaks or recompilations.

    A model that raises only when it is compiled exceeds every budget.
    """
    lines = [f"raises when it is compiled, and not by itself: {each}" for each in found.failures]
    trace = found.trace
    if trace.broken_lines > max_breaks:
        several = f" in {plural(trace.broken_lines, 'line')}" if len(trace.breaks) > trace.broken_lines else ""
        lines.append(f"{plural(len(trace.breaks), 'graph break')}{several}, {max_breaks} allowed")
        lines += [f"  {line}" for line in break_lines(trace.breaks, Path.cwd())]
    if len(trace.recompiles) > max_recompiles:
        lines.append(f"{plural(len(trace.recompiles), 'recompilation')}, {max_recompiles} allowed")
        lines += [f"  {line}" for line in recompile_lines(trace.recompiles, Path.cwd())]
    if bench is not None and min_speedup is not None:
        lines += _too_slow(bench, min_speedup)
    return lines


def _too_slow(bench: Bench, min_speedup: float) -> list[str]:
    lines = []
    speedup = bench.steady.speedup
    assert speedup.high is not None
    if speedup.high < min_speedup:
        line = f"speed-up {numbers.quantity(speedup)}, at least {numbers.significant(min_speedup)}× required"
        disturbed = busy(bench)
        lines.append(f"{line} ({disturbed})" if disturbed else line)
    if not bench.accuracy.holds:
        lines.append("the compiled results are further from float64 than the bound allows")
    return lines

"""The commands ``run``, ``zoo`` and ``shapes``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from benchkit import UserError
from benchkit.command.progress import working
from benchkit.processes import ChildFailure
from compile_bench.cli import options
from compile_bench.cli.describe import (
    describe_bench,
    describe_interrupted,
    describe_part,
    describe_shapes,
    zoo_table,
    zoo_targets,
)
from compile_bench.cli.options import INTERRUPTED, NOT_MEASURED, case_of, ended_as_by_ctrl_c, leave, print_blocks, tell
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness
from compile_bench.measure.measurements import Compiled, FirstSteps
from compile_bench.measure.shapes import MADE_SCHEDULES


def run(
    target: options.TargetName,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
) -> None:
    """Measure one target: compile cost, speed-up, break-even, breaks, recompiles, memory, coverage, accuracy."""

    def measure() -> int:
        case = case_of(target, train, mode, dynamic, device, scope)
        tell(f"{target}, {case.kind}, {mode}: eager, then compiled with empty and with warm caches")
        measured: dict[str, FirstSteps | Compiled] = {}

        def on_part(name: str, part: FirstSteps | Compiled) -> None:
            measured[name] = part
            tell(f"  {describe_part(name, part)}")

        try:
            with (
                Harness.open(case.device, limit=limit) as harness,
                ended_as_by_ctrl_c(),
                working(f"measuring {target}"),
            ):
                bench = harness.bench(case, steady_seconds=seconds, artifacts=True, on_part=on_part)
        except KeyboardInterrupt:
            print()
            print_blocks(describe_interrupted(case, measured))
            return INTERRUPTED
        print()
        print_blocks(describe_bench(bench))
        return 0

    leave(measure)


def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of the zoo or other targets. Without any, the zoo is listed.")
    ] = None,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 3.0,
) -> None:
    """Measure targets, one line each, or list the zoo. A target that fails does not stop the others."""

    def measure() -> int:
        if not names:
            print_blocks([zoo_targets()])
            return 0
        benches, status = [], 0
        cases = [case_of(name, train, mode, dynamic, device) for name in names]
        with Harness.open(cases[0].device, limit=limit) as harness:
            for case in cases:
                try:
                    with working(f"measuring {case.target}"):
                        benches.append(harness.bench(case, steady_seconds=seconds, warm=False))
                except (ChildFailure, UserError) as error:
                    print(f"compile-bench: {error}", file=sys.stderr)
                    status = NOT_MEASURED
        if benches:
            print_blocks([zoo_table(benches)])
        return status

    leave(measure)


def shapes(
    target: options.TargetName,
    schedule: Annotated[
        str,
        typer.Option(
            help=f"A schedule cut from the target's arguments: {', '.join(MADE_SCHEDULES)}. Default: the target's own."
        ),
    ] = "",
    passes: Annotated[int, typer.Option(min=1, help="Number of passes to rank the strategies for.")] = 100,
    train: options.Train = True,
    mode: options.Mode = "default",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 3.0,
) -> None:
    """Compare strategies for changing shapes (mark_dynamic, buckets, padding, …) by their total time."""

    def measure() -> int:
        if schedule and schedule not in MADE_SCHEDULES:
            raise UserError(f"--schedule takes {', '.join(MADE_SCHEDULES)}, got {schedule!r}")
        case = case_of(target, train, mode, None, device)
        with Harness.open(case.device, limit=limit) as harness, working(f"measuring {target}"):
            study = harness.shapes(case, schedule=schedule, seconds=seconds)
        print_blocks(describe_shapes(study, passes))
        return 0

    leave(measure)

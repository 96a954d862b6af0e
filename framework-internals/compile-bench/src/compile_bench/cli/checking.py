"""The commands that compare a target: with a budget or a lock file, with another run's caches, under another torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchkit import UserError, numbers
from benchkit.command.errors import printable
from benchkit.command.finite import finite_option
from benchkit.command.progress import working
from benchkit.processes import ChildFailure, deferred_module
from benchkit.report import markdown_table
from benchkit.results import require_writable
from compile_bench.capture.text import plural
from compile_bench.check.budget import Budget, Outcome, found_in, memory_text, too_slow, without_cuda_graphs
from compile_bench.check.cache_keys import KeyFile, compare_keys, read_keys, write_keys
from compile_bench.check.lock import DEFAULT_FILE, Inventory, key_of, locked, read_lock, update_lock
from compile_bench.check.upgrade import Upgrade, measure_upgrade
from compile_bench.cli import options
from compile_bench.cli.options import NOT_MEASURED, OVER_BUDGET, UNUSABLE, case_of
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness
from compile_bench.measure.records import Triage
from compile_bench.targets.case import Case

if TYPE_CHECKING:
    from compile_bench.check import jobs
    from compile_bench.check.side import Side
else:
    jobs = deferred_module("compile_bench.check.jobs")


_TRACED = "Limits, counted in seconds without generating code"
_COMPILED = "Limits that compile with Inductor and measure"

MaxBreaks = Annotated[
    int, typer.Option(min=0, help="Lines with a graph break that are allowed.", rich_help_panel=_TRACED)
]
MaxRecompiles = Annotated[int, typer.Option(min=0, help="Recompilations allowed.", rich_help_panel=_TRACED)]
MaxRecompilesPerGuard = Annotated[
    int | None,
    typer.Option(min=0, help="Recompilations that one guard may cause.", rich_help_panel=_TRACED),
]
OwnOnly = Annotated[
    bool,
    typer.Option(
        "--own-only",
        help="Do not count breaks and recompilations that installed packages cause.",
        rich_help_panel=_TRACED,
    ),
]
RequireCudaGraphs = Annotated[
    bool,
    typer.Option(
        "--require-cuda-graphs",
        help="Fail unless every compiled graph runs wholly under CUDA graphs; needs a GPU and --mode.",
        rich_help_panel=_COMPILED,
    ),
]
MaxMemoryRatio = Annotated[
    float | None,
    finite_option(help="Peak memory of a step, compiled over eager, at most.", panel=_COMPILED),
]
MinSpeedup = Annotated[
    float | None,
    finite_option(help="Fail if the whole interval of the speed-up is below this.", panel=_COMPILED),
]
LockFile = Annotated[
    Path | None,
    typer.Option(help="Fail if a count differs from this file, which `lock` writes.", rich_help_panel=_COMPILED),
]
SummaryFile = Annotated[
    Path | None, typer.Option(help="Append the results as Markdown, such as to $GITHUB_STEP_SUMMARY.")
]


@dataclass(frozen=True)
class _Limits:
    """The options of one call of ``check``."""

    traced: Budget
    cuda_graphs: bool
    memory_ratio: float | None
    speedup: float | None
    seconds: float
    lock: Path | None


def check(
    targets: options.TargetNames,
    max_breaks: MaxBreaks = 0,
    max_recompiles: MaxRecompiles = 1,
    max_recompiles_per_guard: MaxRecompilesPerGuard = None,
    own_only: OwnOnly = False,
    require_cuda_graphs: RequireCudaGraphs = False,
    max_memory_ratio: MaxMemoryRatio = None,
    min_speedup: MinSpeedup = None,
    lock: LockFile = None,
    summary: SummaryFile = None,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
) -> int:
    """Check targets against a budget. Exit status: 0 within, 1 exceeded, 2 unusable target, 3 not measured.

    With several targets, each is checked, and the status is the highest.
    """
    cases = [case_of(target, train, mode, dynamic, device, scope) for target in targets]
    traced = Budget(max_breaks, max_recompiles, max_recompiles_per_guard, own_only=own_only)
    limits = _Limits(traced, require_cuda_graphs, max_memory_ratio, min_speedup, seconds, lock)
    if require_cuda_graphs:
        _refuse_without_cuda_graphs(cases[0])
    outcomes = []
    with Harness.open(cases[0].device, limit=limit) as harness:
        for case in cases:
            with working(f"checking {case.target}"):
                outcomes.append(_outcome(harness, case, limits))
            _tell(outcomes[-1])
    if summary is not None:
        with summary.open("a") as file:
            file.write(summary_of(outcomes))
    return max(outcome.status for outcome in outcomes)


def _refuse_without_cuda_graphs(case: Case) -> None:
    """Raise a UserError where no CUDA graph can be."""
    if case.device != "cuda":
        raise UserError(
            f"--require-cuda-graphs: expected device cuda, got {case.device}, where there are none; "
            "run it on a machine with a GPU, or leave the option out"
        )
    if not case.wants_cuda_graphs:
        raise UserError(
            f"--require-cuda-graphs: expected a mode that asks for CUDA graphs, got {case.mode}; "
            "add --mode reduce-overhead or --mode max-autotune"
        )


def _outcome(harness: Harness, case: Case, limits: _Limits) -> Outcome:
    """Check one target. What makes that impossible is a part of the outcome."""
    try:
        return _judge(harness, case, limits)
    except UserError as error:
        return Outcome(case.target, UNUSABLE, error=str(error))
    except ChildFailure as error:
        return Outcome(case.target, NOT_MEASURED, error=str(error))


def _judge(harness: Harness, case: Case, limits: _Limits) -> Outcome:
    before = None if limits.lock is None else locked(limits.lock, key_of(case))
    traced = harness.triage(case)
    counts = [found_in(traced.trace)]
    exceeded = [f"raises when it is compiled, and not by itself: {failure}" for failure in traced.failures]
    exceeded += limits.traced.exceeded(traced.trace, Path.cwd())
    if traced.failures:  # and so would the compiled steps of all that follows
        return Outcome(case.target, OVER_BUDGET, tuple(counts), tuple(exceeded))
    if limits.cuda_graphs:
        runs = harness.ask(jobs.cuda_graphs, case)
        counts.append(f"{sum(run.whole for run in runs)} of {plural(len(runs), 'compiled graph')} under CUDA graphs")
        exceeded += without_cuda_graphs(runs)
    if limits.memory_ratio is not None:
        harness.toolchain_seconds()
        memory = harness.ask(jobs.memory, case)
        counts.append(memory_text(memory))
        if memory.ratio > limits.memory_ratio:
            exceeded.append(f"{memory_text(memory)}, at most {numbers.significant(limits.memory_ratio)}× allowed")
    if limits.speedup is not None:
        bench = harness.bench(case, steady_seconds=limits.seconds, warm=False)
        counts.append(f"speed-up {numbers.quantity(bench.steady.speedup)}")
        exceeded += too_slow(bench, limits.speedup)
    if before is not None:
        exceeded += before.drift(_inventory(harness, traced))
    return Outcome(case.target, OVER_BUDGET if exceeded else 0, tuple(counts), tuple(exceeded))


def _compiled(harness: Harness, case: Case) -> Triage:
    """The counts of a target, which must not raise when it is compiled."""
    traced = harness.triage(case)
    if traced.failures:
        raise UserError(f"{case.target} raises when it is compiled, and not by itself: {traced.failures[0]}")
    return traced


def _tell(outcome: Outcome) -> None:
    if outcome.error:
        print(f"compile-bench: {printable(outcome.error)}", file=sys.stderr)
        return
    for line in outcome.exceeded:
        print(f"{outcome.target}: {line}", flush=True)
    if not outcome.exceeded:
        print(f"{outcome.target}: within budget: {', '.join(outcome.found)}", flush=True)


def lock(
    target: options.TargetName,
    file: Annotated[Path, typer.Option(help="The lock file. An entry of the same target is replaced.")] = (
        DEFAULT_FILE
    ),
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
) -> int:
    """Record how many graphs, breaks, recompilations, guards and kernels a target has, for check --lock."""
    case = case_of(target, train, mode, dynamic, device, scope)
    require_writable(file)  # counting takes long
    if file.exists():
        read_lock(file)
    with Harness.open(case.device, limit=limit) as harness, working(f"counting {target}"):
        now = _inventory(harness, _compiled(harness, case))
    update_lock(file, key_of(case), now)
    counts = ", ".join(
        plural(count, noun)
        for count, noun in (
            (now.graphs, "graph"),
            (now.breaks, "graph break"),
            (now.recompiles, "recompilation"),
            (now.guards, "guard"),
            (now.kernels, "kernel"),
        )
    )
    print(f"{file}: {key_of(case)}: {counts}")
    return 0


def _inventory(harness: Harness, traced: Triage) -> Inventory:
    """What a lock file keeps: the counts that ``check`` compares with its limits, and Inductor's kernels."""
    harness.toolchain_seconds()
    kernels, cuda_graphs = harness.ask(jobs.kernels, traced.case)
    return Inventory.of(replace(traced.trace, kernels=kernels), version("torch"), cuda_graphs)


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """A table with one row for each target, and below it what is over budget or went wrong."""
    rows = [(f"`{outcome.target}`", outcome.verdict, "; ".join(outcome.found)) for outcome in outcomes]
    lines = ["### compile-bench check", "", markdown_table(["target", "result", "found"], rows, left=3)]
    for outcome in outcomes:
        details = [outcome.error] if outcome.error else outcome.exceeded
        if details:
            lines += ["", f"`{outcome.target}`: {outcome.verdict}", "", *(f"    {line}" for line in details)]
    return "\n".join(lines) + "\n"


WrittenFile = Annotated[Path, typer.Argument(help="A file that cache-key wrote.")]


def cache_key(
    target: options.TargetName,
    file: Annotated[Path, typer.Option(help="The file for the keys and their parts.")] = Path("compile-keys.json"),
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
) -> int:
    """Write the keys under which the compiler caches a target's graphs, with all their parts, for cache-diff."""
    case = case_of(target, train, mode, dynamic, device)
    require_writable(file)
    with Harness.open(case.device, limit=limit) as harness, working(f"compiling {target}"):
        _compiled(harness, case)  # finds within seconds whether the target is at fault
        harness.toolchain_seconds()
        facts, keys = harness.ask(jobs.cache_keys, case)
    if not keys:
        raise UserError(f"{target}: Inductor's caches were asked for no graph: they are off, or it compiled none")
    write_keys(file, KeyFile(key_of(case), facts, keys))
    print(f"{file}: {plural(len(keys), 'key')} of {key_of(case)}")
    return 0


def cache_diff(before: WrittenFile, after: WrittenFile) -> int:
    """Say which parts of the cache keys of two runs or machines differ. Exit status: 0 if none does, 1 if one does."""
    one, other = read_keys(before), read_keys(after)
    lines = compare_keys(one, other)
    if one.target != other.target:
        lines.append(f"the files are of two targets: {one.target}; {other.target}")
    print("\n".join(lines) or f"{plural(len(one.keys), 'key')}, all the same: the caches of one run serve the other")
    return OVER_BUDGET if lines else 0


Before = Annotated[str, typer.Argument(help="Python executable with the torch in use, such as .venv/bin/python.")]
After = Annotated[str, typer.Argument(help="Python executable with the other torch.")]

_CLAIMS = {"none": "no difference", "faster": "faster", "slower": "slower"}


def upgrade(
    before: Before,
    after: After,
    targets: options.TargetNames,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
) -> int:
    """Compare targets under two torch installations. Exit status: 0, or 1 if something is worse under the second.

    Each side runs its own torch in processes of its own; compile-bench itself need not be installed there.
    """
    worse = False
    for case in [case_of(target, train, mode, dynamic, device) for target in targets]:
        with working(f"measuring {case.target} three times"):
            comparison = measure_upgrade(before, after, case, seconds=seconds, limit=limit)
        print(describe_upgrade(comparison) + "\n", flush=True)
        worse = worse or bool(comparison.worse)
    return OVER_BUDGET if worse else 0


def describe_upgrade(comparison: Upgrade) -> str:
    """Both sides as a Markdown table, and what is worse under the second."""
    one, other = comparison.before, comparison.after
    rows = [
        ("Python", one.python, other.python, ""),
        ("graphs", numbers.count(one.graphs), numbers.count(other.graphs), ""),
        ("lines with a graph break", numbers.count(one.breaks), numbers.count(other.breaks), ""),
        ("recompilations", numbers.count(one.recompiles), numbers.count(other.recompiles), ""),
        (
            "compile cost, empty caches",
            *(_figure(side.compile_seconds, "s") for side in (one, other)),
            "one sample each",
        ),
    ]
    if comparison.step_before is not None and comparison.step_after is not None and comparison.speedup is not None:
        assert comparison.control is not None
        ratios = f"{numbers.quantity(comparison.speedup)}, control {numbers.quantity(comparison.control)}"
        claim = f"{_CLAIMS[comparison.step_difference]}: {ratios}"
        rows.append(("step", numbers.quantity(comparison.step_before), numbers.quantity(comparison.step_after), claim))
    rows += [
        ("peak memory, compiled", *(_figure(side.compiled_bytes, "B") for side in (one, other)), ""),
        ("peak memory, eager", *(_figure(side.eager_bytes, "B") for side in (one, other)), ""),
        ("error against float64", *(_error(side) for side in (one, other)), ""),
    ]
    header = [f"{comparison.case.target}, {comparison.case.kind}", f"torch {one.torch}", f"torch {other.torch}", ""]
    worse = comparison.worse
    lines = [markdown_table(header, rows, left=4), ""]
    lines += [f"worse: {line}" if not line.startswith(" ") else line for line in worse]
    return "\n".join([*lines, "" if worse else "nothing is worse"]).rstrip()


def _figure(value: float | None, unit: str) -> str:
    return "not measured" if value is None else numbers.with_unit(value, unit)


def _error(side: Side) -> str:
    if side.not_compared:
        return side.not_compared
    if side.error is None or side.error_bound is None:
        return "not measured"
    return f"{numbers.error_size(side.error)}, bound {numbers.error_size(side.error_bound)}"

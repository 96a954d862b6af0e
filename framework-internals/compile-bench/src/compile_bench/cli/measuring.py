"""The commands ``run``, ``zoo`` and ``shapes``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from benchkit import UserError, numbers
from benchkit.command.progress import working
from benchkit.processes import ChildFailure
from benchkit.report import Block, Column, Table
from compile_bench.capture.text import plural
from compile_bench.cli import options
from compile_bench.cli.options import INTERRUPTED, NOT_MEASURED, case_of, ended_as_by_ctrl_c, print_blocks, tell
from compile_bench.cli.triaging import describe_triage
from compile_bench.measure.harness import DEFAULT_LIMIT, Harness
from compile_bench.measure.records import Bench, Compiled, FirstSteps, ShapeStudy, Triage
from compile_bench.measure.shapes import MADE_SCHEDULES, Passes, cheapest
from compile_bench.measure.verdict import difference, judge, plan_rows
from compile_bench.report.sections import in_passes, plan_table, strategies_table
from compile_bench.targets.case import Case


def run(
    target: options.TargetName,
    train: options.Train = True,
    mode: options.Mode = "default",
    dynamic: options.Dynamic = None,
    scope: options.ScopeName = "whole",
    device: options.DeviceName = "auto",
    limit: options.Limit = DEFAULT_LIMIT,
    seconds: options.Seconds = 10.0,
) -> int:
    """Measure one target: compile cost, speed-up, break-even, breaks, recompiles, memory, coverage, accuracy."""
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
) -> int:
    """Measure targets, one line each, or list the zoo. A target that fails does not stop the others."""
    if not names:
        print_blocks([zoo_targets()])
        return 0
    from compile_bench.targets.loading import require_known

    for name in names:
        require_known(name)
    benches, status = [], 0
    cases = [case_of(name, train, mode, dynamic, device) for name in names]
    with Harness.open(cases[0].device, limit=limit) as harness, ended_as_by_ctrl_c():
        for case in cases:
            try:
                with working(f"measuring {case.target}"):
                    benches.append(harness.bench(case, steady_seconds=seconds, warm=False))
            except (ChildFailure, UserError) as error:
                print(f"compile-bench: {error}", file=sys.stderr)
                status = NOT_MEASURED
            except KeyboardInterrupt:
                tell(f"interrupted: {case.target} and the targets after it are not measured")
                status = INTERRUPTED
                break
    if benches:
        print_blocks([zoo_table(benches)])
    return status


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
) -> int:
    """Compare strategies for changing shapes (mark_dynamic, buckets, padding, …) by their total time."""
    if schedule and schedule not in MADE_SCHEDULES:
        raise UserError(f"--schedule takes {', '.join(MADE_SCHEDULES)}, got {schedule!r}")
    case = case_of(target, train, mode, None, device)
    with Harness.open(case.device, limit=limit) as harness, working(f"measuring {target}"):
        study = harness.shapes(case, schedule=schedule, seconds=seconds)
    print_blocks(describe_shapes(study, passes))
    return 0


def zoo_targets() -> Table[tuple[str, str]]:
    """The targets of the zoo."""
    from compile_bench.targets.zoo import ZOO

    about = [(name, entry.about) for name, entry in ZOO.items()]
    return Table(about, [Column("target", lambda row: row[0]), Column("what it is", lambda row: row[1], left=True)])


def zoo_table(benches: Sequence[Bench]) -> Table[Bench]:
    """One line for each measured target."""
    return Table(
        benches,
        [
            Column("target", lambda bench: bench.case.target),
            Column("verdict", lambda bench: judge(bench).text, left=True),
            Column("speed-up (95 %)", lambda bench: bench.steady.speedup),
            Column("compile cost", lambda bench: numbers.with_unit(judge(bench).cost, "s")),
            Column("breaks", lambda bench: len(bench.trace.breaks)),
            Column("covered", _covered),
            Column("accuracy", _accuracy),
        ],
    )


def describe_shapes(study: ShapeStudy, passes: int) -> list[Block]:
    """A shape study: what changes, the cheapest strategy, and the report's table of them, the cheapest first."""
    ranked = study.ranking(passes)
    lines = [
        f"{study.target}, {study.kind}: {plural(len(study.schedule), 'call')} a pass, "
        f"{', '.join(study.varying)} changing ({' | '.join(dict.fromkeys(study.schedule))})"
    ]
    if ranked:
        lines.append(f"cheapest for {in_passes(passes)}: {cheapest(study.passes, passes)}")
    table = strategies_table([*ranked, *(strategy for strategy in study.passes if strategy.failed)], (passes,))
    since = Column[Passes](
        "recompiled, since",
        lambda strategy: "; ".join(dict.fromkeys(again.what_changed for again in strategy.recompiles)),
    )
    return ["\n".join(lines), Table(table.rows, [*table.columns, since])]


def describe_part(name: str, part: FirstSteps | Compiled) -> str:
    """What one process has measured, in one line."""
    first = part if isinstance(part, FirstSteps) else part.first
    steps = plural(len(first.steps), "first step")
    line = f"{name}: {steps} in {numbers.with_unit(sum(first.steps), 's')}"
    if isinstance(part, FirstSteps):
        return line
    graphs, breaks = plural(len(part.trace.graphs), "graph"), plural(len(part.trace.breaks), "break")
    line += f", {graphs}, {breaks}"
    return line if part.steady is None else f"{line}; speed-up {numbers.quantity(part.steady.speedup)}"


def describe_interrupted(case: Case, measured: Mapping[str, FirstSteps | Compiled]) -> list[Block]:
    """What was measured before an interrupt: figures and breaks, and what is missing."""
    lines = [f"{case.target}, {case.kind}: interrupted; the verdict needs the steps with warm caches"]
    lines += [describe_part(name, part) for name, part in measured.items()]
    compiled = [part for part in measured.values() if isinstance(part, Compiled)]
    counted = [Triage(case, part.trace, len(part.first.steps)) for part in compiled[:1]]
    return ["\n".join(lines), *(block for triage in counted for block in describe_triage(triage))]


def describe_bench(bench: Bench) -> list[Block]:
    """Everything about a case, the verdict first."""
    verdict = judge(bench)
    steady = bench.steady
    rows = [
        ("verdict", verdict.text),
        ("speed-up", f"{numbers.quantity(steady.speedup)}, {steady.speedup.interval}"),
    ]
    if steady.control is not None:
        rows.append(("eager against itself", numbers.quantity(steady.control)))
    rows += [
        ("step, eager", numbers.quantity(steady.eager)),
        ("step, compiled", numbers.quantity(steady.compiled)),
        *_untuned_rows(bench),
        ("compile cost, empty caches", numbers.with_unit(verdict.cost, "s")),
        ("break-even, empty caches", verdict.cold.text),
    ]
    if verdict.warm is not None:
        rows.append(("break-even, warm caches", verdict.warm.text))
    if verdict.artifact is not None:
        size = numbers.with_unit(bench.artifact_bytes, "B")
        rows.append(("break-even, cache artifacts", f"{verdict.artifact.text}, {size}"))
    rows += [(f"compiling: {name}", numbers.with_unit(seconds, "s")) for name, seconds in bench.trace.phases.items()]
    rows += _step_rows(bench)
    rows.append(("accuracy", _accuracy(bench)))
    title = f"{bench.case.target}, {bench.case.kind}, {bench.case.mode}"
    title += "" if bench.case.scope == "whole" else f", {bench.case.scope}"
    columns = [Column[tuple[str, str]](title, lambda row: row[0]), Column("", lambda row: row[1], left=True)]
    counted = describe_triage(Triage(bench.case, bench.trace, len(bench.cold.steps)))
    return [Table(rows, columns), plan_table(plan_rows(bench)), *counted]


def _untuned_rows(bench: Bench) -> list[tuple[str, str]]:
    """What autotuning gains; empty for a mode that does not autotune."""
    plain, other = bench.case.untuned, bench.steady.untuned
    if plain is None:
        return []
    if other is None:
        why = "blocks are marked once" if bench.case.scope == "nested" else "a third model does not fit in the memory"
        return [("autotuning", f"not compared with {plain.mode}: {why}")]
    gain = f"a step {numbers.quantity(other.speedup)} as fast as in {other.mode}"
    if difference(other.speedup, bench.steady.control) == "none":
        gain += ", within what eager shows against itself"
    return [(f"step, {other.mode}", numbers.quantity(other.step)), ("autotuning", gain)]


def _step_rows(bench: Bench) -> list[tuple[str, str]]:
    """Memory and the profile of a step."""
    rows = [("covered by compiled regions", _covered(bench))]
    if bench.memory is not None:
        eager, compiled = (numbers.with_unit(peak, "B") for peak in (bench.memory.eager, bench.memory.compiled))
        captured = bench.memory.captured
        kept = f", {numbers.with_unit(captured, 'B')} of it kept by captured graphs" if captured else ""
        rows.append(("peak memory", f"eager {eager}, compiled {compiled}{kept}"))
    before, after = bench.eager_profile, bench.compiled_profile
    if before is not None and after is not None:
        pairs = [("operators called a step", before.operators, after.operators)]
        if before.kernels is not None and after.kernels is not None:
            pairs.append(("GPU kernels a step", before.kernels, after.kernels))
        if before.launches is not None and after.launches is not None:
            pairs.append(("launches a step", before.launches, after.launches))
        if before.fused_attention or after.fused_attention:
            pairs.append(("fused attention a step", before.fused_attention, after.fused_attention))
        rows += [(name, f"eager {numbers.count(one)}, compiled {numbers.count(two)}") for name, one, two in pairs]
        rows.append(("guards, a step", numbers.with_unit(after.guard_seconds, "s")))
    if bench.no_cudagraphs:
        rows.append(("CUDA graphs skipped", "; ".join(bench.no_cudagraphs)))
    return rows


def _covered(bench: Bench) -> str:
    profile = bench.compiled_profile
    return "not known" if profile is None or profile.covered is None else numbers.percent(profile.covered)


def _accuracy(bench: Bench) -> str:
    accuracy = bench.accuracy
    if accuracy.skipped:
        return f"not compared: {accuracy.skipped}"
    if accuracy.wrong:
        return f"WRONG: {accuracy.wrong}"
    assert accuracy.output is not None
    size = numbers.error_size
    within, compared = "within" if accuracy.holds else "OUTSIDE", plural(accuracy.tensors, "tensor")
    outside = (pair for pair in (accuracy.output, accuracy.gradient) if pair is not None and not pair.holds)
    shown = next(outside, accuracy.output)
    text = f"{within} the bound, {compared} against float64"
    return f"{text}; {shown.name} error {size(shown.compiled)}, eager {size(shown.eager)}{accuracy.gap}"

"""Measurements as text for a terminal, for the commands ``run``, ``zoo`` and ``shapes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchkit import numbers
from benchkit.report import markdown_table
from compile_bench.capture.text import plural
from compile_bench.cli.triaging import describe_triage
from compile_bench.measure.measurements import Bench, Compiled, FirstSteps, Triage
from compile_bench.measure.shapes import ShapeStudy, cheapest
from compile_bench.measure.verdict import CACHE_STATES, PLAN_STEPS, difference, judge, plan_rows
from compile_bench.targets.case import Case


def describe_zoo() -> str:
    """The zoo as Markdown."""
    from compile_bench.targets.zoo import ZOO

    return markdown_table(["target", "what it is"], [(name, entry.about) for name, entry in ZOO.items()], left=2)


def zoo_table(benches: Sequence[Bench]) -> str:
    """One line for each measured target."""
    header = ["target", "verdict", "speed-up (95 %)", "compile cost", "breaks", "covered", "accuracy"]
    return markdown_table(header, [_zoo_row(bench) for bench in benches], left=2)


def _zoo_row(bench: Bench) -> tuple[str, ...]:
    verdict = judge(bench)
    return (
        bench.case.target,
        verdict.text,
        numbers.quantity(bench.steady.speedup),
        numbers.with_unit(verdict.cost, "s"),
        numbers.count(len(bench.trace.breaks)),
        _covered(bench),
        _accuracy(bench),
    )


def describe_shapes(study: ShapeStudy, passes: int) -> str:
    """A shape study as Markdown, the cheapest strategy first."""
    ranked = study.ranking(passes)
    lines = [
        f"{study.case.target}, {study.case.kind}: {plural(len(study.schedule), 'call')} a pass, "
        f"{', '.join(study.varying)} changing ({' | '.join(dict.fromkeys(study.schedule))})"
    ]
    if ranked:
        lines.append(f"cheapest for {passes} pass{'' if passes == 1 else 'es'}: {cheapest(study.passes, passes)}")
    rows = []
    for each in [*ranked, *(each for each in study.passes if each.failed)]:
        if each.later is None:
            rows.append((each.strategy, "fails", "", "", "", each.failed))
            continue
        rows.append(
            (
                each.strategy,
                numbers.with_unit(each.total(passes)[0], "s"),
                numbers.with_unit(each.first, "s"),
                numbers.quantity(each.later),
                numbers.count(each.compilations),
                "; ".join(dict.fromkeys(again.what_changed for again in each.recompiles)),
            )
        )
    header = ["strategy", f"{passes} passes", "first pass", "later pass (p20–p80)", "graphs", "recompiled, since"]
    return "\n".join([*lines, "", markdown_table(header, rows)])


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


def describe_interrupted(case: Case, measured: Mapping[str, FirstSteps | Compiled]) -> str:
    """What was measured before an interrupt: figures and breaks, and what is missing."""
    lines = [f"{case.target}, {case.kind}: interrupted; the verdict needs the steps with warm caches"]
    lines += [describe_part(name, part) for name, part in measured.items()]
    compiled = [part for part in measured.values() if isinstance(part, Compiled)]
    if compiled:
        lines += ["", describe_triage(Triage(case, compiled[0].trace, len(compiled[0].first.steps)))]
    return "\n".join(lines)


def describe_bench(bench: Bench) -> str:
    """Everything about a case as Markdown, the verdict first."""
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
    if verdict.mega is not None:
        size = numbers.with_unit(bench.artifact_bytes, "B")
        rows.append(("break-even, cache artifacts", f"{verdict.mega.text}, {size}"))
    rows += [(f"compiling: {name}", numbers.with_unit(seconds, "s")) for name, seconds in bench.trace.phases.items()]
    rows += _step_rows(bench)
    rows.append(("accuracy", _accuracy(bench)))
    title = f"{bench.case.target}, {bench.case.kind}, {bench.case.mode}"
    table = markdown_table([title if bench.case.scope == "whole" else f"{title}, {bench.case.scope}", ""], rows, left=2)
    found = describe_triage(Triage(bench.case, bench.trace, len(bench.cold.steps)))
    return "\n\n".join([table, _plan_table(bench), found])


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


def _plan_table(bench: Bench) -> str:
    """Compile or not, by steps of the run, restarts and state of the caches."""
    rows = [
        (
            plural(restarts, "restart"),
            CACHE_STATES[cache],
            *(each.text for each in plans),
        )
        for restarts, cache, plans in plan_rows(bench)
    ]
    header = ["run", "each process finds", *(f"{numbers.count(steps)} steps" for steps in PLAN_STEPS)]
    return markdown_table(header, rows, left=2)


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
    text = f"{within} the bound, {compared} against float64"
    return f"{text}; output error {size(accuracy.output.compiled)}, eager {size(accuracy.output.eager)}"

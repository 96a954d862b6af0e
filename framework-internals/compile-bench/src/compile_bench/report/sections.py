"""The report: its sections, declared from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchkit import numbers
from benchkit.report import Block, Code, Column, Report, Section, Table, bullets
from benchkit.results import Results
from compile_bench.measure.records import CACHES, Bench, ShapeStudy, Toolchain
from compile_bench.measure.shapes import Passes, cheapest
from compile_bench.measure.verdict import BUSY, CACHE_STATES, PLAN_STEPS, BreakEven, judge, plan_rows
from compile_bench.report.autotuning import autotuned
from compile_bench.report.breaks import counted_breaks, natural_breaks, triage_sections
from compile_bench.report.charts import break_even_chart, shapes_chart
from compile_bench.report.details import detail_sections
from compile_bench.report.finding import avoid, headline, use, worst
from compile_bench.report.modes import Models, answer_blocks, modes_section
from compile_bench.report.queries import case_named, compiled_alone, measured_cases, opening_case, title
from compile_bench.report.regressions import slower_section
from compile_bench.targets.case import FIRST_STEPS


def report(results: Results) -> Report:
    """The report of a run."""
    cases = measured_cases(results)
    models = Models(results, cases)
    return Report(
        title="What torch.compile costs and gives",
        headline=headline(results),
        use=use(results),
        avoid=avoid(results),
        worst=worst(results),
        answer=answer_blocks(models),
        findings=[
            _run_length(cases),
            slower_section(results, cases),
            modes_section(models, autotuned(results, cases)),
            *(_shapes_section(record, first=not index) for index, record in enumerate(ShapeStudy.select(results))),
            Section(
                "Graph breaks and recompilations",
                [*counted_breaks(results), *triage_sections(results), natural_breaks(results, cases)],
            ),
        ],
        details=detail_sections(results, cases),
        asked=_asked(models),
        method=[bullets(_method(models))],
        limits=_limits(models),
    )


def _run_length(cases: Sequence[Bench]) -> Section:
    """How many steps a run needs, by caches and restarts, and whether to compile blocks alone."""
    undisturbed = compiled_alone(cases)
    plans = plan_rows(undisturbed[0]) if undisturbed else []
    shown = title(undisturbed[0]) if undisturbed else ""
    return Section(
        "How long must a run be?",
        [
            break_even_table(undisturbed),
            Section(
                "",
                [
                    f"{shown}, by length of the whole run, number of restarts, and what each process finds in its "
                    "caches. The figure is the time of the run, eager over compiled:",
                    plan_table(plans),
                    break_even_chart(undisturbed),
                ],
            ),
            Section("The whole model, or its repeated blocks?", [scope_table(cases)]),
        ],
    )


def break_even_table(cases: Sequence[Bench]) -> Table[Bench]:
    """Break-even by what a process finds in its caches, of the cases that were measured with more than empty ones."""

    def steps(field: str) -> Callable[[Bench], str | None]:
        def cell(case: Bench) -> str | None:
            even: BreakEven | None = getattr(judge(case), field)
            return None if even is None else even.text

        return cell

    return Table(
        [case for case in cases if judge(case).warm or judge(case).artifact],
        [Column("break-even", title), *(Column(caches, steps(field)) for field, caches in CACHES.items())],
    )


def plan_table(plans: Sequence[tuple[int, Any, Sequence[Any]]]) -> Table[tuple[int, Any, Sequence[Any]]]:
    """Compile or not, by length of the run, restarts and caches, as :func:`plan_rows` has them."""

    def at(index: int) -> Callable[[tuple[int, Any, Sequence[Any]]], str]:
        return lambda row: str(row[2][index].text)

    return Table(
        plans,
        [
            Column("restarts", lambda row: row[0]),
            Column("each process finds", lambda row: CACHE_STATES[row[1]], left=True),
            *(Column(f"{numbers.count(steps)} steps", at(index)) for index, steps in enumerate(PLAN_STEPS)),
        ],
    )


def scope_table(cases: Sequence[Bench]) -> Table[Bench]:
    """Compiled blocks beside the whole model."""
    shown: list[Bench] = []
    for case in cases:
        whole = case_named(cases, case.model, case.mode)
        if case.scope != "whole" and whole is not None:
            shown += [scope for scope in (whole, case) if scope not in shown]
    return Table(
        shown,
        [
            Column("case", lambda case: title(case, mode=False)),
            Column("compiled", lambda case: case.scope, left=True),
            Column("first steps", lambda case: numbers.with_unit(case.cold.total, "s")),
            Column("speed-up (95 %)", lambda case: case.steady.speedup),
            Column("graphs", lambda case: case.compilation.graphs),
            Column("kernels", lambda case: case.compilation.kernels),
            Column("break-even", lambda case: judge(case).cold.text),
        ],
    )


def _shapes_section(record: ShapeStudy, *, first: bool) -> Section:
    """What changes, the cheapest strategy for each number of passes, and a table of the strategies."""
    strategies = list(record.strategies.values())
    calls = " → ".join(f"`{call}`" for call in record.schedule)
    again = [(passes.strategy, entry) for passes in strategies for entry in passes.recompiles]
    return Section(
        f"Shapes that change: {title(record, mode=False)}",
        [
            f"The calls {calls} repeat; {', '.join(f'`{name}`' for name in record.varying)} changes.",
            bullets(
                f"Cheapest for {in_passes(count)}: {text}."
                for count in record.ranked_for
                if (text := cheapest(strategies, count))
            ),
            strategies_table(strategies, record.ranked_for),
            shapes_chart(record) if first else "",
            Table(
                again,
                [
                    Column("strategy", lambda row: row[0]),
                    Column("place", lambda row: Code(row[1].place)),
                    Column("cause", lambda row: row[1].cause),
                    Column("what changed", lambda row: row[1].what_changed, left=True),
                ],
            ),
        ],
    )


def strategies_table(strategies: Sequence[Passes], counts: Sequence[int]) -> Table[Passes]:
    """What each strategy for changing shapes costs, for these numbers of passes through the schedule."""

    def total(count: int) -> Callable[[Passes], str]:
        return lambda passes: "" if passes.later is None else numbers.with_unit(passes.total(count)[0], "s")

    return Table(
        strategies,
        [
            Column("strategy", "strategy"),
            Column(
                "first pass",
                lambda passes: (
                    f"fails: {passes.failed}" if passes.later is None else numbers.with_unit(passes.first, "s")
                ),
            ),
            Column("later pass (p20–p80)", lambda passes: "" if passes.later is None else passes.later),
            Column("graphs", lambda passes: "" if passes.later is None else passes.compilations),
            *(Column(in_passes(count), total(count)) for count in counts),
        ],
    )


def in_passes(count: int) -> str:
    """``1 pass``, ``2 passes``."""
    return f"{numbers.count(count)} pass{'' if count == 1 else 'es'}"


def _asked(models: Models) -> list[Block]:
    names = dict.fromkeys(title(case, mode=False) for case in models.cases if not case.swept)
    targets = {cell.model[0] for cell in models.cells}
    swept = f", and of {len(targets)} models in training and inference, in every mode" if models.calls else ""
    return [
        "What does `torch.compile` cost on this machine, what does it give, what does it break, and when is it worth "
        f"it? Asked of {'; '.join(names) or 'no case'}{swept}. `gpt` is this repository's own honest loop: *training* "
        "is its whole step, optimizer included.",
    ]


def _method(models: Models) -> list[str]:
    on_gpu = models.on_gpu
    inside = "share of the kernels' time that was launched from there" if on_gpu else "share of the step's time"
    return [
        "Every measurement runs in a fresh process with its own cache folders. *Empty caches* is the first process, "
        "*warm caches* the second with the same folder, *cache artifacts* one with empty folders that loads what "
        f"`torch.compiler.save_cache_artifacts` wrote. {FIRST_STEPS} first steps are measured, from an imported torch "
        f"on: with CUDA graphs the second warms up and the third captures.{_forked(models)}",
        *(
            "Inductor examines the compiler and the machine once per cache folder. This took "
            f'{numbers.with_unit(toolchain.seconds, "s")} here and does not depend on the model, so "empty" caches '
            "contain its result already. The check that remains in every process is the *toolchain check*."
            for toolchain in Toolchain.select(models.results)[:1]
        ),
        "Phases come from PyTorch's structured trace; each instant is counted once, for the innermost span."
        f"{_recorder_share(models.cases)}",
        "Steady steps: eager, compiled and eager once more alternate in one process "
        f"({', '.join(sorted({case.steady.method for case in models.cases}))}); the speed-up is the median of the "
        "ratios within a round, with a bootstrap interval. Each variant has its own weights and optimizer."
        f"{_controls(models.cases)}",
        _side_by_side(models),
        "Verdict: a case is worth compiling, for runs over its break-even, if the whole interval of the speed-up is "
        "above 1, and above what eager shows against itself in the same rounds; *don't* if it is below, or if results "
        "are outside their bound; else *inconclusive*. It is also *inconclusive* with fewer than six rounds, and on a "
        "CPU on which some task waited "
        f"for a core in more than {BUSY:.0f} % of the time.{_pressures(models)}",
        "Break-even: the run length at which both ways take the same time, at the median speed-up and at both ends of "
        "its interval; the first steps count.",
        "Changing shapes: strategies are *tied* if p20–p80 of their total times overlap.",
        f"Inside compiled regions: {inside}, by PyTorch's profiler.",
        "Accuracy: ‖x − x₆₄‖₂ / ‖x₆₄‖₂ of the same forward and backward pass. The bound is three times the eager "
        "error, plus one rounding, plus what a sum over the batch loses when it is added in order (Higham and Mary, "
        "2019). "
        "The table shows the gradient closest to its bound. Where gradients are outside and outputs within, all "
        "weights are moved by about a percent and everything is computed again: the gradient of ReLU, max pooling or a "
        "top-k choice jumps, and two right computations may fall on different sides of one jump.",
    ]


def _forked(models: Models) -> str:
    """How processes begin, where they are forked."""
    if not any(toolchain.forked for toolchain in Toolchain.select(models.results)):
        return ""
    triage = "too" if models.on_gpu else "which times no import, from one that has imported the compiler as well"
    return (
        " A process is forked from an interpreter that has imported torch and done nothing else; for triage"
        f"{' ' if models.on_gpu else ', '}{triage}."
    )


def _recorder_share(cases: Sequence[Bench]) -> str:
    if not cases:
        return ""
    case = opening_case(cases)
    seconds, total = case.compilation.recorder_seconds, case.cold.total
    return (
        f" Recording the trace took {numbers.with_unit(seconds, 's')} of {numbers.with_unit(total, 's')} "
        f"({numbers.percent(seconds / total, 2)}) of the first case's first process."
    )


def _controls(cases: Sequence[Bench]) -> str:
    """How many comparisons of eager with itself have an interval around 1."""
    controls = [case.steady.control for case in cases if case.steady.control is not None]
    within = sum(control.low is not None and control.low <= 1 <= (control.high or 0) for control in controls)
    return (
        f" In {within} of {len(controls)} samplings the interval of eager against itself contained 1."
        if controls
        else ""
    )


def _side_by_side(models: Models) -> str:
    if not models.calls or models.processes == 1:
        return ""
    finished = ", and the GPU finishes their work first" if models.on_gpu else ""
    return (
        "Models and modes: while a process measures and profiles its steps, all others are stopped "
        f"(`SIGSTOP`){finished}; the first steps do not contain the time for which their process was stopped. "
        "Everything else overlaps: compiling, autotuning and first steps. Every cell begins with empty caches, except "
        "for max-autotune measured right after max-autotune-no-cudagraphs: it finds the choices of that mode "
        "(marked ᵃ)."
    )


def _pressures(models: Models) -> str:
    pressures = [case.steady.pressure for case in models.cases if case.steady.pressure is not None]
    if models.on_gpu or not pressures:
        return ""
    return f" At the end of the samplings the share was {', '.join(f'{share:.0f} %' for share in pressures)}."


def _limits(models: Models) -> list[str]:
    cut = "in depth" if models.on_gpu else "in depth and in width"
    timed = ", though none timed on the GPU at the same time" if models.calls else ""
    return [
        "Each figure comes from one process: the interval is that of its rounds, not of processes or machines.",
        f"Compile times are wall-clock seconds on {models.results.environment.cores} cores; Inductor compiles kernels "
        "in parallel, so more cores shorten them.",
        f"The models of the zoo are cut {cut}, with random weights: their compile costs are lower than a full model's.",
        f"Under *The modes*, max-autotune timed its candidates while other processes compiled{timed}: it may have "
        "chosen differently on a quiet machine."
        if models.processes > 1
        else "",
    ]

"""The report's folded sections: first steps, steady steps, what was compiled, and errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchkit import numbers
from benchkit.report import Column, Section, Share, Table, bullets
from benchkit.results import Results
from compile_bench.capture.text import plural
from compile_bench.measure.records import WRITTEN, Bench, ErrorPair
from compile_bench.report.charts import first_steps_chart, models_chart
from compile_bench.report.queries import NamedStart, compiled_alone, named_starts, start_parts, title

CASE: Column[Bench] = Column("case", title)


def detail_sections(results: Results, cases: Sequence[Bench]) -> list[Section]:
    """The folded sections."""
    on_gpu = results.environment.gpu is not None
    main_job, undisturbed = [case for case in cases if not case.swept], compiled_alone(cases)
    return [
        Section(
            "",
            [first_steps_table(undisturbed), first_steps_chart(undisturbed), models_chart(results, cases)],
            fold="Where the first steps go",
        ),
        _steady_section(cases, on_gpu=on_gpu),
        Section(
            "",
            [
                compilation_table(main_job),
                "Generated kernels are all that Inductor wrote, including candidates that it did not choose and the "
                f"loops of one kernel{'; the kernels that a step runs are counted above' if on_gpu else ''}. A guard "
                "check is Dynamo's own measurement, once, right after compiling.",
            ],
            fold="What was compiled: graphs, guards, kernels",
        ),
        Section("", [accuracy_table(main_job)], fold="Are the numbers right? Errors against float64"),
    ]


def first_steps_table(cases: Sequence[Bench]) -> Table[NamedStart]:
    """Where the first steps of each process go."""
    starts = named_starts(cases)

    def seconds_of(part: str) -> Callable[[NamedStart], float | None]:
        return lambda start: start_parts(start.start)[part] or None

    parts = start_parts(starts[0].start) if starts else ()
    return Table(
        starts,
        [
            Column("process", lambda start: f"{start.title}, {start.caches}"),
            Column("total", lambda start: numbers.with_unit(start.start.total, "s")),
            *(Column(f"{part}, s", seconds_of(part), optional=True) for part in parts),
        ],
    )


def _steady_section(cases: Sequence[Bench], *, on_gpu: bool) -> Section:
    what_counts = (
        "what the allocator had given out, weights included, plus what captured graphs keep for their replays"
        if on_gpu
        else "the rise within the step, without the weights"
    )
    reasons = bullets(f"{titles}: {why}" for titles, why in cudagraph_reasons(cases))
    return Section(
        "",
        [
            steady_table(compiled_alone(cases)),
            Section(
                "",
                [
                    "What a step does, eager → compiled. Operators are those called from Python and autograd, outside "
                    f"of compiled regions; peak memory is {what_counts}. *Looking up compiled code* is the time of "
                    "guard checks that the profiler saw in a step.",
                    profile_table([case for case in cases if not case.swept], on_gpu=on_gpu),
                ],
            ),
            "Modes that ask for CUDA graphs, and why PyTorch left them out for a whole graph or a part of it, in its "
            "words:"
            if reasons
            else "",
            reasons,
        ],
        fold="The steady state: step times, memory, operators and kernels",
    )


def steady_table(cases: Sequence[Bench]) -> Table[Bench]:
    """Steps after all compiling."""
    return Table(
        cases,
        [
            CASE,
            Column("eager (p20–p80)", lambda case: case.steady.eager),
            Column("compiled (p20–p80)", lambda case: case.steady.compiled),
            Column("speed-up (95 %)", lambda case: case.steady.speedup),
            Column("eager against itself", lambda case: case.steady.control),
            Column("rounds", lambda case: case.steady.speedup.samples),
        ],
    )


def profile_table(cases: Sequence[Bench], *, on_gpu: bool) -> Table[Bench]:
    """What a step does, eager → compiled: operators, kernels, launches, memory, and how much of it is compiled."""
    return Table(
        [case for case in cases if case.compiled_profile is not None],
        [
            CASE,
            Column("inside compiled regions", _covered),
            Column("operators called", lambda case: profile_counts(case, "operators")),
            *(count_columns() if on_gpu else ()),
            Column("looking up compiled code", _guard_seconds),
            Column("peak memory", peak_memory),
        ],
    )


def count_columns() -> list[Column[Bench]]:
    """Columns of what a GPU's profiler counts in a step, eager → compiled."""
    return [
        Column("GPU kernels", lambda case: profile_counts(case, "kernels")),
        Column("launches", lambda case: profile_counts(case, "launches")),
    ]


def _covered(case: Bench) -> Share | None:
    profile = case.compiled_profile
    return None if profile is None or profile.covered is None else Share(profile.covered)


def _guard_seconds(case: Bench) -> str | None:
    profile = case.compiled_profile
    return None if profile is None else numbers.with_unit(profile.guard_seconds, "s")


def profile_counts(case: Bench, name: str) -> str | None:
    """A count of the profiles, eager → compiled; None where the profiler has none."""
    counts = [getattr(profile, name, None) for profile in (case.eager_profile, case.compiled_profile)]
    return None if None in counts else " → ".join(numbers.count(count) for count in counts if count is not None)


def peak_memory(case: Bench) -> str | None:
    """Peak memory of a step, eager → compiled."""
    memory = case.memory
    return None if memory is None else eager_to_compiled(memory.eager, memory.compiled, "B")


def eager_to_compiled(eager: float, compiled: float, unit: str) -> str:
    """A figure of eager and of compiled, eager → compiled."""
    return f"{numbers.with_unit(eager, unit)} → {numbers.with_unit(compiled, unit)}"


def cudagraph_reasons(cases: Sequence[Bench]) -> list[tuple[str, str]]:
    """Cases that asked for CUDA graphs and did not get them, grouped by reason."""
    titles: dict[str, list[str]] = {}
    for case in cases:
        if case.no_cudagraphs:
            titles.setdefault("; ".join(case.no_cudagraphs), []).append(title(case))
    return [("; ".join(names), reasons) for reasons, names in titles.items()]


def compilation_table(cases: Sequence[Bench]) -> Table[Bench]:
    """Counts of each compilation."""
    return Table(
        cases,
        [
            CASE,
            Column("graphs", lambda case: case.compilation.graphs),
            Column("operations", lambda case: case.compilation.operations),
            Column("breaks", lambda case: len(case.compilation.breaks)),
            Column("recompiles", lambda case: len(case.compilation.recompiles)),
            Column("guards", lambda case: case.compilation.guards),
            Column("generated kernels", lambda case: case.compilation.kernels),
            Column("one guard check", lambda case: seconds_cell(case.compilation.guard_check_seconds)),
        ],
    )


def seconds_cell(seconds: float | None) -> str | None:
    """Seconds with their unit; None where they are not known."""
    return None if seconds is None else numbers.with_unit(seconds, "s")


def accuracy_table(cases: Sequence[Bench]) -> Table[tuple[Bench, ErrorPair | None]]:
    """Errors against float64 and their bounds; one line without errors for a case that could not be compared."""
    rows: list[tuple[Bench, ErrorPair | None]] = []
    for case in cases:
        accuracy = case.accuracy
        uncompared = accuracy.skipped or accuracy.wrong
        pairs = [None] if uncompared else [accuracy.output, accuracy.gradient]
        rows += [(case, pair) for pair in pairs if uncompared or pair is not None]

    def error(name: str) -> Callable[[tuple[Bench, ErrorPair | None]], str]:
        return lambda row: "" if row[1] is None else numbers.error_size(getattr(row[1], name))

    return Table(
        rows,
        [
            Column("case", lambda row: title(row[0])),
            Column("tensor", _tensor, left=True),
            Column("eager error", error("eager")),
            Column("compiled error", error("compiled")),
            Column("bound", error("bound")),
            Column("within", _within),
        ],
    )


def _tensor(row: tuple[Bench, ErrorPair | None]) -> str:
    case, pair = row
    if pair is None:
        return case.accuracy.skipped or case.accuracy.wrong
    kind, _, name = pair.name.partition(" ")
    if kind == WRITTEN:
        return f"`{name}` as the step leaves it"
    return pair.name if kind == "output" else f"gradient of `{pair.name}`"


def _within(row: tuple[Bench, ErrorPair | None]) -> str:
    case, pair = row
    if pair is None:
        return "" if case.accuracy.skipped else "**no**"
    moved = case.accuracy.attempts - 1
    note = f", with the weights moved {plural(moved, 'time')}" if moved else ""
    gap = case.accuracy.gap if pair is case.accuracy.output else ""  # once a case, not beside its gradient again
    return f"{'yes' if pair.holds else '**no**'}{note}{gap}"

"""The report sections on the compiled program: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from benchkit import Quantity, Results, numbers
from benchkit.report import Axis, Cell, Chart, Column, Panel, Point, Section, Series, Table, bullets
from jax_baseline.diff.records import (
    CompiledModel,
    DiffRecord,
    LongKernel,
    StepFigures,
    StepRecord,
    TargetRecord,
)
from jax_baseline.diff.region_diff import Diff, Region
from jax_baseline.hlo import RegionCount
from jax_baseline.hlo.kernels import join_ops
from jax_baseline.hlo.summary import Summary
from jax_baseline.report.explanation import explain, summary

_COMPILERS = ("XLA", "Inductor")
_PHASES = {"forward": "forward", "backward": "backward", "other": "update"}
_NO_REGION = "(no scope)"


def slowest_part(record: DiffRecord) -> str:
    """Name the part of the model in which XLA's kernels take longest beside Inductor's; empty without times."""
    times: dict[str, list[float]] = {}
    for region in record.regions:
        seconds = (region.compiled[name].seconds or 0.0 for name in _COMPILERS)
        times[region.name] = [sum(pair) for pair in zip(times.get(region.name, (0.0, 0.0)), seconds, strict=True)]
    name = max(times, key=lambda name: times[name][0] - times[name][1], default="")
    if not name or times[name][0] <= times[name][1]:
        return ""
    xla, inductor = (numbers.with_unit(seconds, "s") for seconds in times[name])
    regions = [region for region in record.regions if region.name == name]
    text = f"`{name}` differs most in time: its kernels take {xla} in XLA and {inductor} in Inductor"
    calls = [
        call for region in regions for call in region.compiled["Inductor"].libraries if call.startswith("torch.ops")
    ]
    if calls:
        text += f", which calls `{calls[0].removeprefix('torch.ops.').removesuffix('.default')}`"
    tensors = (tensors for region in regions for tensors in region.only["XLA"])
    written = max(tensors, key=lambda tensors: tensors.bytes, default=None)
    if written:
        text += f". Only XLA writes {written.count} × `{written.tensor}` to memory there"
    return f"{text}."


def sections(results: Results) -> list[Section]:
    """XLA beside Inductor for each attention, the step, and the program of a GPU."""
    diffs = DiffRecord.select(results)
    return [
        *(_beside_inductor(record, several=len(diffs) > 1) for record in diffs),
        *(_step(record, on_gpu=results.environment.gpu is not None) for record in StepRecord.select(results)[:1]),
        _gpu_program(TargetRecord.select(results)),
    ]


def scope(record: CompiledModel) -> str:
    """Say what was compiled."""
    blocks = f"{record.layers} block{'s' if record.layers > 1 else ''}"
    sequences = f"{record.batch_size} sequence{'s' if record.batch_size > 1 else ''}"
    length = f" of {record.block_size} tokens" if record.block_size else ""
    return f"`{record.preset}`, {blocks}, {sequences}{length}, {record.dtype}"


def _step(record: StepRecord, *, on_gpu: bool) -> Section:
    launches = " Every kernel is launched by itself, which the profiler needs and training does not." if on_gpu else ""
    return Section(
        "What XLA made of the step",
        [
            f"One training step of {scope(record)}, {record.attention} attention.{launches}",
            step_table(record),
            _step_times(record),
            Section(
                "",
                [
                    kind_table(record.summary),
                    "By part of the model, with the blocks merged. A fusion belongs to the part with most of its work:",
                    part_table(record.summary),
                    "The kernels that take longest:",
                    kernel_table(record.longest),
                ],
                fold="XLA's kernels by kind and by part of the model, and the longest",
            ),
        ],
    )


def step_table(figures: StepFigures) -> Table[tuple[str, Cell]]:
    """A compiled step in numbers; what is not known has no line."""
    program = figures.summary
    whole = program.whole_bytes - program.library_bytes
    sizes = (numbers.with_unit(size, "B") for size in (program.donated_bytes, program.argument_bytes))
    lines: dict[str, Cell] = {
        "operations of StableHLO, which XLA is given": figures.stablehlo_operations,
        "kernels": program.kernels,
        "matrix products outside libraries": program.dots,
        "compilation": figures.compile_time,
        "arguments donated: results reuse their memory": "{} of {} ({} of {})".format(
            program.donated, program.arguments, *sizes
        ),
        "scratch memory": figures.temporaries,
        "a step": figures.step_time,
        "times of its kernels, which may run at the same time, together": figures.kernel_time,
        "kernels that the profiler saw": figures.kernels_timed,
        "floating-point operations": _unit("FLOP", program.flops),
        "of them outside libraries": _unit("FLOP", program.flops - program.library_flops),
        "the same, counted by XLA": figures.xla_flops,
        "bytes read and written; of a slice or an update in place, the touched part": _unit("B", program.bytes),
        "bytes of whole operands and results outside libraries": _unit("B", whole),
        "the same bytes, counted by XLA": figures.xla_bytes,
    }
    known = [(what, cell) for what, cell in lines.items() if cell is not None]
    return Table(known, [Column("of the program", lambda line: line[0]), Column("number", lambda line: line[1])])


def kind_table(summary: Summary) -> Table[tuple[str, int]]:
    """The number of kernels of each kind."""
    return Table(
        list(summary.kinds.items()),
        [Column("kind of kernel", lambda kind: kind[0]), Column("number", lambda kind: kind[1])],
    )


def part_table(summary: Summary) -> Table[RegionCount]:
    """The kernels by part of the model and phase."""
    return Table(
        summary.regions,
        [
            Column("part", lambda group: group.region or _NO_REGION),
            Column("phase", lambda group: _PHASES[group.phase], left=True),
            Column("kernels", "kernels"),
            Column("matmuls", "dots"),
            Column("FLOPs", lambda group: _unit("FLOP", group.flops)),
            Column("bytes", lambda group: _unit("B", group.bytes)),
            Column("time", lambda group: _unit("s", group.seconds), optional=True),
            Column("bytes per second", lambda group: _rate(group.bytes, "B", group.seconds), optional=True),
        ],
    )


def kernel_table(kernels: Sequence[LongKernel]) -> Table[LongKernel]:
    """Single kernels."""
    return Table(
        kernels,
        [
            Column("kernel", lambda kernel: f"`{kernel.name}`{_times(kernel.calls)}"),
            Column("kind and operations", _what_it_does),
            Column("part", lambda kernel: f"{kernel.region or _NO_REGION}, {_PHASES[kernel.phase]}"),
            Column("source", lambda kernel: f"`{kernel.location}`" if kernel.location else None, left=True),
            Column("FLOPs", lambda kernel: _unit("FLOP", kernel.flops)),
            Column("bytes", lambda kernel: _unit("B", kernel.bytes)),
            Column("time", lambda kernel: _unit("s", kernel.seconds), optional=True),
            Column("FLOPs per second", lambda kernel: _rate(kernel.flops, "FLOP", kernel.seconds), optional=True),
            Column("bytes per second", lambda kernel: _rate(kernel.bytes, "B", kernel.seconds), optional=True),
        ],
    )


def _times(runs: int | None) -> str:
    return f" {runs} ×" if runs and runs > 1 else ""


def _unit(unit: str, value: float | None) -> str | None:
    return None if value is None else numbers.with_unit(value, unit)


def _rate(amount: float, unit: str, seconds: float | None) -> str | None:
    return numbers.with_unit(amount / seconds, f"{unit}/s") if seconds else None


def _what_it_does(kernel: LongKernel) -> str:
    ops = join_ops(kernel.ops)
    return f"{kernel.kind}: {ops}" if ops not in kernel.kind else kernel.kind


def _beside_inductor(record: DiffRecord, *, several: bool) -> Section:
    which = f", {record.attention} attention" if several else ""
    regions = {(region.name, region.phase): region for region in record.regions}
    explained = [regions[key] for key in record.explained]
    difference = record.largest_difference
    results = "" if difference is None else f"; their results differ by at most {numbers.error_size(difference.value)}"
    return Section(
        f"XLA beside Inductor{which}",
        [
            f"The loss and gradients of {scope(record)}, compiled by both with the same weights and tokens{results}. "
            f"{slowest_part(record)}",
            compilers_table(record),
            _regions_chart(record),
            "The parts with the largest differences in bytes, each part of the model once:",
            bullets(summary(region) for region in explained),
            Section(
                "",
                [_ASSIGNMENT, notes_of(record), region_table(record.regions), *map(explain, explained)],
                fold=f"Every part{which}; how kernels are assigned; what each compiler writes, copies and fuses, with "
                "its sources",
            ),
        ],
    )


_ASSIGNMENT = (
    "Labels assign a kernel to a part of the model: `jax.named_scope` in JAX, `torch.fx.traceback.annotate` in torch. "
    "A kernel without a label is assigned to the part in which the other compiler writes the same values to memory."
)


def notes_of(diff: Diff) -> str:
    """What could not be read or interpreted of a program, as a list."""
    return bullets(f"{compiler}: {note}" for compiler, notes in diff.notes.items() for note in notes)


def compilers_table(diff: Diff) -> Table[tuple[Cell, ...]]:
    """Both programs in numbers; without the values of both, what only one of them writes is not known."""
    programs = diff.compilers.values()
    lines: dict[str, list[Quantity | None]] = {
        "a run": [program.time for program in programs],
        "compilation": [program.compile_time for program in programs],
        "kernels": [program.kernels for program in programs],
        "assigned to a part by their label": [program.assigned.label for program in programs],
        "assigned by a value in memory": [program.assigned.value for program in programs],
        "not assigned": [program.assigned.nothing for program in programs],
        "bytes read and written": [program.bytes for program in programs],
    }
    if diff.common.value or any(program.only.value for program in programs):
        lines |= {
            "tensors that both write": [diff.common for _ in programs],
            "tensors that it alone writes": [program.only for program in programs],
            "written a second time, in another order or shape": [program.copies for program in programs],
        }
    rows: list[tuple[Cell, ...]] = [(what, *cells) for what, cells in lines.items() if any(cells)]
    titles = ("of the program", *diff.compilers)
    return Table(rows, [Column(title, itemgetter(index), keep=True) for index, title in enumerate(titles)])


def region_table(regions: Sequence[Region]) -> Table[Region]:
    """What each compiler made of each part of the model."""
    return Table(
        regions,
        [
            Column[Region]("part", lambda region: region.name or "(not assigned)"),
            Column[Region]("phase", lambda region: _PHASES[region.phase], left=True),
            *(column for compiler in _COMPILERS for column in _compiler_columns(compiler)),
        ],
    )


def _compiler_columns(compiler: str) -> list[Column[Region]]:
    return [
        Column(f"{compiler} kernels", lambda region: region.compiled[compiler].kernels),
        Column(f"{compiler} bytes", lambda region: _unit("B", region.compiled[compiler].bytes)),
        Column(f"{compiler} time", lambda region: _unit("s", region.compiled[compiler].seconds)),
    ]


def _gpu_program(records: Sequence[TargetRecord]) -> Section:
    if not records:
        return Section("")
    first = records[0]
    return Section(
        "The same step on an H200, compiled without one",
        [
            f"One step of `{first.preset}` with {first.layers} blocks, {first.batch_size} sequences in {first.dtype}, "
            "compiled by XLA for GPUs from a description of the H200. Fusions, memory and collectives are the same as "
            "on a GPU machine. What XLA autotunes (tile sizes, cuBLAS or Triton for a matmul) is a default here. "
            "Nothing was run or timed.",
            Table(
                records,
                [
                    Column("layout", "layout"),
                    Column("GPUs", "devices"),
                    Column("kernels", lambda record: record.summary.kernels),
                    Column("collectives", _target_collectives, left=True),
                    Column("weights, state and batch on each", "arguments"),
                    Column("temporaries on each", "temporaries"),
                    Column("compile time", "compile_time"),
                ],
            ),
            Section(
                "",
                [kind_table(first.summary), part_table(first.summary)],
                fold="On one device, by kind of kernel and by part of the model",
            ),
        ],
    )


def _target_collectives(record: TargetRecord) -> str:
    counts = record.summary.collectives.items()
    return ", ".join(f"{name.removesuffix('-start')} {count} ×" for name, count in counts) or "none"


def _step_times(record: StepRecord) -> Chart:
    """The profiler's times; empty if the profiler has no access to the GPU's activity."""
    groups = [group for group in record.summary.regions if group.seconds]
    totals: dict[str, float] = {}
    for group in groups:
        name = group.region or _NO_REGION
        totals[name] = totals.get(name, 0.0) + (group.seconds or 0.0)
    whole = sum(totals.values())
    series = [
        Series(label, [Point(g.region or _NO_REGION, g.seconds or 0.0) for g in groups if g.phase == phase])
        for phase, label in _PHASES.items()
    ]
    notes = {
        name: f"{numbers.with_unit(seconds, 's')}, {numbers.percent(seconds / whole, 0)}"
        for name, seconds in totals.items()
    }
    return Chart(
        "step_parts",
        "stacked",
        [Panel(series, notes=notes)],
        Axis("time of the kernels in one step (ms), lower is better", unit="s", scale=1e3),
        "The profiler's times of XLA's kernels in one training step, with the blocks merged.",
        "Time of one training step by part of the model",
    )


def _regions_chart(record: DiffRecord) -> Chart:
    """A panel for time and one for bytes, with a bar for each region and compiler. Times may not be measured."""
    panels = [
        ("seconds", Axis("time of the kernels (ms), lower is better", unit="s", scale=1e3)),
        ("bytes", Axis("bytes that they read and write (MiB),\nlower is better", unit="B", scale=2**-20)),
    ]
    regions = [region for region in record.regions if any(compiled.bytes for compiled in region.compiled.values())]

    def panel(attribute: str, axis: Axis) -> Panel:
        bars = {compiler: [_bar(region, compiler, attribute) for region in regions] for compiler in _COMPILERS}
        return Panel([Series(compiler, list(filter(None, points))) for compiler, points in bars.items()], values=axis)

    drawn = [panel(attribute, axis) for attribute, axis in panels]
    return Chart(
        f"regions_{record.attention}",
        "bars",
        [panel for panel in drawn if any(series.points for series in panel.series)],
        Axis(),
        f"The same loss and gradients in both compilers ({scope(record)}; JAX: `{record.attention}` attention). "
        "A part without a bar is inside another part's kernel, or was not timed.",
        f"Time and bytes of both compilers by part of the model, JAX with {record.attention} attention",
        share="none",
    )


def _bar(region: Region, compiler: str, attribute: str) -> Point | None:
    value: float | None = getattr(region.compiled[compiler], attribute)
    unit = 1e-3 if attribute == "seconds" else 2**20
    place = f"{region.name or '(not assigned)'}, {_PHASES[region.phase]}"
    return Point(place, value, numbers.significant(value / unit)) if value else None

"""The report sections on the compiled program: sentences, tables and figures, computed from the records."""

from __future__ import annotations

from collections.abc import Sequence

from benchkit import Results, numbers
from benchkit.report import Axis, Chart, Column, Panel, Point, Section, Series, Table, bullets
from jax_baseline.diff.records import DiffRecord, LongKernel, StepRecord, TargetRecord
from jax_baseline.diff.region_diff import Region
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
    step = next(iter(StepRecord.select(results)), None)
    diffs = DiffRecord.select(results)
    return [
        *(_beside_inductor(record, step, several=len(diffs) > 1) for record in diffs),
        *([_step(step, on_gpu=results.environment.gpu is not None)] if step else []),
        _gpu_program(TargetRecord.select(results)),
    ]


def scope(record: DiffRecord) -> str:
    """Say what both compilers compiled."""
    blocks = f"{record.layers} block{'s' if record.layers > 1 else ''}"
    return f"`{record.preset}`, {blocks}, {record.batch_size} sequences, {record.dtype}"


def _step(record: StepRecord, *, on_gpu: bool) -> Section:
    return Section(
        "What XLA made of the step",
        [
            _about_step(record, on_gpu=on_gpu),
            _step_times(record),
            Section(
                "",
                [
                    _counts(record),
                    kind_table(record.summary),
                    "By part of the model, with the blocks merged. A fusion belongs to the part with most of its work:",
                    part_table(record.summary, timed=True),
                    "The kernels that take longest:",
                    Table(record.longest, _LONGEST),
                ],
                fold="XLA's kernels by kind and by part of the model, and the longest",
            ),
        ],
    )


def _about_step(record: StepRecord, *, on_gpu: bool) -> str:
    summary, show = record.summary, numbers.quantity
    donated, arguments = (numbers.with_unit(size, "B") for size in (summary.donated_bytes, summary.argument_bytes))
    text = (
        f"One training step of `{record.preset}` ({record.layers} blocks, {record.batch_size} sequences, "
        f"{record.dtype}, {record.attention} attention): JAX passes {show(record.stablehlo_operations)} StableHLO "
        f"operations to XLA, and XLA makes {numbers.count(summary.kernels)} kernels of them, compiled in "
        f"{show(record.compile_time)}. {summary.donated} of its {summary.arguments} arguments ({donated} of "
        f"{arguments}) are donated: the new weights and moments reuse their memory. Scratch memory: "
        f"{show(record.temporaries)}."
    )
    if record.step_time is None:
        return text
    launches = " with one launch for every kernel, which the profiler needs and training does not" if on_gpu else ""
    return (
        f"{text} A step takes {show(record.step_time)}{launches}. The profiler saw {show(record.kernels_timed)} of the "
        f"kernels; their times add up to {show(record.kernel_time)} (kernels may run at the same time)."
    )


def _counts(record: StepRecord) -> str:
    """Compare this package's counts with XLA's own."""
    if record.xla_flops is None or record.xla_bytes is None:
        return ""
    summary, show = record.summary, numbers.with_unit
    flops = _relative_difference(summary.flops - summary.library_flops, record.xla_flops.value)
    bytes_ = _relative_difference(summary.whole_bytes - summary.library_bytes, record.xla_bytes.value)
    libraries = (
        f"; it omits library calls ({show(summary.library_flops, 'FLOP')} and {show(summary.library_bytes, 'B')} of "
        "the sums, left out of this comparison)"
        if summary.library_flops
        else ""
    )
    return (
        f"The kernels of the optimised text add up to {show(summary.flops, 'FLOP')} and, with whole operands and "
        f"results, to {show(summary.whole_bytes, 'B')}. XLA's own count is {numbers.quantity(record.xla_flops)} "
        f"({flops}) and {numbers.quantity(record.xla_bytes)} ({bytes_}){libraries}. The tables below count "
        f"{show(summary.bytes, 'B')}: of an array that is sliced, gathered from or updated in place, only the touched "
        "part."
    )


def kind_table(summary: Summary) -> Table[tuple[str, int]]:
    """The number of kernels of each kind."""
    return Table(
        list(summary.kinds.items()),
        [Column("kind of kernel", lambda kind: kind[0]), Column("number", lambda kind: kind[1])],
    )


def part_table(summary: Summary, *, timed: bool) -> Table[RegionCount]:
    """The kernels by part of the model and phase."""
    return Table(summary.regions, [*_PART, *(_PART_TIMES if timed else ())])


def _relative_difference(ours: float, xlas: float) -> str:
    difference = ours / xlas - 1
    sign = "−" if difference < 0 else "+"
    return "equal" if difference == 0 else f"relative difference {sign}{numbers.error_size(abs(difference))}"


def _unit(unit: str, value: float | None) -> str | None:
    return None if value is None else numbers.with_unit(value, unit)


def _rate(amount: float, unit: str, seconds: float | None) -> str | None:
    return numbers.with_unit(amount / seconds, f"{unit}/s") if seconds else None


def _what_it_does(kernel: LongKernel) -> str:
    ops = join_ops(kernel.ops)
    return f"{kernel.kind}: {ops}" if ops not in kernel.kind else kernel.kind


_PART: list[Column[RegionCount]] = [
    Column("part", lambda group: group.region or _NO_REGION),
    Column("phase", lambda group: _PHASES[group.phase], left=True),
    Column("kernels", "kernels"),
    Column("matmuls", "dots"),
    Column("FLOPs", lambda group: _unit("FLOP", group.flops)),
    Column("bytes", lambda group: _unit("B", group.bytes)),
]
_PART_TIMES: list[Column[RegionCount]] = [
    Column("time", lambda group: _unit("s", group.seconds)),
    Column("bytes per second", lambda group: _rate(group.bytes, "B", group.seconds)),
]
_LONGEST: list[Column[LongKernel]] = [
    Column("kernel", lambda kernel: f"`{kernel.name}`"),
    Column("kind and operations", _what_it_does),
    Column("part", lambda kernel: f"{kernel.region or _NO_REGION}, {_PHASES[kernel.phase]}"),
    Column("source", lambda kernel: f"`{kernel.location}`" if kernel.location else None, left=True),
    Column("time", lambda kernel: _unit("s", kernel.seconds)),
    Column("FLOPs per second", lambda kernel: _rate(kernel.flops, "FLOP", kernel.seconds)),
    Column("bytes per second", lambda kernel: _rate(kernel.bytes, "B", kernel.seconds)),
]


def _longer_than_step(record: DiffRecord, step: StepRecord | None) -> str:
    """Say so if XLA took longer for the loss and gradients alone than for the whole step."""
    time = record.compilers["XLA"].time
    if step is None or time is None or step.step_time is None:
        return ""
    shape = ("preset", "layers", "batch_size", "dtype", "attention")
    same = all(getattr(step, name) == getattr(record, name) for name in shape)
    if not same or time.value <= step.step_time.value:
        return ""
    return (
        f"With XLA this part of the step takes longer than the whole step below ({numbers.quantity(step.step_time)}): "
        "the two were timed in different processes at different times and are not comparable."
    )


def _beside_inductor(record: DiffRecord, step: StepRecord | None, *, several: bool) -> Section:
    which = f", {record.attention} attention" if several else ""
    regions = {(region.name, region.phase): region for region in record.regions}
    explained = [regions[key] for key in record.explained]
    notes = bullets(f"{compiler}: {note}" for compiler, notes in record.notes.items() for note in notes)
    details = [explain(region, with_summary=False) for region in explained]
    return Section(
        f"XLA beside Inductor{which}",
        [
            _about_diff(record, step),
            _regions_chart(record),
            "The parts with the largest differences in bytes, each part of the model once:",
            bullets(summary(region) for region in explained),
            Section(
                "",
                [_assigned(record), _values_written(record), notes, region_table(record.regions), *details],
                fold=f"Every part{which}; how kernels are assigned; what each compiler writes, copies and fuses, with "
                "its "
                "sources",
            ),
        ],
    )


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


def _about_diff(record: DiffRecord, step: StepRecord | None) -> str:
    xla, inductor = (record.compilers[name] for name in _COMPILERS)
    show, difference = numbers.quantity, record.largest_difference
    text = f"The loss and gradients of {scope(record)}, compiled by both compilers with the same weights and tokens"
    if difference is not None:
        text += f" (relative difference of the sums over their results: at most {numbers.error_size(difference.value)})"
    sentences = [f"{text}."]
    if xla.time and inductor.time:
        sentences += [
            f"**A run takes {show(xla.time)} with XLA and {show(inductor.time)} with Inductor**; compilation takes "
            f"{show(xla.compile_time)} and {show(inductor.compile_time)}.",
            _longer_than_step(record, step),
        ]
    sentences += [
        f"XLA runs {show(xla.kernels)} kernels that move {show(xla.bytes)}, Inductor {show(inductor.kernels)} that "
        f"move {show(inductor.bytes)}.",
        slowest_part(record),
    ]
    return " ".join(filter(None, sentences))


def _assigned(record: DiffRecord) -> str:
    counts = "; ".join(
        f"{name} has {numbers.quantity(totals.assigned.label)} kernels assigned by label, "
        f"{numbers.quantity(totals.assigned.value)} by value and {numbers.quantity(totals.assigned.nothing)} not "
        "assigned"
        for name, totals in record.compilers.items()
    )
    return (
        "Labels assign a kernel to a part of the model: `jax.named_scope` in JAX, `torch.fx.traceback.annotate` in "
        "torch. A kernel without a label is assigned to the part in which the other compiler writes the same values to "
        f"memory. {counts}."
    )


def _values_written(record: DiffRecord) -> str:
    if not record.common.value:
        return ""
    alone = (
        f"Only {name} writes {numbers.quantity(totals.only)}, and {numbers.quantity(totals.copies)} a second time, in "
        "another order or shape."
        for name, totals in record.compilers.items()
    )
    return f"Both compilers write {numbers.quantity(record.common)} of equal tensors to memory. {' '.join(alone)}"


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
                [kind_table(first.summary), part_table(first.summary, timed=False)],
                fold="On one device, by kind of kernel and by part of the model",
            ),
        ],
    )


def _target_collectives(record: TargetRecord) -> str:
    counts = record.summary.collectives.items()
    return ", ".join(f"{name.removesuffix('-start')} {count} ×" for name, count in counts) or "none"


def _step_times(record: StepRecord) -> Chart:
    """The profiler's times; empty if the profiler has no access to the GPU's activity."""
    groups = [group for group in record.summary.regions if group.seconds] if record.kernels_timed.value else []
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

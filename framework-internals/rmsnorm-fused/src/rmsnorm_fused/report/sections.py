"""The report: its sections in order, each with the table and the chart of one measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from benchkit import Quantity, Record, Results, numbers
from benchkit.report import (
    Axis,
    Block,
    Cell,
    Chart,
    Column,
    Limit,
    Panel,
    Point,
    Report,
    Section,
    Series,
    Table,
    Targets,
    pivot,
    series_by,
)
from rmsnorm_fused.bench.candidates import AUTOTUNED, COPY, EAGER, OWN
from rmsnorm_fused.bench.training import BASELINE
from rmsnorm_fused.report import targets
from rmsnorm_fused.report.finding import avoid, headline, use, worst
from rmsnorm_fused.report.method import asked, method
from rmsnorm_fused.report.queries import (
    ITEM_BYTES,
    PASSES,
    as_text,
    by_shape,
    compared_with_peer,
    fastest,
    headline_shape,
    implementations,
    in_order,
    name_of,
    over_widths,
    percentage,
    records_of,
    shape_of,
    shown,
)

IMPLEMENTATION = Column("implementation", shown)
_BEYOND = (
    "More than 100 % is possible: the limit is a copy by one kernel, and other accesses can suit the memory better."
)
_SHARE_AXIS = Axis("% of the copy limit (higher is better)", low=0)
_COPY_LIMIT = [Limit(100, "copy limit")]
_MUCH_LONGER = 3.0  # times the fastest call

# Operations per element, by pass and with or without a residual. Forward: square, add, two products. Backward: g, two
# for the sum of g · x, x · rstd, two for dweight, three for dx. A residual adds one to each pass.
_OPERATIONS = {
    ("forward", "headline"): 4,
    ("backward", "headline"): 9,
    ("forward", "add"): 5,
    ("backward", "add"): 10,
}
_TENSORS = {("forward", "headline"): 2, ("backward", "headline"): 3, ("forward", "add"): 4, ("backward", "add"): 4}


def report(results: Results) -> Report:
    """Declare the report of a run."""
    return Report(
        title="RMSNorm, one operator several ways, against the memory limit",
        headline=headline(results),
        use=use(results),
        avoid=avoid(results),
        worst=worst(results),
        answer=_answer(results),
        findings=[_must_and_aim(results), _training(results), _quantised(results)],
        details=[
            _in_full(results),
            _with_a_residual(results),
            _layer(results),
            _other_widths(results),
            _small_batches(results),
            _determinism(results),
            _memory(results),
            _other_dtypes(results),
        ],
        asked=asked(results),
        method=method(results),
        limits=[
            "Only contiguous tensors with a weight of the same dtype are timed. The tests cover other dtypes, strides, "
            "frozen weights and weight offsets.",
            "The training step measures the norms of one model at one shape. Their effect in another model depends on "
            "its width and batch.",
        ],
    )


def _answer(results: Results) -> list[Block]:
    columns: list[Column[str]] = [Column("implementation", as_text)]
    names: dict[str, None] = {}
    speedups = []
    for which in PASSES:
        records = {name_of(record): record for record in in_order(results.select(which, group="headline"))}
        names |= dict.fromkeys(records)
        own = fastest(records.values(), OWN)
        if own is not None and "speedup" in own.values:
            speedups.append(f"{numbers.quantity(own['speedup'])} {which}")
        columns += _pass_columns(which, records, own)
    beside_eager = f" Beside the {EAGER}: {' and '.join(speedups)}." if speedups else ""
    note = f'"× the fastest here" is the speed relative to this package\'s fastest implementation.{beside_eager}'
    caption = f"Share of the copy limit at {headline_shape(results)}: 100 % is a copy of the same bytes."
    chart = _shares(results, "headline", caption, "share of the copy limit, forward and backward")
    return [chart, Section("", [Table(list(names), columns, beyond=_BEYOND), note])]


def _pass_columns(which: str, records: Mapping[str, Record], own: Record | None) -> list[Column[str]]:
    def against(record: Record) -> str:
        if own is None or name_of(record) == COPY:
            return ""
        return numbers.with_unit(own["time"].value / record["time"].value, "×")

    def timed(show: Callable[[Record], Cell], missing: Cell) -> Callable[[str], Cell]:
        return lambda name: show(records[name]) if name in records else missing

    return [
        Column(which, timed(lambda record: numbers.with_unit(record["time"].value, "s"), None)),
        Column("of the limit", timed(_share_of_the_limit, None)),
        Column("× the fastest here", timed(against, "")),
    ]


def _share_of_the_limit(record: Record) -> str | None:
    if name_of(record) == COPY:
        return "100 %"
    return numbers.percent(record["fraction"].value) if "fraction" in record.values else None


def _shares(results: Results, group: str, caption: str, alt: str) -> Chart:
    shares = {which: _with_a_share(results.select(which, group=group)) for which in PASSES}
    top = max((100 * record["fraction"].value for records in shares.values() for record in records), default=100.0)
    axis = Axis(_SHARE_AXIS.label, unit="%", low=0, high=max(118, 1.12 * top))
    panels = [
        Panel([Series("", [_share_bar(record) for record in records])], title=which, limits=_COPY_LIMIT)
        for which, records in shares.items()
    ]
    return Chart(group, "bars", panels, axis, caption, f"Bars by implementation: {alt}")


def _share_bar(record: Record) -> Point:
    share = 100 * record["fraction"].value
    return Point(name_of(record), share, text=f"{share:.0f}", own=name_of(record) in OWN)


def _with_a_share(records: Sequence[Record]) -> list[Record]:
    return [record for record in in_order(records, copy=False) if "fraction" in record.values]


def _pass_table(records: Sequence[Record], *more: Column[Record]) -> Table[Record]:
    """A line for each implementation: time, rate, share of the limit, speed-up over eager, errors."""
    errors = list(dict.fromkeys(key for record in records for key in record.values if key.startswith("error_")))
    limited = any("fraction" in record.values for record in records)

    def error(key: str) -> Callable[[Record], Cell]:
        return lambda record: numbers.error_size(record[key].value) if key in record.values else ""

    columns = [
        IMPLEMENTATION,
        Column("time", "time"),
        Column("moved", lambda record: numbers.with_unit(record["bandwidth"].value, "B/s")),
        Column("of the limit", lambda record: _share_of_the_limit(record) if limited else None, optional=True),
        Column("against eager", lambda record: record.values.get("speedup", "1" if name_of(record) == EAGER else "")),
        *(Column(f"error of {key.removeprefix('error_')}", error(key)) for key in errors),
        Column("of the bound", _share_of_the_bound),
        *more,
    ]
    return Table(in_order(records), columns, beyond=_BEYOND)


def _share_of_the_bound(record: Record) -> str:
    return numbers.significant(record["share_of_bound"].value, 2) if "share_of_bound" in record.values else ""


def _both_passes(results: Results, **labels: str) -> list[Section]:
    return [Section(which.capitalize(), [_pass_table(results.select(which, **labels))]) for which in PASSES]


def _must_and_aim(results: Results) -> Section:
    lines = targets.reached(results)
    if results.environment.gpu is None:
        about = (
            "The share of the copy limit, for the C++ operators alone: without the entry of `torch.autograd.grad`, "
            "which a training step pays once, and with only a copy in the same rounds. The larger tensors fill the "
            "last-level cache or exceed it."
        )
    else:
        met = sum(line.value is not None and not line.missed for line in lines)
        about = (
            f"{met} of the {len(lines)} targets of this package on an {targets.GPU} are met. The shape is "
            f"{headline_shape(results)} unless another is named. A line for several implementations gives the best of "
            "them; a line for several shapes gives the shape where that best one is worst. A target that is missed "
            "stays in the table."
        )
    return Section("Must, aim and reached", [about, Targets(lines, beyond=_BEYOND)])


def _training(results: Results) -> Section:
    records = results.select("training")
    asked = results.configuration["training"]
    size = f", {asked['batch_size']} sequences" if asked.get("batch_size") else ""
    panels = [
        Panel(
            [Series("", [_speed_bar(record) for record in records if record.labels["mode"] == mode])],
            title=f"{mode} step",
            limits=[Limit(1)],
        )
        for mode in dict.fromkeys(record.labels["mode"] for record in records if "speedup" in record.values)
    ]
    return Section(
        "In a training step",
        [
            "One whole step (forward, backward, clipping, AdamW) of the repository's GPT with each norm, preset "
            f"`{asked['preset']}`{size}. All models start from the same weights and see the same batch. The loss is "
            "that of the first step. In a compiled step the compiler can fuse the formula with the operators around "
            "it; a kernel of this package it calls as it is, which costs a pass over memory.",
            Table(
                records,
                [
                    Column("mode", "mode"),
                    Column("norm", shown, left=True),
                    Column("step", "time"),
                    Column("rate", lambda record: numbers.with_unit(record["rate"].value, "tokens/s")),
                    Column(
                        f"against {BASELINE}",
                        lambda record: record.values.get("speedup", "1" if name_of(record) == BASELINE else ""),
                    ),
                    Column("loss, nats", lambda record: numbers.significant(record["loss"].value, 5)),
                ],
            ),
            Chart(
                "training",
                "bars",
                panels,
                Axis(f"speed relative to {BASELINE}, × (higher is better)"),
                f"The speed of the training step with each norm, relative to {BASELINE} in the same mode. Lines reach "
                "over the 95 % interval.",
                f"Bars: speed of the training step with each norm, relative to {BASELINE}",
            ),
        ],
    )


def _speed_bar(record: Record) -> Point:
    speed = record.values.get("speedup", Quantity(1.0, "×"))
    return Point(name_of(record), speed, text=numbers.with_unit(speed.value, "×"), own=name_of(record) in OWN)


def _quantised(results: Results) -> Section:
    records = results.select("quantised")
    own = fastest(records, OWN)
    speed = Column[Record](
        "× the fastest here",
        lambda record: None if own is None else numbers.with_unit(own["time"].value / record["time"].value, "×"),
        optional=True,
    )
    return Section(
        f"A quantised result, {headline_shape(results)}",
        [
            "The result is float8_e4m3fn with one scale per row, the row's largest |y| / 448. The kernel reads x and "
            "writes one byte per element. The limit is the rate of PyTorch's copy of x in the same rounds. The bound "
            "covers the rows divided by their scales, and the scales. It is for one rounding; a norm that rounds y to "
            "bfloat16 before scaling rounds twice and is far above it.",
            _pass_table(records, speed),
        ],
    )


def _layer(results: Results) -> Section:
    records = [record for which in PASSES for record in in_order(results.select("layer", **{"pass": which}))]
    return Section(
        f"Layer normalisation, {headline_shape(results)}",
        [
            "`layer_norm` with a weight and a bias, in the kernels of `rms_norm`; 100 % is a copy of the same bytes, "
            "and the bound is for one rounding.",
            Table(
                records,
                [
                    Column("pass", "pass"),
                    Column("implementation", shown, left=True),
                    Column("time", "time"),
                    Column("of the limit", _share_of_the_limit),
                    Column("against F.layer_norm", lambda record: record.values.get("speedup", "")),
                    Column("of the bound", _share_of_the_bound),
                ],
                beyond=_BEYOND,
            ),
        ],
        fold="Layer normalisation",
    )


def _in_full(results: Results) -> Section:
    operations = " and ".join(f"{_OPERATIONS[which, 'headline']} operations {which}" for which in PASSES)
    return Section(
        headline_shape(results),
        [
            *_both_passes(results, group="headline"),
            Section("", [_roofline(results), f"Each element takes {operations}."]),
        ],
        fold="Both passes in full: rates, ratios and errors",
    )


def _roofline(results: Results) -> Chart:
    rows, columns = results.configuration["headline"]
    item = ITEM_BYTES[results.configuration["dtype"]]
    # The rate of a copy; and that of float32 products, because the kernels compute in float32 for all these dtypes.
    copy = sum(r["bandwidth"].value for r in results.select("forward", group="headline", implementation=COPY))
    products = sum(r["rate"].value for r in results.select("product limit", dtype="float32"))
    points: list[tuple[str, Point]] = []
    ticks: dict[float, str] = {}
    for (which, group), operations in _OPERATIONS.items():
        intensity = operations / (_TENSORS[which, group] * item)
        for record in in_order(results.select(which, group=group), copy=False) if copy and products else ():
            rate = operations * rows * columns / record["time"].value
            hover = f"{name_of(record)}, {which}: {numbers.with_unit(rate, 'FLOP/s')}"
            points.append((name_of(record), Point(intensity, rate, hover=hover)))
            ticks[intensity] = f"{intensity:.2g}\n{which}" + ",\nresidual" * (group == "add")
    ends = (min(ticks) / 1.2, max(ticks) * 1.2) if ticks else ()
    roof = Series("copy", [Point(end, end * copy) for end in ends], guide=True)
    return Chart(
        "roofline",
        "points",
        [Panel([*series_by(points, itemgetter(0), itemgetter(1), own=OWN), roof])],
        Axis("GFLOP/s (higher is better)", scale=1e-9, log=10),
        f"Roofline, zoomed to the data: one column of markers per pass at {headline_shape(results)}. The dashed line "
        f"is the rate of a copy, {numbers.with_unit(copy, 'B/s')}. The rate of float32 matrix products, "
        f"{numbers.with_unit(products, 'FLOP/s')}, limits only beyond "
        f"{numbers.significant(products / (copy or 1), 2)} FLOP/byte.",
        "Points under a roof: operations per second of each pass over its operations per byte",
        places=Axis("pass, and its arithmetic intensity in FLOP/byte", log=10, ticks=ticks),
    )


def _with_a_residual(results: Results) -> Section:
    caption = f"With a residual added, at {headline_shape(results)}: 100 % is two reads and two writes."
    return Section(
        f"With a residual added, {headline_shape(results)}",
        [
            "s = x + residual and y = rmsnorm(s) · weight are both results, and both have gradients. A fused backward "
            "pass adds ds before it rounds. If autograd adds ds to an already rounded gradient, dx exceeds the bound "
            "where the two nearly cancel.",
            *_both_passes(results, group="add"),
            _shares(results, "add", caption, "share of the copy limit, forward and backward with a residual"),
        ],
        fold="With a residual added",
    )


def _other_widths(results: Results) -> Section:
    return Section(
        "Rows of other widths",
        ["Times, with the share of the copy limit in brackets.", *(_width(results, which) for which in PASSES)],
        fold="Rows of other widths",
    )


def _width(results: Results, which: str) -> Section:
    records = over_widths(results, which)
    limited = [record for record in _with_a_share(records) if name_of(record) != AUTOTUNED]  # which has one width only

    def cell(record: Record) -> str:
        time = numbers.with_unit(record["time"].value, "s")
        return time if name_of(record) == COPY else f"{time} ({numbers.percent(record['fraction'].value, 0)})"

    return Section(
        which.capitalize(),
        [
            _by_shape_and_implementation(records, cell),
            Chart(
                f"widths-{which}",
                "lines",
                [Panel(_lines(limited, "columns", lambda record: percentage(record["fraction"])), limits=_COPY_LIMIT)],
                _SHARE_AXIS,
                f"The {which} pass for rows of different widths with the same number of elements: share of the copy "
                "limit. Solid lines: this package; dotted lines: the others.",
                f"Lines: share of the limit of the {which} pass over the width of a row, by implementation",
                places=Axis(
                    f"columns N, at {numbers.count(results.configuration['elements'])} elements",
                    log=2,
                    ticks=sorted({int(record.labels["columns"]) for record in limited}),
                ),
            ),
        ],
    )


def _by_shape_and_implementation(records: Sequence[Record], cell: Callable[[Record], str]) -> Table[Any]:
    return pivot(
        records,
        corner="rows × columns",
        row=shape_of,
        column=name_of,
        cell=cell,
        column_title=as_text,
        columns=implementations(records, copy=True),
        beyond=_BEYOND,
    )


def _lines(records: Sequence[Record], place: str, value: Callable[[Record], Quantity]) -> list[Series]:
    """A line for each implementation, along a label."""

    def point(record: Record) -> Point:
        return Point(int(record.labels[place]), value(record))

    return series_by(in_order(records), name_of, point, own=OWN, guides=(COPY,))


def _small_batches(results: Results) -> Section:
    until = ", while the kernel may still run" if results.environment.gpu else ""
    called = results.select("call")
    return Section(
        "Small batches, forward",
        [
            # Runs without this setting timed the calls of each shape separately.
            f"The time of a call from Python is the time until it returns{until}. The calls of all these shapes and "
            "implementations were timed in the same rounds, separately with and without a gradient, so that slow "
            "phases of the host affect all of them equally."
            if called and "call_seconds" in results.configuration
            else "",
            _batches("The kernel alone", results.select("forward", group="batches")),
            _batches("The call from Python", results.select("call", gradient=False)),
            _only_in_a_graph(results.select("call", gradient=False)),
            _batches(
                "The call from Python, with a weight that requires a gradient",
                results.select("call", gradient=True),
            ),
            _batch_kernels(results),
            _calls(results),
        ],
        fold="Small batches",
    )


def _batches(title: str, records: Sequence[Record]) -> Section:
    records = sorted(records, key=lambda record: (int(record.labels["columns"]), int(record.labels["rows"])))
    compared = [
        entry for shape, timed in by_shape(records).items() if (entry := compared_with_peer(timed, shape)) is not None
    ]
    worst = min(compared, key=lambda entry: entry.speed, default=None)
    ahead = sum(entry.speed >= 1 for entry in compared)
    note = f"This package's fastest is the fastest of all at {ahead} of {len(compared)} shapes; at its worst {worst}."
    table = _by_shape_and_implementation(records, lambda record: numbers.with_unit(record["time"].value, "s"))
    return Section(title, [table, note if worst else ""])


def _only_in_a_graph(calls: Sequence[Record]) -> str:
    """Where eager calls of the Triton kernels cost several times what a call of this package needs to."""
    best = {shape: fastest(records, OWN) for shape, records in by_shape(calls).items()}
    times = [
        (record["time"].value / own["time"].value, record)
        for record in records_of(calls, ["triton"])
        if (own := best[shape_of(record)]) is not None
    ]
    ratio, call = min(times, key=itemgetter(0), default=(1.0, None))
    if call is None or ratio < _MUCH_LONGER:
        return ""
    return (
        f"`triton` pays only inside a graph (`torch.compile`, a CUDA graph), where nothing of its launch is left: "
        f"from Python a call takes {numbers.quantity(call['time'])} at {shape_of(call)}, "
        f"{numbers.with_unit(ratio, '×')} the time of this package's fastest, and no less at another shape."
    )


def _batch_kernels(results: Results) -> Chart:
    narrowest = min(results.configuration["batch_columns"])
    records = results.select("forward", group="batches", columns=narrowest)
    rows = sorted({int(record.labels["rows"]) for record in records})
    return Chart(
        "batches-kernels",
        "lines",
        [Panel(_lines(records, "rows", lambda record: record["time"]) if len(rows) > 1 else [])],
        Axis("time, µs (lower is better)", scale=1e6, log=10),
        f"The forward pass on few rows of {narrowest} columns: the kernel alone, replayed from a CUDA graph. The "
        "dashed line is a copy of the rows.",
        "Lines: kernel time over the number of rows, by implementation",
        places=Axis("rows M", log=2, ticks=rows),
    )


def _calls(results: Results) -> Chart:
    rows, columns = min(results.configuration["batches"]), min(results.configuration["batch_columns"])
    titles = {False: "no gradient", True: "the weight requires a gradient"}
    calls = {
        gradient: in_order(results.select("call", rows=rows, columns=columns, gradient=gradient)) for gradient in titles
    }
    panels = [
        Panel([Series("", [_call_bar(record) for record in records])], title=titles[gradient])
        for gradient, records in calls.items()
    ]
    trained = {name_of(record) for record in calls[True]}
    untrained = [name for record in calls[False] if (name := name_of(record)) not in trained]
    return Chart(
        "batches-calls",
        "bars",
        panels,
        Axis("time of a call, µs (lower is better)", scale=1e6),
        f"One call from Python at {rows} × {columns}, without a gradient and with a weight that requires one."
        + (f" Timed without a gradient alone: {', '.join(untrained)}." if trained and untrained else ""),
        "Bars: time of a small call from Python, by implementation",
    )


def _call_bar(record: Record) -> Point:
    time = record["time"]
    return Point(name_of(record), time, text=numbers.with_unit(time.value, "s"), own=name_of(record) in OWN)


def _determinism(results: Results) -> Section:
    return Section(
        "Deterministic gradients",
        [
            "The backward pass by default and with `torch.use_deterministic_algorithms(True)`, and whether its bits "
            "repeat. (Torch's deterministic mode also fills new memory by default; this is switched off here.) The "
            "default may have another time than in the tables above: both rotate through more operands than the "
            "last-level cache holds, and differ by what else ran in the rounds.",
            Table(
                results.select("determinism"),
                [
                    Column("rows × columns", shape_of),
                    Column("implementation", shown, left=True),
                    Column("default", "default"),
                    Column("default repeats", "default repeats"),
                    Column("deterministic", "deterministic"),
                    Column("deterministic repeats", "deterministic repeats"),
                    Column("of the default's time", "speedup"),
                ],
            ),
        ],
        fold="Deterministic gradients",
    )


def _memory(results: Results) -> Section:
    rows, columns = results.configuration["headline"]
    tensor = rows * columns * ITEM_BYTES[results.configuration["dtype"]]
    return Section(
        f"Peak memory, {headline_shape(results)}",
        [
            "The peak memory of forward and backward together, without their inputs. It includes y and dx, two tensors "
            "of the size of x.",
            Table(
                results.select("memory"),
                [
                    IMPLEMENTATION,
                    Column("peak", lambda record: numbers.with_unit(record["peak"].value, "B")),
                    Column("tensors of the size of x", lambda record: record["peak"].value / tensor),
                ],
            ),
        ],
        fold="Peak memory",
    )


def _other_dtypes(results: Results) -> Section:
    dtypes = dict.fromkeys(str(record.labels["dtype"]) for record in results.select("backward", group="dtypes"))
    sections = [Section(f"The same in {dtype}", _both_passes(results, group="dtypes", dtype=dtype)) for dtype in dtypes]
    return Section("", sections, fold="Other dtypes")

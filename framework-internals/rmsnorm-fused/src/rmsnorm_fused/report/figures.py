"""The figures of the report, drawn from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchkit import Record, Results, numbers
from benchkit.report import Figure
from benchkit.report.plotting import (
    COLOURS,
    HATCHES,
    LIMIT_COLOUR,
    MARKERS,
    draw_limit,
    hover,
    hover_points,
    label_ticks,
    new_figure,
    new_panels,
)
from rmsnorm_fused.bench.candidates import (
    ABOUT,
    AUTOTUNED,
    COMPILED,
    COPY,
    EAGER,
    LIGER,
    LIGER_CUTE,
    OWN,
    QUACK,
    TORCH,
)
from rmsnorm_fused.bench.training import BASELINE

PASSES = ("forward", "backward")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# Operations per element, by pass and with or without a residual. Forward: square, add, two products. Backward: g, two
# for the sum of g · x, x · rstd, two for dweight, three for dx. A residual adds one to each pass.
OPERATIONS = {
    ("forward", "headline"): 4,
    ("backward", "headline"): 9,
    ("forward", "add"): 5,
    ("backward", "add"): 10,
}

# The index of each implementation's colour and marker. cpp and cuda are never in the same figure.
_STYLES = {
    "cuda": 0,
    "cpp": 0,
    LIGER: 1,
    QUACK: 2,
    LIGER_CUTE: 3,
    COMPILED: 4,
    AUTOTUNED: 4,
    "triton": 5,
    TORCH: 6,
    EAGER: 7,
}


def shown(name: object) -> str:
    """An implementation's name in text: this package's as code."""
    return f"`{name}`" if name in OWN else str(name)


def implementations(records: Sequence[Record], *, copy: bool = False) -> list[str]:
    """The implementations' names in the order of the report, with the copy first if requested."""
    present = {str(record.labels["implementation"]) for record in records}
    return [name for name in ABOUT if name in present and (copy or name != COPY)]


def width_records(results: Results, which: str) -> list[Record]:
    """The records over widths, including the headline if it has the same number of elements."""
    records = results.select(which, group="widths")
    rows, columns = results.configuration["headline"]
    if rows * columns == results.configuration["elements"] and not any(r.labels["columns"] == columns for r in records):
        records += results.select(which, group="headline")
    return records


def shape(results: Results) -> str:
    """The shape and dtype of the headline, as text."""
    rows, columns = results.configuration["headline"]
    return f"{rows} × {columns} {results.configuration['dtype']}"


def figures(results: Results) -> list[Figure]:
    """The figures for which there are records."""
    return [
        *_bars(
            results,
            "headline",
            f"Share of the copy limit at {shape(results)}: 100 % is a copy of the same bytes.",
        ),
        *_bars(
            results,
            "add",
            f"With a residual added, at {shape(results)}: 100 % is two reads and two writes.",
        ),
        *_roofline(results),
        *(figure for which in PASSES for figure in _widths(results, which)),
        *_batch_kernels(results),
        *_calls(results),
        *_training(results),
    ]


def _style(name: str) -> dict[str, Any]:
    index = _STYLES[name]
    return {
        "label": name,
        "color": COLOURS[index],
        "marker": MARKERS[index],
        "markerfacecolor": "white" if name == AUTOTUNED else COLOURS[index],
        "linestyle": "-" if name in OWN else ":",
    }


def _legend(figure: MatplotlibFigure, columns: int = 4) -> None:
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)


def _bars(results: Results, group: str, caption: str) -> list[Figure]:
    if not any("fraction" in record.values for record in results.select("forward", group=group)):
        return []
    alt = (
        f"Bars by implementation: share of the copy limit, forward and backward{' with a residual' * (group == 'add')}"
    )
    return [Figure(group, caption, partial(_draw_bars, results, group), alt)]


def _draw_bars(results: Results, group: str) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 4.2)
    names = implementations(results.select("forward", group=group))
    top = 100.0
    for index, which in enumerate(PASSES):
        shares = {
            str(record.labels["implementation"]): 100 * record["fraction"].value
            for record in results.select(which, group=group)
            if "fraction" in record.values
        }
        top = max(top, *shares.values()) if shares else top
        places = [place + (index - 0.5) * 0.4 for place in range(len(names))]
        bars = axes.bar(
            places,
            [shares.get(name, 0.0) for name in names],
            0.38,
            label=which,
            color=COLOURS[index],
            hatch=HATCHES[index],
            edgecolor="black",
            linewidth=0.6,
        )
        for name, bar in zip(names, bars, strict=True):
            if name in shares:
                hover(bar, f"{name}, {which}: {shares[name]:.1f} % of the copy limit")
        labels = [f"{shares[name]:.0f}" if name in shares else "" for name in names]
        # A white background, because most labels lie on the line of the limit.
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        for label in axes.bar_label(bars, labels, padding=3, fontsize=8, zorder=5):
            label.set_bbox(paper if label.get_text() else None)
    draw_limit(axes, 100, "copy limit")
    axes.set_xlim(-0.6, len(names) + 0.4)  # space for the line's label to the right of the bars
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", rotation_mode="anchor")
    axes.set_ylabel("% of the copy limit (higher is better)")
    axes.set_ylim(0, max(118, 1.12 * top))
    axes.grid(axis="x", visible=False)
    _legend(figure, 2)
    return figure


def _roofline(results: Results) -> list[Figure]:
    if not (results.select("product limit") and results.select("forward", group="headline", implementation=COPY)):
        return []
    bandwidth, rate = _roofs(results)
    caption = (
        f"Roofline, zoomed to the data: one column of markers per pass at {shape(results)}. The dashed line is the "
        f"rate of a copy, {numbers.with_unit(bandwidth, 'B/s')}. The rate of float32 matrix products, "
        f"{numbers.with_unit(rate, 'FLOP/s')}, limits only beyond {numbers.significant(rate / bandwidth, 2)} FLOP/byte."
    )
    return [
        Figure(
            "roofline",
            caption,
            partial(_draw_roofline, results),
            "Points under a roof: operations per second of each pass over its operations per byte",
        )
    ]


def _roofs(results: Results) -> tuple[float, float]:
    """The rates of a copy and of float32 products; the kernels compute in float32 for all these dtypes."""
    copy = results.one("forward", group="headline", implementation=COPY)
    return copy["bandwidth"].value, results.one("product limit", dtype="float32")["rate"].value


def _draw_roofline(results: Results) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 4.6)
    rows, columns = results.configuration["headline"]
    item = ITEM_BYTES[results.configuration["dtype"]]
    bandwidth, _ = _roofs(results)
    drawn: dict[float, str] = {}
    rates: list[float] = []
    for (which, group), operations in OPERATIONS.items():
        records = results.select(which, group=group)
        tensors = 4 if group == "add" else {"forward": 2, "backward": 3}[which]
        intensity = operations / (tensors * item)
        for name in implementations(records):
            record = next(r for r in records if r.labels["implementation"] == name)
            rates.append(operations * rows * columns / record["time"].value)
            label = name if group == "headline" and which == "forward" else "_"
            axes.plot([intensity], [rates[-1]], **_style(name) | {"linestyle": "", "label": label})
            text = f"{name}, {which}: {numbers.with_unit(rates[-1], 'FLOP/s')}"
            hover_points(axes, [intensity], [rates[-1]], [text])
        if records:
            drawn[intensity] = which if group == "headline" else f"{which},\nresidual"
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right = min(drawn) / 1.2, max(drawn) * 1.2
    axes.plot([left, right], [left * bandwidth, right * bandwidth], color=LIMIT_COLOUR, linestyle="--", linewidth=1.2)
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": LIMIT_COLOUR}
    axes.annotate(f"copy, {numbers.with_unit(bandwidth, 'B/s')}", (left, left * bandwidth), (4, 14), **style)
    axes.set_xlim(left, right)
    axes.set_ylim(min(rates) / 2.2, 1.5 * max(right * bandwidth, *rates))
    axes.set_xticks(list(drawn), [f"{intensity:.2g}\n{text}" for intensity, text in drawn.items()], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    _label_rates(axes)
    axes.set_xlabel("pass, and its arithmetic intensity in FLOP/byte")
    axes.set_ylabel("operations per second (higher is better)")
    _legend(figure)
    return figure


def _label_rates(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.with_unit(value, "FLOP/s")))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _widths(results: Results, which: str) -> list[Figure]:
    if not results.select(which, group="widths"):
        return []
    caption = (
        f"The {which} pass for rows of different widths with the same number of elements: share of the copy limit. "
        "Solid lines: this package; dotted lines: the others."
    )
    alt = f"Lines: share of the limit of the {which} pass over the width of a row, by implementation"
    return [Figure(f"widths-{which}", caption, partial(_draw_widths, results, which), alt)]


def _draw_widths(results: Results, which: str) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 4.4)
    records = [record for record in width_records(results, which) if "fraction" in record.values]
    top = 100 * max((record["fraction"].value for record in records), default=1.0)
    for name in implementations(records):
        if name == AUTOTUNED:  # measured at one width only
            continue
        own = sorted((r for r in records if r.labels["implementation"] == name), key=lambda r: int(r.labels["columns"]))
        widths, shares = [int(r.labels["columns"]) for r in own], [100 * r["fraction"].value for r in own]
        axes.plot(widths, shares, **_style(name))
        texts = [f"{name}, {width} columns: {share:.1f} %" for width, share in zip(widths, shares, strict=True)]
        hover_points(axes, widths, shares, texts)
    draw_limit(axes, 100, "copy limit")
    axes.set_xscale("log", base=2)
    every = sorted({int(record.labels["columns"]) for record in records})
    axes.set_xticks(every, [f"{width:,}" for width in every], rotation=30)
    axes.minorticks_off()
    axes.set_ylim(0, max(115, 1.08 * top))
    axes.set_xlabel(f"columns N, at {numbers.count(results.configuration['elements'])} elements")
    axes.set_ylabel("% of the copy limit (higher is better)")
    axes.set_title(f"{which}, {results.configuration['dtype']}", fontsize=10)
    _legend(figure)
    return figure


def _batch_kernels(results: Results) -> list[Figure]:
    records = results.select("forward", group="batches", columns=min(results.configuration["batch_columns"]))
    if len({record.labels["rows"] for record in records}) < 2:
        return []
    caption = (
        f"The forward pass on few rows of {min(results.configuration['batch_columns'])} columns: the kernel alone, "
        "replayed from a CUDA graph. The dashed line is a copy of the rows."
    )
    return [
        Figure(
            "batches-kernels",
            caption,
            partial(_draw_batch_kernels, records),
            "Lines: kernel time over the number of rows, by implementation",
        )
    ]


def _draw_batch_kernels(records: Sequence[Record]) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 4.2)
    for name in implementations(records, copy=True):
        own = sorted((r for r in records if r.labels["implementation"] == name), key=lambda r: int(r.labels["rows"]))
        style = {"label": name, "color": LIMIT_COLOUR, "linestyle": "--"} if name == COPY else _style(name)
        rows, times = [int(r.labels["rows"]) for r in own], [1e6 * r["time"].value for r in own]
        axes.plot(rows, times, **style)
        texts = [f"{name}, {row} rows: {time:.2f} µs" for row, time in zip(rows, times, strict=True)]
        hover_points(axes, rows, times, texts)
    every = sorted({int(record.labels["rows"]) for record in records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(every, [str(number) for number in every])
    label_ticks(axes.yaxis, (1, 2, 5))
    axes.set_xlabel("rows M")
    axes.set_ylabel("time, µs (lower is better)")
    _legend(figure)
    return figure


def _calls(results: Results) -> list[Figure]:
    rows, columns = min(results.configuration["batches"]), min(results.configuration["batch_columns"])
    records = results.select("call", rows=rows, columns=columns)
    if not records:
        return []
    caption = (
        f"One call from Python at {rows} × {columns}: filled markers without gradients, empty markers with a weight "
        "that requires a gradient."
    )
    return [
        Figure(
            "batches-calls",
            caption,
            partial(_draw_calls, records),
            "Points: time of a small call from Python, by implementation",
        )
    ]


def _draw_calls(records: Sequence[Record]) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    names = implementations(records)[::-1]
    for gradient, label in ((False, "no gradient"), (True, "the weight requires a gradient")):
        times = {
            str(record.labels["implementation"]): 1e6 * record["time"].value
            for record in records
            if record.labels["gradient"] is gradient
        }
        axes.plot(
            list(times.values()),
            [names.index(name) for name in times],
            linestyle="",
            marker=MARKERS[int(gradient)],
            markersize=8,
            color=COLOURS[int(gradient)],
            markerfacecolor="none" if gradient else COLOURS[0],
            label=label,
        )
        places = [names.index(name) for name in times]
        hover_points(axes, list(times.values()), places, [f"{n}, {label}: {t:.2f} µs" for n, t in times.items()])
    axes.set_yticks(range(len(names)), names)
    axes.margins(y=0.08)
    axes.set_xscale("log")
    label_ticks(axes.xaxis, (1, 2, 5))
    axes.set_xlabel("time of a call, µs (lower is better)")
    _legend(figure, 2)
    return figure


def _training(results: Results) -> list[Figure]:
    if not any("speedup" in record.values for record in results.select("training")):
        return []
    caption = (
        f"The speed of the training step with each norm, relative to {BASELINE} in the same mode. Lines reach over the "
        "95 % interval."
    )
    return [
        Figure(
            "training",
            caption,
            partial(_draw_training, results),
            "Bars: speed of the training step with each norm, relative to nn.RMSNorm",
        )
    ]


def _draw_training(results: Results) -> MatplotlibFigure:
    records = [record for record in results.select("training") if "speedup" in record.values]
    modes = list(dict.fromkeys(str(record.labels["mode"]) for record in records))
    names = list(dict.fromkeys(str(record.labels["norm"]) for record in records))[::-1]
    figure, (panels,) = new_panels(1, len(modes), width=max(7.0, 4.2 * len(modes)), height=2.4, sharey="all")
    for axes, mode in zip(panels, modes, strict=True):
        for record in (record for record in records if record.labels["mode"] == mode):
            name, speed = str(record.labels["norm"]), record["speedup"]
            place = names.index(name)
            (bar,) = axes.barh(place, speed.value, height=0.6, color=COLOURS[_STYLES[name]], edgecolor="black")
            hover(bar, f"{name}, {mode}: {numbers.quantity(speed)}")
            axes.plot([speed.low or speed.value, speed.high or speed.value], [place, place], color="black", linewidth=1)
            axes.text(
                (speed.high or speed.value) + 0.02, place, numbers.with_unit(speed.value, "×"), va="center", fontsize=9
            )
        axes.margins(x=0.14)
        axes.axvline(1.0, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"{mode} step", fontsize=10)
        axes.grid(axis="y", visible=False)
    figure.supxlabel(f"speed relative to {BASELINE}, × (higher is better)", fontsize=9)
    return figure

"""The figures of the report, drawn from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchkit import Record, Results, numbers
from benchkit.report.plotting import (
    COLOURS,
    HATCHES,
    MARKERS,
    draw_limit,
    hover,
    hover_points,
    label_ticks,
    new_figure,
    new_panels,
)
from custom_ops.report.attention import best_of_torch, ceilings, own


def speed_figure(results: Results) -> Figure:
    """Bandwidth over size, with one panel per operator."""
    ops = list(dict.fromkeys(str(record.labels["op"]) for record in results.select("speed")))
    rows = -(-len(ops) // 3)
    figure, grid = new_panels(rows, 3, width=10.0, height=3.5 * rows, sharey="all")
    forms = list(dict.fromkeys(str(record.labels["form"]) for record in results.select("speed")))
    for axes, op in zip(chain(*grid), ops, strict=False):
        for index, form in enumerate(forms):
            records = results.select("speed", op=op, form=form, dtype="float32")
            counts = [int(record.labels["count"]) for record in records]
            rates = [record["rate"].value / 1e9 for record in records]
            if records:
                axes.plot(
                    counts, rates, label=form if op == "bias_gelu" else None,
                    color=COLOURS[index], marker=MARKERS[index], markersize=4, linewidth=1.4,
                )  # fmt: skip
            for place, rate in zip(counts, rates, strict=True):
                hover_points(axes, [place], [rate], [f"{op}, {form}, {place:,} elements: {rate:,.3g} GB/s"])
        traffic = str(results.select("speed", op=op)[0].labels["limit"])
        for limit in results.select("memory limit", traffic=traffic):
            draw_limit(axes, limit["bandwidth"].value / 1e9, "memory limit", left=True)
        axes.set_title(f"{op}: {traffic}", fontsize=11)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    first, *_ = figure.axes
    low, high = first.get_ylim()
    first.set_ylim(low, 1.6 * high)  # space for the limit's label
    label_ticks(first.yaxis, (1, 2, 5) if high < 100 * low else (1,))
    for place, axes in enumerate(figure.axes):
        axes.set_visible(place < len(ops))
        axes.tick_params(labelbottom=place + 3 >= len(ops))  # no panel below
    figure.supxlabel("elements", fontsize=11)
    figure.supylabel("GB/s (higher is better)", fontsize=11)
    figure.legend(loc="outside lower right", ncols=len(forms), fontsize=10, frameon=False)
    return figure


def calls_figure(results: Results) -> Figure:
    """The time of one call, with one bar for each way to reach the kernel."""
    figure, axes = new_figure(7.5, 4.2)
    forms = [str(record.labels["form"]) for record in results.select("wrapper")]
    smallest = min(int(record.labels["count"]) for record in results.select("call"))
    for offset, (grad, label) in enumerate(((False, "no gradient needed"), (True, "an operand requires a gradient"))):
        records: list[Record] = [results.one("call", form=form, count=smallest, grad=grad) for form in forms]
        times = [record["time"] for record in records]
        bars = axes.barh(
            [index + (offset - 0.5) * 0.38 for index in range(len(forms))],
            [time.value * 1e6 for time in times],
            height=0.36,
            xerr=[
                [(time.value - (time.low or time.value)) * 1e6 for time in times],
                [((time.high or time.value) - time.value) * 1e6 for time in times],
            ],
            label=label,
            color=COLOURS[offset],
            hatch=HATCHES[offset],
            edgecolor="white",
            error_kw={"elinewidth": 0.8},
        )
        for form, time, bar in zip(forms, times, bars, strict=True):
            hover(bar, f"{form}, {label}: {numbers.quantity(time)}")
    axes.set_yticks(range(len(forms)), forms)
    axes.invert_yaxis()
    axes.set_xlabel(f"µs a call, {smallest} element (lower is better)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def attention_figure(results: Results) -> Figure:
    """Operations per second over the length: one column per dtype and head size, forward above backward."""
    columns = list(
        dict.fromkeys((str(record.labels["dtype"]), int(record.labels["head_size"])) for record in own(results))
    )
    figure, grid = new_panels(2, len(columns), width=2.5 * len(columns) + 0.8, height=6.0, sharey="col")
    lengths = sorted({int(record.labels["length"]) for record in own(results)})
    fastest = max(record["rate"].value for record in results.select("attention"))
    scale, unit = (1e12, "TFLOP/s") if fastest > 1e12 else (1e9, "GFLOP/s")
    for row, direction in zip(grid, ("forward", "backward"), strict=True):
        for axes, (dtype, head_size) in zip(row, columns, strict=True):
            records = own(results, dtype=dtype, head_size=head_size, direction=direction)
            _draw_rates(axes, records, "custom_ops", 0, scale)
            _draw_rates(axes, [best_of_torch(results, record) for record in records], "PyTorch's best", 1, scale)
            limits = ceilings(results, dtype)
            for name, limit in limits.items():
                draw_limit(axes, limit / scale, name)
            axes.set_title(f"{direction}, {dtype}, head {head_size}", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=9)
            label_ticks(axes.yaxis)
            highest = max([*limits.values(), *(r["rate"].value for r in results.select("attention", dtype=dtype))])
            axes.set_ylim(0, 1.15 * highest / scale)
    figure.supxlabel("tokens of a sequence", fontsize=11)
    figure.supylabel(f"{unit} (higher is better)", fontsize=11)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=10, frameon=False
    )
    return figure


def _draw_rates(axes: Axes, records: Sequence[Record], name: str, index: int, scale: float) -> None:
    """Draw a solid line without a mask, and a dotted line with one."""
    for causal, style in ((False, "-"), (True, ":")):
        chosen = [record for record in records if record.labels["causal"] == causal]
        label = f"{name}, causal" if causal else name
        lengths = [int(record.labels["length"]) for record in chosen]
        rates = [record["rate"].value / scale for record in chosen]
        texts = [
            f"{label}, {n:,} tokens: {numbers.with_unit(r * scale, 'FLOP/s')}"
            for n, r in zip(lengths, rates, strict=True)
        ]
        hover_points(axes, lengths, rates, texts)
        axes.plot(
            lengths,
            rates,
            label=label,
            color=COLOURS[index],
            marker=MARKERS[index],
            markersize=4,
            linewidth=1.4,
            linestyle=style,
        )

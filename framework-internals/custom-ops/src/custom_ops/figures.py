"""The figures of the report, from the results alone."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchkit import Record, Results
from benchkit.plotting import COLOURS, HATCHES, MARKERS, draw_limit, new_figure


def speed_figure(results: Results) -> Figure:
    """Bandwidth over size, a panel for each operator."""
    ops = list(dict.fromkeys(str(record.labels["op"]) for record in results.select("speed")))
    figure, _ = new_figure(10.0, 6.2)
    figure.clear()
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    forms = list(dict.fromkeys(str(record.labels["form"]) for record in results.select("speed")))
    for axes, op in zip(panels, ops, strict=False):
        for index, form in enumerate(forms):
            records = results.select("speed", op=op, form=form, dtype="float32")
            if records:
                axes.plot(
                    [int(record.labels["count"]) for record in records],
                    [record["rate"].value / 1e9 for record in records],
                    label=form if op == "bias_gelu" else None,
                    color=COLOURS[index],
                    marker=MARKERS[index],
                    markersize=4,
                    linewidth=1.4,
                )
        traffic = str(results.select("speed", op=op)[0].labels["limit"])
        draw_limit(axes, results.one("memory limit", traffic=traffic)["bandwidth"].value / 1e9, traffic)
        axes.set_title(op, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    for axes in list(figure.axes)[len(ops) :]:
        axes.set_visible(False)
    figure.supxlabel("elements", fontsize=9)
    figure.supylabel("GB/s", fontsize=9)
    figure.legend(loc="outside lower right", ncols=len(forms), fontsize=8)
    return figure


def calls_figure(results: Results) -> Figure:
    """The time of one call, a bar for each way to reach the kernel."""
    figure, axes = new_figure(7.5, 4.2)
    forms = [str(record.labels["form"]) for record in results.select("wrapper")]
    smallest = min(int(record.labels["count"]) for record in results.select("call"))
    for offset, (grad, label) in enumerate(
        ((False, "no gradient asked for"), (True, "an operand requires a gradient"))
    ):
        records: list[Record] = [results.one("call", form=form, count=smallest, grad=grad) for form in forms]
        times = [record["time"] for record in records]
        axes.barh(
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
    axes.set_yticks(range(len(forms)), forms)
    axes.invert_yaxis()
    axes.set_xlabel(f"µs a call, {smallest} element")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure

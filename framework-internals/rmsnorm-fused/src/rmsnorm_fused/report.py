"""The report: tables, figures and the finding, from the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit import Record, Results, numbers
from benchkit.plotting import COLOURS, HATCHES, MARKERS, draw_limit, new_figure
from benchkit.report import Figure, ReportSpec, markdown_table
from rmsnorm_fused.accuracy import ARITHMETIC_FACTOR
from rmsnorm_fused.contestants import ABOUT, COPY, EAGER, OWN

_ORDER = tuple(ABOUT)
_PASSES = ("forward", "backward")
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def _implementations(records: Sequence[Record], *, copy: bool = False) -> list[str]:
    """Their names in the order of the report, with the copy first where it is wanted."""
    present = {str(record.labels["implementation"]) for record in records}
    return [name for name in _ORDER if name in present and (copy or name != COPY)]


def _shape(results: Results) -> str:
    rows, columns = results.configuration["headline"]
    return f"{rows} × {columns} {results.configuration['dtype']}"


def _best_own(results: Results, which: str) -> Record | None:
    own = [record for record in results.select(which, group="headline") if record.labels["implementation"] in OWN]
    return min(own, key=lambda record: record["time"].value, default=None)


def finding(results: Results) -> str:
    """The best of this package's implementations at the headline shape, in one sentence."""
    parts = []
    for which in _PASSES:
        record = _best_own(results, which)
        if record is not None:
            parts.append(
                f"{which} {numbers.percent(record['fraction'].value, 0)} of the copy limit and "
                f"{numbers.with_unit(record['speedup'].value, '×')} the speed of the eager formula "
                f"(`{record.labels['implementation']}`)"
            )
    if not parts:
        return f"RMSNorm at {_shape(results)}: none of this package's kernels could run here."
    return f"RMSNorm at {_shape(results)}: {'; '.join(parts)}."


def _headline_table(results: Results, which: str) -> str:
    records = results.select(which, group="headline")
    rows = [
        (
            f"`{name}`" if name in OWN else name,
            numbers.quantity(record["time"]),
            numbers.with_unit(record["bandwidth"].value, "B/s"),
            numbers.percent(record["fraction"].value) if name != COPY else "100 %",
            numbers.quantity(record["speedup"]) if "speedup" in record.values else "1" if name == EAGER else "",
            ", ".join(numbers.error_size(record[key].value) for key in record.values if key.startswith("error_")),
            numbers.significant(record["share_of_bound"].value, 2) if name != COPY else "",
        )
        for name in _implementations(records, copy=True)
        for record in records
        if record.labels["implementation"] == name
    ]
    errors = "error of y" if which == "forward" else "errors of dx, dweight"
    return markdown_table(
        ("implementation", "time", "moved", "of the limit", "against eager", errors, "of the bound"), rows
    )


def _width_table(results: Results, which: str) -> str:
    records = _width_records(results, which)
    names = _implementations(records, copy=True)
    columns = sorted({int(record.labels["columns"]) for record in records})

    def cell(name: str, width: int) -> str:
        found = [r for r in records if r.labels["implementation"] == name and r.labels["columns"] == width]
        if not found:
            return "–"
        time = numbers.with_unit(found[0]["time"].value, "s")
        return time if name == COPY else f"{time} ({numbers.percent(found[0]['fraction'].value, 0)})"

    shapes = {int(record.labels["columns"]): record.labels["rows"] for record in records}
    return markdown_table(
        ("rows × columns", *names),
        [(f"{shapes[width]} × {width}", *(cell(name, width) for name in names)) for width in columns],
    )


def _width_records(results: Results, which: str) -> list[Record]:
    """The sweep over widths, with the headline where it has as many elements."""
    records = results.select(which, group="widths")
    rows, columns = results.configuration["headline"]
    if rows * columns == results.configuration["elements"] and not any(r.labels["columns"] == columns for r in records):
        records += results.select(which, group="headline")
    return records


def _batch_table(results: Results) -> str:
    kernels = results.select("forward", group="batches")
    calls = results.select("call")
    names = _implementations(kernels, copy=True)

    def times(records: Sequence[Record], rows: object) -> list[str]:
        by_name = {r.labels["implementation"]: r["time"].value for r in records if r.labels["rows"] == rows}
        return [numbers.with_unit(by_name[name], "s") if name in by_name else "–" for name in names]

    what = "kernels alone" if calls else "whole call"
    shapes = list(dict.fromkeys(record.labels["rows"] for record in kernels))
    width = results.configuration["batch_columns"]
    rows = [(f"{rows} × {width}", what, *times(kernels, rows)) for rows in shapes]
    if calls:
        rows += [(f"{rows} × {width}", "call from Python", *times(calls, rows)) for rows in shapes]
    return markdown_table(("rows × columns", "what", *names), rows, left=2)


def _batch_sentence(results: Results) -> str:
    """Who is ahead at the smallest batch, kernel and call."""
    rows = min(results.configuration["batches"])
    source = "call" if results.select("call") else "forward"
    records = [
        record
        for record in results.select(source, rows=rows)
        if record.labels.get("group", "batches") == "batches" and record.labels["implementation"] != COPY
    ]
    if not records:
        return ""
    ordered = sorted(records, key=lambda record: record["time"].value)
    first, last = ordered[0], ordered[-1]
    item = _ITEM_BYTES[results.configuration["dtype"]]
    limit = results.one("memory limit", traffic="1 read 1 write")["bandwidth"].value
    least = 2 * rows * results.configuration["batch_columns"] * item / limit
    return (
        f"With {rows} row{'s' if rows > 1 else ''} the least is paid by {first.labels['implementation']} "
        f"({numbers.with_unit(first['time'].value, 's')} a call), the most by {last.labels['implementation']} "
        f"({numbers.with_unit(last['time'].value, 's')}); at the copy limit the bytes of such a call would take "
        f"{numbers.with_unit(least, 's')}."
    )


def _draw_headline(results: Results) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.6)
    names = _implementations(results.select("forward", group="headline"))
    for index, which in enumerate(_PASSES):
        records = {r.labels["implementation"]: r for r in results.select(which, group="headline")}
        places = [place + (index - 0.5) * 0.38 for place in range(len(names))]
        heights = [100 * records[name]["fraction"].value if name in records else 0.0 for name in names]
        bars = axes.bar(
            places,
            heights,
            0.36,
            label=which,
            color=COLOURS[index],
            hatch=HATCHES[index],
            edgecolor="black",
            linewidth=0.6,
        )
        axes.bar_label(bars, [f"{height:.0f}" for height in heights], padding=2, fontsize=8)
    draw_limit(axes, 100, "copy limit")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("share of the measured copy limit, %")
    top = max(
        (
            100 * r["fraction"].value
            for w in _PASSES
            for r in results.select(w, group="headline")
            if "fraction" in r.values
        ),
        default=100.0,
    )
    axes.set_ylim(0, max(118, 1.12 * top))
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.set_title(f"RMSNorm at {_shape(results)}", fontsize=10)
    return figure


def _draw_widths(results: Results, which: str) -> MatplotlibFigure:
    figure, axes = new_figure(7.0, 3.8)
    records = _width_records(results, which)
    for name in _implementations(records):
        index = _ORDER.index(name)
        own = sorted((r for r in records if r.labels["implementation"] == name), key=lambda r: int(r.labels["columns"]))
        axes.plot(
            [int(record.labels["columns"]) for record in own],
            [100 * record["fraction"].value for record in own],
            label=name,
            color=COLOURS[index],
            marker=MARKERS[index],
            linestyle="-" if name in OWN else ":",
        )
    draw_limit(axes, 100, "copy limit")
    axes.set_xscale("log", base=2)
    widths = sorted({int(record.labels["columns"]) for record in records})
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    top = max((100 * record["fraction"].value for record in records if "fraction" in record.values), default=100.0)
    axes.set_ylim(0, max(115, 1.12 * top))
    axes.set_xlabel(f"columns N, at {numbers.count(results.configuration['elements'])} elements")
    axes.set_ylabel("share of the measured copy limit, %")
    axes.set_title(f"{which}, {results.configuration['dtype']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return figure


def figures(results: Results) -> list[Figure]:
    """Those that the records suffice for."""
    drawn = []
    if results.select("forward", group="headline"):
        drawn.append(
            Figure(
                "headline",
                f"Share of the measured copy limit at {_shape(results)}: 100 % is a copy of the same bytes.",
                partial(_draw_headline, results),
            )
        )
    drawn += [
        Figure(
            f"widths-{which}",
            f"The {which} pass over rows of different width, as many elements in all: share of the copy limit. "
            "Solid lines: this package; dotted: PyTorch.",
            partial(_draw_widths, results, which),
        )
        for which in _PASSES
        if results.select(which, group="widths")
    ]
    return drawn


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    names = _implementations(results.select("forward", group="headline"), copy=True)
    notes = {
        str(record.data["note"])
        for which in _PASSES
        for record in results.select(which)
        if record.data and record.data["note"]
    }
    limits = [
        (
            record.labels["traffic"],
            numbers.quantity(record["bandwidth"]),
            numbers.with_unit(record["tensor"].value, "B"),
        )
        for record in results.select("memory limit")
    ]
    return {
        "shape": _shape(results),
        "about": [(f"`{name}`" if name in OWN else name, ABOUT[name]) for name in names],
        "eager": EAGER,
        "limits_rows": limits,
        "headline": {
            which: _headline_table(results, which) for which in _PASSES if results.select(which, group="headline")
        },
        "widths": {which: _width_table(results, which) for which in _PASSES if results.select(which, group="widths")},
        "batches": _batch_table(results) if results.select("forward", group="batches") else "",
        "batch_sentence": _batch_sentence(results),
        "clock_notes": sorted(notes),
        "factor": f"{ARITHMETIC_FACTOR:g}",
        "item_bytes": _ITEM_BYTES[results.configuration["dtype"]],
        "on_gpu": results.environment.gpu is not None,
    }


REPORT = ReportSpec("rmsnorm_fused", context, figures, finding)

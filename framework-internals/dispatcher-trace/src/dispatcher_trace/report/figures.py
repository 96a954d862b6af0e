"""The figures: a trace as a path through the keys, and the training step on a time axis."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, new_figure
from benchkit.results import Record, Results

# Prefixes of keys in the dispatcher's order of priority. Other keys come below, in order of arrival.
_RANK = ("Autocast", "Autograd", "ADInplaceOrView", "BackendSelect")
_SHOWN = (("a @ b", "f32", "autocast"), ("a @ b", "bf16", "requires_grad"))


def figures(results: Results) -> list[Figure]:
    """A figure for each trace in :data:`_SHOWN`, and the timeline of the GPT step."""
    made = []
    for expression, dtype, mode in _SHOWN:
        for trace in results.select("trace", expression=expression, dtype=dtype, mode=mode):
            caption = (
                f"The trace of {expression} in {dtype} under {mode}: hops from left to right in order of arrival, keys"
                " from top to bottom by priority. A filled mark is a call, whose key set the dispatcher computed; an"
                " empty one is a redispatch. The number in it is the depth of nesting; the text names the operator"
                " called. Grey is the backward, with the node that ran."
            )
            made.append(Figure(f"trace_{mode}_{dtype}", caption, partial(draw_trace, trace)))
    caption = (
        "The training step of the GPT: when the kernels of each key ran. A kernel's bar includes the kernels that it"
        " called, so the bar of a composite or autograd kernel spans those below it. The backward is shaded. The times"
        " are of the traced run, and most of them are the tracer's own."
    )
    made += [Figure("timeline", caption, partial(draw_timeline, record)) for record in results.select("timeline")]
    return made


def draw_timeline(record: Record) -> MatplotlibFigure:
    """Keys over time: a bar for each hop."""
    data = record.data
    keys = _ordered(data["keys"])
    level = {key: len(keys) - 1 - index for index, key in enumerate(keys)}
    figure, axes = new_figure(width=9.0, height=1.2 + 0.5 * len(keys))
    bars: dict[str, list[tuple[float, float]]] = {key: [] for key in keys}
    for index, start, stop in zip(data["key"], data["start_us"], data["stop_us"], strict=True):
        bars[data["keys"][index]].append((start / 1e3, (stop - start) / 1e3))
    for key, spans in bars.items():
        # Thousands of bars: drawn as pixels, to keep the file small.
        axes.broken_barh(spans, (level[key] - 0.36, 0.72), color=COLOURS[0], linewidth=0.3, rasterized=True)
    during = [
        (start, stop)
        for start, stop, backward in zip(data["start_us"], data["stop_us"], data["backward"], strict=True)
        if backward
    ]
    if during:
        axes.axvspan(
            min(start for start, _ in during) / 1e3, max(stop for _, stop in during) / 1e3, color="#EEEEEE", zorder=0
        )
    axes.set_yticks(list(level.values()), list(level))
    axes.set_ylim(-0.6, len(keys) - 0.4)
    axes.set_xlabel("time from the start of the trace, ms")
    axes.set_ylabel("dispatch key")
    return figure


def draw_trace(trace: Record) -> MatplotlibFigure:
    """Hops in order of arrival over their keys."""
    rows: list[dict[str, Any]] = sorted(trace.data["hops"], key=lambda row: row["number"])
    keys = _ordered(list(dict.fromkeys(row["key"] for row in rows)))
    level = {key: len(keys) - 1 - index for index, key in enumerate(keys)}
    figure, axes = new_figure(width=max(7.0, 0.36 * len(rows) + 1.6), height=1.6 + 0.62 * len(keys))
    for first, last, node in _backward_spans(rows):
        axes.axvspan(first - 0.5, last + 0.5, color="#EEEEEE", zorder=0)
        axes.text((first + last) / 2, len(keys) - 0.08, node, ha="center", fontsize=8)
    xs, ys = [row["number"] for row in rows], [level[row["key"]] for row in rows]
    axes.plot(xs, ys, color="#888888", linewidth=1.0, drawstyle="steps-mid", zorder=1)
    for row, y in zip(rows, ys, strict=True):
        called = row["how"] == "call"
        face, ink = (COLOURS[0], "white") if called else ("white", "black")
        axes.scatter(row["number"], y, s=150, facecolor=face, edgecolor=COLOURS[0], linewidth=1.3, zorder=2)
        axes.text(row["number"], y, str(row["depth"]), ha="center", va="center", fontsize=7, color=ink, zorder=3)
        if called:
            name = row["operator"].removeprefix("aten::")
            axes.annotate(name, (row["number"], y), (0, 8), textcoords="offset points", rotation=38, fontsize=7.5)
    axes.set_yticks(list(level.values()), list(level))
    axes.set_ylim(-0.5, len(keys) + 0.2)
    axes.set_xlim(0.3, max(xs) + 1.6)
    axes.set_xticks([number for number in xs if number == 1 or number % 5 == 0])
    axes.set_xlabel("hop, in order of arrival")
    axes.set_ylabel("dispatch key")
    return figure


def _backward_spans(rows: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """First hop, last hop and name of each autograd node."""
    spans = []
    for node, stretch in groupby(rows, key=lambda row: row["node"]):
        numbers = [row["number"] for row in stretch]
        if node:
            spans.append((numbers[0], numbers[-1], node.partition("#")[0]))
    return spans


def _ordered(keys: list[str]) -> list[str]:
    def rank(key: str) -> int:
        return next((index for index, prefix in enumerate(_RANK) if key.startswith(prefix)), len(_RANK))

    return sorted(keys, key=rank)

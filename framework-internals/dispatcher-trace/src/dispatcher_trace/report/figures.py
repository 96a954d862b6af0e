"""The figures: the paths of all conditions side by side, and a trace hop by hop."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, hover, new_figure
from benchkit.results import Record, Results
from dispatcher_trace.measure.cases import FOUR_MODES

# Prefixes of keys in the dispatcher's order of priority (c10/core/DispatchKey.h). Other keys come below, in order of
# arrival.
_RANK = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchBatched",
    "Autocast",
    "Autograd",
    "ADInplaceOrView",
    "FuncTorchDynamicLayerBackMode",
    "BackendSelect",
)
_ON_A_MARK = "#FEFEFE"  # stays white on a dark page, where white becomes dark
_SHOWN = (("a @ b", "f32", "autocast"), ("a @ b", "bf16", "requires_grad"))


def figures(results: Results) -> list[Figure]:
    """The paths of the expressions that are traced under every condition, and each trace in :data:`_SHOWN`."""
    paths = [trace for trace in results.select("trace", dtype="f32") if trace.labels["expression"] in FOUR_MODES]
    made = []
    if paths:
        caption = (
            "The path from the call to the kernel, in f32. The number is the position in the path; the text is the "
            "operator. A key further left has a higher priority."
        )
        alt = "Dispatch keys on the path of each expression under each condition"
        made.append(Figure("paths", caption, partial(draw_paths, paths), alt))
    reading = (
        ": hops from left to right in order of arrival. A filled mark is a call, whose key set the dispatcher "
        "computed; an empty one is a redispatch. The number in it is the depth of nesting; the text names the operator "
        "called. Grey is the backward, with the node that ran."
    )
    for expression, dtype, mode in _SHOWN:
        for trace in results.select("trace", expression=expression, dtype=dtype, mode=mode):
            what = f"`{expression}` in {dtype} under {mode}"
            figure = partial(draw_trace, trace)
            made.append(Figure(f"trace_{mode}_{dtype}", f"{what}{reading}", figure, f"Every hop of {what}"))
            reading = ", drawn in the same way."
    return made


def draw_paths(traces: Sequence[Record]) -> MatplotlibFigure:
    """A row for each trace, a column for each key on a main path."""
    keys = _ordered(list(dict.fromkeys(key for trace in traces for _, key in trace.data["main_path"])))
    figure, axes = new_figure(width=9.0, height=1.0 + 0.42 * len(traces))
    for y, trace in enumerate(traces):
        hops = [(operator.removeprefix("aten::"), key) for operator, key in trace.data["main_path"]]
        # Several hops at one key stand beside one another, with their texts above and below in turn.
        at_its_key = [[other for other, (_, there) in enumerate(hops) if there == key] for _, key in hops]
        ranks = [others.index(number) for number, others in enumerate(at_its_key)]
        xs = [
            keys.index(key) + 0.44 * (rank - (len(others) - 1) / 2)
            for (_, key), rank, others in zip(hops, ranks, at_its_key, strict=True)
        ]
        for left, right in itertools.pairwise(xs):
            if left < right:  # a path that runs back is read by its numbers
                axes.plot([left, right], [y, y], color="#888888", linewidth=1.0, zorder=1)
        for number, (x, rank, (operator, key)) in enumerate(zip(xs, ranks, hops, strict=True), start=1):
            mark = axes.scatter(x, y, s=130, facecolor=COLOURS[0], zorder=2)
            hover(mark, f"{_name(trace)}, {number}: {operator} at {key}")
            axes.text(x, y, str(number), ha="center", va="center", fontsize=7, color=_ON_A_MARK, zorder=3)
            above = (0, -13) if rank % 2 else (0, 7)
            axes.annotate(operator, (x, y), above, textcoords="offset points", ha="center", fontsize=6.5)
    wrapped = [re.sub(r"(?<=[a-z])(?=Dynamic|Batched|FrontMode|BackMode)", "\n", key) for key in keys]
    axes.set_xticks(range(len(keys)), wrapped, fontsize=8)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlim(-0.5, len(keys) - 0.5)
    axes.set_yticks(range(len(traces)), [_name(trace) for trace in traces])
    axes.set_ylim(len(traces) - 0.5, -0.7)
    axes.set_xlabel("dispatch key, highest priority first →")
    axes.set_ylabel("expression and condition")
    return figure


def _name(trace: Record) -> str:
    return f"{trace.labels['expression']}, {trace.labels['mode']}"


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
        face, ink = (COLOURS[0], _ON_A_MARK) if called else ("white", "black")
        mark = axes.scatter(row["number"], y, s=150, facecolor=face, edgecolor=COLOURS[0], linewidth=1.3, zorder=2)
        hover(mark, f"hop {row['number']}, {row['how']}: {row['operator']} at {row['key']}")
        axes.text(row["number"], y, str(row["depth"]), ha="center", va="center", fontsize=7, color=ink, zorder=3)
        if called:
            name = row["operator"].removeprefix("aten::")
            axes.annotate(name, (row["number"], y), (0, 8), textcoords="offset points", rotation=38, fontsize=7.5)
    axes.set_yticks(list(level.values()), list(level))
    axes.set_ylim(-0.5, len(keys) + 0.2)
    axes.set_xlim(0.3, max(xs) + 1.6)
    axes.set_xticks([number for number in xs if number == 1 or number % 5 == 0])
    axes.set_xlabel("number of the hop, in order of arrival →")
    axes.set_ylabel("dispatch key, highest priority on top")
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

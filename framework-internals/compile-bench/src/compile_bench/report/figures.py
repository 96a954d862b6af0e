"""The report's figures, drawn from the records alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchkit import numbers
from benchkit.report import Figure
from benchkit.report.plotting import COLOURS, HATCHES, MARKERS, new_figure
from benchkit.results import Quantity, Record, Results
from compile_bench.measure.serialize import case_title, shape_passes
from compile_bench.report.queries import (
    PARTS,
    alone,
    cache_name,
    case_key,
    compiled_first,
    eager_first,
    models,
    same_case,
    value_of,
)
from compile_bench.report.sweep import autotuned
from compile_bench.targets.case import FIRST_STEPS, MODES

PART_COLOURS = (*COLOURS, "#FFFFFF", "#F0E442")
PART_HATCHES = (*HATCHES, "", "")


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records suffice for."""
    drawn = []
    if alone(results, results.select("verdict")):
        drawn += [
            Figure(
                "first_step",
                f"Where the first {FIRST_STEPS} steps of a fresh process go, from an imported torch on. Each instant "
                "is counted once, for the innermost phase.",
                lambda: draw_first_steps(results, alone(results, results.select("first steps"))),
            ),
            Figure(
                "break_even",
                "Time of a whole run, eager over compiled: above 1 compiling has paid for itself. The band is the 95 % "
                "interval of the speed-up.",
                lambda: draw_break_even(results),
            ),
        ]
    if results.select("steady"):
        drawn.append(
            Figure(
                "speedup",
                "Eager over compiled, a step after all compiling: median of the rounds' ratios with its 95 % interval, "
                "by mode. Left of the line at 1 compiling makes the step slower.",
                lambda: draw_speedup(results),
            )
        )
    if len(autotuned(results)) > 2:
        drawn.append(
            Figure(
                "autotuning",
                "A step of the same mode without autotuning over one with it, in turns in one process, with its 95 % "
                "interval; the seconds are what autotuning adds to the first steps.",
                lambda: draw_autotuning(results),
            )
        )
    starts = model_starts(results)
    if len(starts) > 1:
        drawn.append(
            Figure(
                "models",
                f"The same for every model: the first {FIRST_STEPS} steps with empty caches, mode default.",
                lambda: draw_first_steps(results, starts, cache=False),
            )
        )
    if results.select("shapes"):
        drawn.append(
            Figure(
                "shapes",
                "Time of all passes through the schedule together, compiling included, over the cheapest strategy's.",
                lambda: draw_shapes(results.select("shapes")[0]),
            )
        )
    return drawn


def model_starts(results: Results) -> list[Record]:
    """The cold starts in mode default of a sweep over models."""
    found = results.select("first steps", mode="default", cache="cold")
    order = models(results, found)
    return sorted(found, key=lambda record: order.index(case_key(record)[:2]))


def draw_first_steps(results: Results, records: Sequence[Record], *, cache: bool = True) -> MatplotlibFigure:
    """One bar a process, stacked by what happened in it."""
    figure, axes = new_figure(8.0, 1.6 + (0.42 if cache else 0.26) * len(records))
    labels = [_start_label(record) if cache else case_title(record) for record in records]
    left = np.zeros(len(records))
    for index, (key, name) in enumerate(PARTS):
        seconds = np.array([value_of(record, key) for record in records])
        if not seconds.any():
            continue
        axes.barh(
            labels,
            seconds,
            left=left,
            label=name,
            color=PART_COLOURS[index],
            hatch=PART_HATCHES[index],
            edgecolor="#444444" if key == "rest" else "white",
            linewidth=0.5,
            height=0.7,
        )
        left += seconds
    for row, total in enumerate(left):
        axes.annotate(
            numbers.with_unit(total, "s"), (total, row), xytext=(4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"seconds of the first {FIRST_STEPS} steps")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _start_label(record: Record) -> str:
    return f"{case_title(record, mode=record.labels['cache'] != 'none')}\n{cache_name(record)}"


def draw_speedup(results: Results) -> MatplotlibFigure:
    """A row for every model and kind, a mark for every mode."""
    records = results.select("steady")
    rows = models(results, records)
    modes = sorted({str(record.labels["mode"]) for record in records}, key=_mode_order)
    figure, axes = new_figure(8.0, 1.8 + 0.36 * len(rows))
    for index, mode in enumerate(modes):
        own = [record for record in records if record.labels["mode"] == mode]
        offset = (index - (len(modes) - 1) / 2) * 0.7 / len(modes)
        places = [rows.index(case_key(record)[:2]) + offset for record in own]
        _draw_marks(axes, [record["speedup"] for record in own], places, mode, index)
    _finish_rows(axes, rows, "times as fast as eager")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _draw_marks(axes: Axes, speedups: Sequence[Quantity], places: Sequence[float], label: str, index: int) -> None:
    """The marks and intervals of the series of that index, one at each place of the rows."""
    axes.errorbar(
        [speedup.value for speedup in speedups],
        places,
        xerr=np.array([_whiskers(speedup) for speedup in speedups]).T,
        label=label,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=5,
        linestyle="none",
        capsize=2,
        linewidth=1.2,
    )


def _finish_rows(axes: Axes, rows: Sequence[tuple[str, str]], label: str) -> None:
    """A row for every model and kind, from the top, and a line where nothing is gained."""
    axes.axvline(1.0, color="#444444", linewidth=1.0)
    axes.set_yticks(range(len(rows)), [f"{target} {kind}" for target, kind in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _times_axis(axes, "x")
    axes.set_xlabel(label)


def _mode_order(mode: str) -> tuple[int, str]:
    """PyTorch's modes in their order, then what else was compiled how."""
    return (MODES.index(mode), "") if mode in MODES else (len(MODES), mode)


def draw_autotuning(results: Results) -> MatplotlibFigure:
    """A row for every model and kind, a mark for every mode that autotunes, and the price beside it."""
    found = autotuned(results)
    rows = models(results, [each.verdict for each in found])
    modes = sorted({str(each.verdict.labels["mode"]) for each in found}, key=_mode_order)
    figure, axes = new_figure(8.0, 1.8 + 0.36 * len(rows))
    for index, mode in enumerate(modes):
        own = [each for each in found if each.verdict.labels["mode"] == mode]
        offset = (index - (len(modes) - 1) / 2) * 0.4
        places = [rows.index(case_key(each.verdict)[:2]) + offset for each in own]
        label = f"{mode} against {' or '.join(sorted({each.before for each in own}))}"
        _draw_marks(axes, [each.speed for each in own], places, label, index)
    for row, model in enumerate(rows):
        costs = [each.more for each in found if case_key(each.verdict)[:2] == model and each.more is not None]
        if costs:
            text = f"{'+' if max(costs) >= 0 else '−'}{numbers.with_unit(abs(max(costs)), 's')}"
            axes.annotate(
                text,
                (1.0, row),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
    _finish_rows(axes, rows, "times as fast as without autotuning")
    figure.legend(loc="outside lower center", ncols=1, fontsize=9, frameon=False)
    return figure


def draw_break_even(results: Results) -> MatplotlibFigure:
    """Total time of a run, eager over compiled, against its number of steps."""
    figure, axes = new_figure(7.0, 4.4)
    for index, verdict in enumerate(alone(results, results.select("verdict"))):
        steady = same_case(results, "steady", verdict)
        eager = eager_first(results, verdict)
        for record in compiled_first(results, verdict):
            steps = np.geomspace(FIRST_STEPS, 1e6, 200)
            colour = COLOURS[index % len(COLOURS)]
            speedup = steady["speedup"]
            ratio = partial(_run_ratio, steps, steady["eager"].value, eager["total"].value, record["total"].value)
            axes.plot(
                steps,
                ratio(speedup.value),
                color=colour,
                linestyle={"cold": "-", "warm": "--", "artifact": ":"}[str(record.labels["cache"])],
                marker=MARKERS[index % len(MARKERS)],
                markevery=(20 + 7 * index, 50),
                label=f"{case_title(verdict)}, {cache_name(record)}",
            )
            assert speedup.low is not None
            assert speedup.high is not None
            axes.fill_between(steps, ratio(speedup.low), ratio(speedup.high), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(1.0, color="#444444", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.05)
    _times_axis(axes, "y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.count(value)))
    axes.set_xlabel("steps of the run, in one process")
    axes.set_ylabel("time of the run, eager / compiled")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _run_ratio(steps: Any, eager_step: float, eager_start: float, compiled_start: float, speedup: float) -> Any:
    """Time of a run of so many steps, eager over compiled."""
    more = steps - FIRST_STEPS
    return (eager_start + more * eager_step) / (compiled_start + more * eager_step / speedup)


def draw_shapes(record: Record) -> MatplotlibFigure:
    """Total time of the strategies over the cheapest one's, against the number of passes."""
    figure, axes = new_figure(7.0, 4.4)
    passes = np.unique(np.geomspace(1, 1e5, 120).round())
    usable = [entry["strategy"] for entry in record.data["strategies"] if not entry["failed"]]
    totals = {strategy: shape_passes(record, strategy, passes) for strategy in usable}
    cheapest = np.min(list(totals.values()), axis=0)
    for index, (strategy, total) in enumerate(totals.items()):
        axes.plot(
            passes,
            total / cheapest,
            label=strategy,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=(3 * index, 20),
        )
    axes.set_xscale("log")
    _times_axis(axes, "y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.count(value)))
    axes.set_xlabel("passes through the schedule, in one process")
    axes.set_ylabel("total time / the cheapest strategy's")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _times_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis of ratios with readable ticks."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    steps: Sequence[float] = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    if high / low > 4:
        steps = (1.0, 2.0, 5.0)
    elif high / low < 1.5:
        steps = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 7.0, 7.5, 8.0, 8.5, 9.0, 9.5)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}×"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _whiskers(value: Quantity) -> tuple[float, float]:
    assert value.low is not None
    assert value.high is not None
    return value.value - value.low, value.high - value.value

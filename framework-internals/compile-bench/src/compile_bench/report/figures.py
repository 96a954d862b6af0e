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
from benchkit.results import Quantity, Results
from compile_bench.measure.records import ShapesRecord
from compile_bench.report.autotuning import Autotuned, autotuned, signed_seconds
from compile_bench.report.queries import (
    RUNNING,
    MeasuredCase,
    Model,
    NamedStart,
    compiled_alone,
    in_order,
    measured_cases,
    mode_index,
    models,
    named_starts,
    start_parts,
    title,
)
from compile_bench.targets.case import FIRST_STEPS

PART_COLOURS = (*COLOURS, "#FFFFFF", "#F0E442")
PART_HATCHES = (*HATCHES, "", "")

_FIRST_STEPS = (
    f"Where the first {FIRST_STEPS} steps of a fresh process go, from an imported torch on. Each instant is counted "
    "once, for the innermost phase."
)
_BREAK_EVEN = (
    "Time of a whole run, eager over compiled: above 1 compiling has paid for itself. The band is the 95 % interval of "
    "the speed-up."
)
_SPEEDUP = (
    "Eager over compiled, a step after all compiling: median of the rounds' ratios with its 95 % interval, by mode. "
    "Left of the line at 1 compiling makes the step slower."
)
_AUTOTUNING = (
    "A step of the same mode without autotuning over one with it, in alternation in one process, with its 95 % "
    "interval; the seconds are what autotuning adds to the first steps."
)
_MODELS = f"The same for every model: the first {FIRST_STEPS} steps with empty caches, mode default."
_SHAPES = "Time of all passes through the schedule together, compiling included, over the cheapest strategy's."


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records suffice for."""
    found: list[Figure] = []
    cases = measured_cases(results)
    if main := compiled_alone(cases):
        found.append(Figure("first_step", _FIRST_STEPS, partial(draw_first_steps, named_starts(main))))
        found.append(Figure("break_even", _BREAK_EVEN, partial(draw_break_even, main)))
    if cases:
        found.append(Figure("speedup", _SPEEDUP, partial(draw_speedup, cases, models(results, cases))))
    if len(tuned := autotuned(results, cases)) > 2:
        rows = models(results, [each.case for each in tuned])
        found.append(Figure("autotuning", _AUTOTUNING, partial(draw_autotuning, tuned, rows)))
    if len(starts := model_starts(results, cases)) > 1:
        found.append(Figure("models", _MODELS, partial(draw_first_steps, starts)))
    if studies := ShapesRecord.select(results):
        found.append(Figure("shapes", _SHAPES, partial(draw_shapes, studies[0])))
    return found


def model_starts(results: Results, cases: Sequence[MeasuredCase]) -> list[NamedStart]:
    """The starts with empty caches in mode default, one for each model."""
    found = [case for case in cases if case.mode == "default" and not case.record.tuned]
    return [NamedStart(title(case), "", case.cold) for case in in_order(results, found)]


def draw_first_steps(starts: Sequence[NamedStart]) -> MatplotlibFigure:
    """One bar for each process, divided into what happened in it."""
    two_lines = any(each.caches for each in starts)
    figure, axes = new_figure(8.0, 1.6 + (0.42 if two_lines else 0.26) * len(starts))
    labels = [f"{each.title}\n{each.caches}" if two_lines else each.title for each in starts]
    parts = [start_parts(each.start) for each in starts]
    left = np.zeros(len(starts))
    for index, name in enumerate(parts[0]):
        seconds = np.array([each[name] for each in parts])
        if not seconds.any():
            continue
        axes.barh(
            labels,
            seconds,
            left=left,
            label=name,
            color=PART_COLOURS[index],
            hatch=PART_HATCHES[index],
            edgecolor="#444444" if name == RUNNING else "white",
            linewidth=0.5,
            height=0.7,
        )
        left += seconds
    for row, total in enumerate(left):
        _annotate(axes, numbers.with_unit(total, "s"), (total, row), 4, "data")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"seconds of the first {FIRST_STEPS} steps")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _annotate(axes: Axes, text: str, place: tuple[float, float], right: int, coordinates: Any) -> None:
    """Write text ``right`` points to the right of a place."""
    axes.annotate(text, place, xycoords=coordinates, xytext=(right, 0), textcoords="offset points", va="center")


def draw_speedup(cases: Sequence[MeasuredCase], rows: Sequence[Model]) -> MatplotlibFigure:
    """A row for each model and kind, a mark for each mode."""
    modes = _modes(cases)
    figure, axes = new_figure(8.0, 1.8 + 0.36 * len(rows))
    for index, mode in enumerate(modes):
        own = [case for case in cases if case.mode == mode]
        offset = (index - (len(modes) - 1) / 2) * 0.7 / len(modes)
        places = [rows.index(case.model) + offset for case in own]
        _draw_marks(axes, [case.steady.speedup for case in own], places, mode, index)
    _finish_rows(axes, rows, "times as fast as eager")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _modes(cases: Sequence[MeasuredCase]) -> list[str]:
    """The modes of the cases: PyTorch's in their order, then those with a scope."""
    return sorted({case.mode for case in cases}, key=lambda mode: (mode_index(mode), mode))


def _draw_marks(axes: Axes, speedups: Sequence[Quantity], places: Sequence[float], label: str, index: int) -> None:
    """The marks and intervals of one series, one at each place of the rows."""
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


def _finish_rows(axes: Axes, rows: Sequence[Model], label: str) -> None:
    """A row for each model and kind, from the top, and a line at 1."""
    axes.axvline(1.0, color="#444444", linewidth=1.0)
    axes.set_yticks(range(len(rows)), [f"{target} {kind}" for target, kind in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _times_axis(axes, "x")
    axes.set_xlabel(label)


def draw_autotuning(found: Sequence[Autotuned], rows: Sequence[Model]) -> MatplotlibFigure:
    """A row for each model and kind, a mark for each mode that autotunes, and the compile cost that it adds."""
    modes = _modes([each.case for each in found])
    figure, axes = new_figure(8.0, 1.8 + 0.36 * len(rows))
    for index, mode in enumerate(modes):
        own = [each for each in found if each.case.mode == mode]
        offset = (index - (len(modes) - 1) / 2) * 0.4
        places = [rows.index(each.case.model) + offset for each in own]
        label = f"{mode} against {' or '.join(sorted({each.untuned_mode for each in own}))}"
        _draw_marks(axes, [each.speed for each in own], places, label, index)
    for row, model in enumerate(rows):
        costs = [each.extra_cost for each in found if each.case.model == model and each.extra_cost is not None]
        if costs:
            _annotate(axes, signed_seconds(max(costs)), (1.0, row), 6, ("axes fraction", "data"))
    _finish_rows(axes, rows, "times as fast as without autotuning")
    figure.legend(loc="outside lower center", ncols=1, fontsize=9, frameon=False)
    return figure


_LINES = {"empty caches": "-", "warm caches": "--", "cache artifacts": ":"}


def draw_break_even(cases: Sequence[MeasuredCase]) -> MatplotlibFigure:
    """Total time of a run, eager over compiled, against its number of steps."""
    figure, axes = new_figure(7.0, 4.4)
    steps = np.geomspace(FIRST_STEPS, 1e6, 200)
    for index, case in enumerate(cases):
        colour, speedup = COLOURS[index % len(COLOURS)], case.steady.speedup
        for caches, start in case.starts:
            ratio = partial(_run_ratio, steps, case.steady.eager.value, case.eager.total, start.total)
            axes.plot(
                steps,
                ratio(speedup.value),
                color=colour,
                linestyle=_LINES[caches],
                marker=MARKERS[index % len(MARKERS)],
                markevery=(20 + 7 * index, 50),
                label=f"{title(case)}, {caches}",
            )
            assert speedup.low is not None
            assert speedup.high is not None
            axes.fill_between(steps, ratio(speedup.low), ratio(speedup.high), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(1.0, color="#444444", linewidth=1.0)
    axes.set_ylim(bottom=0.05)
    _finish_curves(axes, "steps of the run, in one process", "time of the run, eager / compiled")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _run_ratio(steps: Any, eager_step: float, eager_start: float, compiled_start: float, speedup: float) -> Any:
    """Time of a run of these numbers of steps, eager over compiled."""
    more = steps - FIRST_STEPS
    return (eager_start + more * eager_step) / (compiled_start + more * eager_step / speedup)


def draw_shapes(record: ShapesRecord) -> MatplotlibFigure:
    """Total time of each strategy over that of the cheapest one, against the number of passes."""
    figure, axes = new_figure(7.0, 4.4)
    passes = np.unique(np.geomspace(1, 1e5, 120).round())
    totals = {
        name: each.first + (passes - 1) * each.later.value
        for name, each in record.strategies.items()
        if each.later is not None
    }
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
    _finish_curves(axes, "passes through the schedule, in one process", "total time / the cheapest strategy's")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _finish_curves(axes: Axes, xlabel: str, ylabel: str) -> None:
    """Logarithmic axes of a ratio against a count."""
    axes.set_xscale("log")
    _times_axis(axes, "y")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.count(value)))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)


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

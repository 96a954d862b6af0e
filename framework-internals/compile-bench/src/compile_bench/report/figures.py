"""The report's figures, drawn from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchkit import numbers
from benchkit.report import Figure
from benchkit.report.plotting import (
    COLOURS,
    HATCHES,
    MARKERS,
    hover,
    hover_points,
    label_ticks,
    new_figure,
    new_panels,
)
from benchkit.results import Quantity, Results
from compile_bench.measure.records import ShapesRecord
from compile_bench.measure.verdict import PLAN_STEPS
from compile_bench.report.autotuning import Autotuned, autotuned, signed_seconds
from compile_bench.report.queries import (
    CACHES,
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
    "Time of a whole run, eager over compiled: above 1 compiling has paid for itself. A line is drawn at both ends of "
    "the speed-up's 95 % interval, with a band between them."
)
_SPEEDUP = (
    "Mode default. Left: time of an eager step over that of a compiled one, after all compiling, with its 95 % "
    "interval. Right: length of a run from which on compiling it is worth its price."
)
_SPEEDUP_ALT = "Points by model: speed-up of the compiled step, and the number of steps after which compiling has paid"
_AUTOTUNING = (
    "A step of the same mode without autotuning over one with it, in alternation in one process, with its 95 % "
    "interval; the seconds are what autotuning adds to the first steps."
)
_MODELS = f"The first {FIRST_STEPS} steps of every model with empty caches, mode default, divided in the same way."
_SHAPES = "Time of all passes through the schedule together, compiling included, over the cheapest strategy's."


def figures(results: Results) -> Sequence[Figure]:
    """The figures that the records suffice for."""
    found: list[Figure] = []
    cases = measured_cases(results)

    def add(name: str, caption: str, alt: str, draw: Callable[[], MatplotlibFigure]) -> None:
        found.append(Figure(name, caption, draw, alt))

    default = [case for case in in_order(results, cases) if case.mode == "default"]
    if default:
        add("speedup", _SPEEDUP, _SPEEDUP_ALT, partial(draw_speedup, default))
    if main := compiled_alone(cases):
        add(
            "first_step",
            _FIRST_STEPS,
            "Stacked bars: seconds of the first steps by phase of compiling",
            partial(draw_first_steps, named_starts(main)),
        )
        add(
            "break_even",
            _BREAK_EVEN,
            "Lines: time of a run, eager over compiled, which rises with its length",
            partial(draw_break_even, main),
        )
    if len(tuned := autotuned(results, cases)) > 2:
        rows = models(results, [each.case for each in tuned])
        add(
            "autotuning",
            _AUTOTUNING,
            "Points with intervals: what autotuning gains, by model and mode",
            partial(draw_autotuning, tuned, rows),
        )
    if len(starts := model_starts(results, cases)) > 1:
        add(
            "models",
            _MODELS,
            "Stacked bars by model: seconds of the first steps by phase",
            partial(draw_first_steps, starts),
        )
    if studies := ShapesRecord.select(results):
        add(
            "shapes",
            _SHAPES,
            "Lines: total time of each strategy for changing shapes, over the cheapest",
            partial(draw_shapes, studies[0]),
        )
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
    left = [0.0] * len(starts)
    for index, name in enumerate(parts[0]):
        rows = [row for row, each in enumerate(parts) if each[name]]  # without bars that have an edge and no length
        if not rows:
            continue
        bars = axes.barh(
            rows,
            [parts[row][name] for row in rows],
            left=[left[row] for row in rows],
            label=name,
            color=PART_COLOURS[index],
            hatch=PART_HATCHES[index],
            edgecolor="#444444" if name == RUNNING else "white",
            linewidth=0.5,
            height=0.7,
        )
        for bar, row in zip(bars, rows, strict=True):
            hover(bar, f"{_named(starts[row])}: {name} {numbers.with_unit(parts[row][name], 's')}")
            left[row] += parts[row][name]
    for row, total in enumerate(left):
        _annotate(axes, numbers.with_unit(total, "s"), (total, row), 4, "data")
    axes.set_yticks(range(len(starts)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"first {FIRST_STEPS} steps of a process, seconds (lower is better)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _named(start: NamedStart) -> str:
    return ", ".join(filter(None, (start.title, start.caches)))


def _annotate(axes: Axes, text: str, place: tuple[float, float], right: int, coordinates: Any) -> None:
    """Write text ``right`` points to the right of a place."""
    axes.annotate(text, place, xycoords=coordinates, xytext=(right, 0), textcoords="offset points", va="center")


# How a verdict is drawn: its name in the legend, marker, colour, and whether the marker is filled.
_ADVICE = {
    "compile": ("faster", "o", COLOURS[0], True),
    "not compared": ("faster, results not compared", "D", COLOURS[0], False),
    "inconclusive": ("inconclusive", "o", COLOURS[0], False),
    "don't": ("slower, or results outside their bounds", "X", COLOURS[5], True),
}
_CACHE_MARKERS = {"empty caches": "o", "warm caches": "s", "cache artifacts": "^"}


def draw_speedup(cases: Sequence[MeasuredCase]) -> MatplotlibFigure:
    """A row for each case: its speed-up, and beside it the length of a run from which on compiling is worth it."""
    figure, ((gain, price),) = new_panels(1, 2, width=9.0, height=1.7 + 0.2 * len(cases), sharey="all", sharex=False)
    for row, case in enumerate(cases):
        _draw_gain(gain, case, row)
        _draw_price(price, case, row)
    gain.axvline(1.0, color="#444444", linewidth=1.0)
    gain.set_yticks(range(len(cases)), [title(case, mode=False) for case in cases])
    gain.set_ylim(len(cases) - 0.5, -0.5)
    _times_axis(gain, "x")
    gain.set_xlabel("eager step / compiled step (higher is better)")
    price.set_xscale("log")
    price.margins(x=0.12)
    low, high = price.get_xlim()
    label_ticks(price.xaxis, within_decades=(1.0,) if high / low > 30 else (1.0, 2.0, 3.0, 4.0, 5.0, 7.0))
    price.set_xlabel("break-even, steps (lower is better)")
    _legend_once(figure, (gain, price))
    return figure


def _draw_gain(axes: Axes, case: MeasuredCase, row: int) -> None:
    verdict = case.verdict
    by_speed_alone = verdict.advice == "compile" and verdict.not_compared
    name, marker, colour, filled = _ADVICE["not compared" if by_speed_alone else verdict.advice]
    speedup = case.steady.speedup
    axes.errorbar(
        [speedup.value],
        [row],
        xerr=np.array([_whiskers(speedup)]).T,
        label=name,
        color=colour,
        marker=marker,
        markerfacecolor=colour if filled else "white",
        markersize=6,
        linestyle="none",
        capsize=2,
        linewidth=1.2,
    )
    hover_points(axes, [speedup.value], [row], [f"{title(case, mode=False)}: {numbers.quantity(speedup)}"])


def _draw_price(axes: Axes, case: MeasuredCase, row: int) -> None:
    """A mark for each state of the caches; in words where compiling does not pay."""
    verdict = case.verdict
    if verdict.advice != "compile":
        text = "never" if verdict.advice == "don't" else "inconclusive"
        axes.annotate(text, (0.02, row), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        return
    for caches, even in zip(CACHES.values(), (verdict.cold, verdict.warm, verdict.mega), strict=True):
        if even is None or even.steps is None:
            continue
        axes.plot(
            [even.steps],
            [row],
            label=caches,
            color=COLOURS[2],
            marker=_CACHE_MARKERS[caches],
            markersize=6,
            linestyle="none",
        )
        hover_points(axes, [even.steps], [row], [f"{title(case, mode=False)}, {caches}: {even.text}"])


def _legend_once(figure: MatplotlibFigure, panels: Sequence[Axes]) -> None:
    """One legend for several panels, in which equal series have one entry."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        entries |= {name: handle for handle, name in zip(handles, names, strict=True) if name not in entries}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=3, fontsize=9, frameon=False)


def _modes(cases: Sequence[MeasuredCase]) -> list[str]:
    """The modes of the cases: PyTorch's in their order, then those with a scope."""
    return sorted({case.mode for case in cases}, key=lambda mode: (mode_index(mode), mode))


def draw_autotuning(found: Sequence[Autotuned], rows: Sequence[Model]) -> MatplotlibFigure:
    """A row for each model and kind, a mark for each mode that autotunes, and the compile cost that it adds."""
    modes = _modes([each.case for each in found])
    figure, axes = new_figure(8.0, 1.8 + 0.36 * len(rows))
    for index, mode in enumerate(modes):
        own = [each for each in found if each.case.mode == mode]
        offset = (index - (len(modes) - 1) / 2) * 0.4
        places = [rows.index(each.case.model) + offset for each in own]
        speeds = [each.speed for each in own]
        axes.errorbar(
            [speed.value for speed in speeds],
            places,
            xerr=np.array([_whiskers(speed) for speed in speeds]).T,
            label=f"{mode} against {' or '.join(sorted({each.untuned_mode for each in own}))}",
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linestyle="none",
            capsize=2,
            linewidth=1.2,
        )
        texts = [f"{title(each.case)}: {numbers.quantity(each.speed)} of {each.untuned_mode}" for each in own]
        hover_points(axes, [speed.value for speed in speeds], places, texts)
    for row, model in enumerate(rows):
        costs = [each.extra_cost for each in found if each.case.model == model and each.extra_cost is not None]
        if costs:
            _annotate(axes, signed_seconds(max(costs)), (1.0, row), 6, ("axes fraction", "data"))
    axes.axvline(1.0, color="#444444", linewidth=1.0)
    axes.set_yticks(range(len(rows)), [" ".join(model) for model in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _times_axis(axes, "x")
    axes.set_xlabel("step without autotuning / step with it (higher is better)")
    figure.legend(loc="outside lower center", ncols=1, fontsize=9, frameon=False)
    return figure


_LINES = {"empty caches": "-", "warm caches": "--", "cache artifacts": ":"}


def draw_break_even(cases: Sequence[MeasuredCase]) -> MatplotlibFigure:
    """Total time of a run, eager over compiled, against its number of steps."""
    figure, axes = new_figure(8.0, 4.6)
    steps = np.geomspace(30, 1e6, 300)
    for index, case in enumerate(cases):
        colour, speedup = COLOURS[index % len(COLOURS)], case.steady.speedup
        assert speedup.low is not None
        assert speedup.high is not None
        for caches, start in case.starts:
            ratio = partial(_run_ratio, eager_step=case.steady.eager.value, starts=(case.eager.total, start.total))
            name = f"{title(case)}, {caches}"
            low, high = ratio(steps, speedup=speedup.low), ratio(steps, speedup=speedup.high)
            axes.fill_between(
                steps, low, high, facecolor=_lighter(colour), edgecolor=colour, linestyle=_LINES[caches], label=name
            )
            shown = np.array(PLAN_STEPS)
            values = ratio(shown, speedup=speedup.value)
            axes.plot(shown, values, color=colour, marker=MARKERS[index % len(MARKERS)], linestyle="none")
            texts = [
                f"{name}, {numbers.count(count)} steps: {numbers.significant(value)}×"
                for count, value in zip(shown, values, strict=True)
            ]
            hover_points(axes, PLAN_STEPS, values.tolist(), texts)
    axes.axhline(1.0, color="#444444", linewidth=1.0)
    axes.set_ylim(bottom=0.0)
    axes.set_xscale("log")
    label_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}×"))
    axes.set_xlabel("steps of the run, in one process")
    axes.set_ylabel("time of the run, eager / compiled (higher is better)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _lighter(colour: str) -> tuple[float, ...]:
    """The colour for a band between two lines of ``colour``: opaque, so that bands that cross stay apart."""
    return tuple(1 - 0.45 * (1 - part) for part in to_rgb(colour))


def _run_ratio(steps: Any, *, eager_step: float, starts: tuple[float, float], speedup: float) -> Any:
    """Time of a run of these numbers of steps, eager over compiled; ``starts`` are the seconds of the first steps."""
    eager_start, compiled_start = starts
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
        at = [int(np.argmin(abs(passes - count))) for count in record.ranked_for]
        texts = [
            f"{strategy}, {numbers.count(passes[each])} passes: {numbers.with_unit(total[each], 's')}" for each in at
        ]
        hover_points(axes, passes[at].tolist(), (total / cheapest)[at].tolist(), texts)
        axes.plot(
            passes,
            total / cheapest,
            label=strategy,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=(3 * index, 20),
        )
    axes.set_xscale("log")
    label_ticks(axes.xaxis)
    _times_axis(axes, "y")
    axes.set_xlabel("passes through the schedule, in one process")
    axes.set_ylabel("total time / the cheapest's (lower is better)")
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _times_axis(axes: Axes, which: str) -> None:
    """A logarithmic axis of ratios with readable ticks."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    steps: Sequence[float] = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    if high / low > 10:
        steps = (1.0, 2.0, 5.0)
    elif high / low > 4:
        steps = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
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

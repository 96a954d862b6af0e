"""Draws every :class:`~benchkit.report.charts.Chart` in the style of :mod:`benchkit.report.plotting`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.ticker import NullFormatter, NullLocator

from benchkit import numbers
from benchkit.report.charts import Axis, Chart, Panel, Point, Series
from benchkit.report.plotting import (
    COLOURS,
    HATCHES,
    LIMIT_COLOUR,
    MARKERS,
    draw_limit,
    hover,
    hover_point,
    label_ticks,
    new_panels,
)
from benchkit.results import Quantity

# Blue and light blue are this repository's own implementations in every chart that has others too.
_OWN = (0, 4)
_OTHERS = (1, 2, 3, 5, 6, 7)
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # behind a text that lies on a line


@dataclass(frozen=True)
class _Look:
    colour: str
    marker: str
    hatch: str
    line: str


def draw_chart(chart: Chart) -> MatplotlibFigure:
    """Draw a chart.

    Args:
        chart: What to draw; not empty.
    """
    categories, looks = chart.categories(), _looks(chart)
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    width, height = chart.size or _size(chart, len(categories), rows, columns)
    lying = bool(categories)
    figure, grid = new_panels(
        rows,
        columns,
        width=width,
        height=height,
        sharey="all" if lying or chart.share == "all" else "col" if chart.share == "col" else False,
        sharex=True if not lying or chart.share == "all" else "col" if chart.share == "col" else False,
    )
    places = [axes for row in grid for axes in row]
    for axes in places[len(chart.panels) :]:
        axes.set_visible(False)
    canvases = [
        _Canvas(axes, chart, panel, categories, looks) for axes, panel in zip(places, chart.panels, strict=False)
    ]
    with rc_context({"text.parse_math": False}):  # texts that are made here do not have the style of new_panels
        for canvas in canvases:
            canvas.draw()
        for canvas in canvases:  # when all are drawn: axes that are shared end where the last of their panels ends
            canvas.scale()
        for axes in places[: len(chart.panels)]:
            outer = places.index(axes) + columns >= len(chart.panels)
            axes.tick_params(labelbottom=outer or (lying and chart.share != "all"))
        _name_axes(figure, places, chart, lying)
        _legend(figure, chart, places)
    return figure


def _looks(chart: Chart) -> dict[str, _Look]:
    """Colour, marker, hatch and line of each series, the same in every panel."""
    named = {series.name: series for panel in chart.panels for series in panel.series if not series.guide}
    any_own = any(series.own for series in named.values())
    own, others, free = iter(_OWN * len(named)), iter(_OTHERS * len(named)), iter(tuple(range(8)) * len(named))
    looks: dict[str, _Look] = {}
    for series in named.values():
        index = next(own if any_own and series.own else others if any_own else free)
        index = index if series.look is None else series.look % len(COLOURS)
        line = series.line if series.line is not None else ":" if any_own and not series.own else "-"
        used = sum(look.colour == COLOURS[index] for look in looks.values())  # a colour that returns has another marker
        mark = (index + used) % len(MARKERS)
        looks[series.name] = _Look(COLOURS[index], MARKERS[mark], HATCHES[mark], line)
    return looks


def _size(chart: Chart, categories: int, rows: int, columns: int) -> tuple[float, float]:
    if categories:
        beside = max(map(_bars_side_by_side, chart.panels)) if chart.kind == "bars" else 1
        return max(7.5, 2.0 + 3.6 * columns), 1.3 + rows * categories * (0.22 + 0.16 * beside)
    return (7.0 if columns == 1 else 1.0 + 3.0 * columns), (4.4 if rows == 1 else 3.2 * rows)


def _bars_side_by_side(panel: Panel) -> int:
    """The most bars that a category of a panel has."""
    places = Counter(point.place for series in panel.series for point in series.points)
    return max(places.values(), default=1)


@dataclass
class _Canvas:
    """One panel while it is drawn."""

    axes: Axes
    chart: Chart
    panel: Panel
    categories: Sequence[str]
    looks: dict[str, _Look]

    @property
    def lying(self) -> bool:
        """Whether values run to the right and categories down."""
        return bool(self.categories)

    def draw(self) -> None:
        kinds = {"bars": self._bars, "stacked": self._stacked, "points": self._marks, "lines": self._marks}
        kinds[self.chart.kind]()
        for limit in self.panel.limits:
            if self.lying:
                self.axes.axvline(  # behind the bars
                    limit.value * self._values.scale, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2, zorder=0.6
                )
                place = (limit.value * self._values.scale, 1.0)
                self._text(limit.label, place, (0, 4), ("data", "axes fraction"), color=LIMIT_COLOUR, ha="center")
            else:
                draw_limit(self.axes, limit.value * self._values.scale, limit.label, left=limit.left)

    @property
    def _values(self) -> Axis:
        return self.panel.values or self.chart.values

    def _scaled(self, value: float | Quantity) -> tuple[float, float, float]:
        """Value and ends of the interval, as they are drawn."""
        scale = self._values.scale
        if not isinstance(value, Quantity):
            return value * scale, value * scale, value * scale
        low, high = (value.value if end is None else end for end in (value.low, value.high))
        return value.value * scale, low * scale, high * scale

    def _hover(self, series: Series, point: Point) -> str:
        if point.hover:
            return point.hover
        value = point.value
        shown = numbers.quantity(value) if isinstance(value, Quantity) else numbers.with_unit(value, self._values.unit)
        place = point.place if isinstance(point.place, str) else numbers.significant(point.place, 6)
        return f"{', '.join(filter(None, (series.name, place)))}: {shown}"

    def _text(
        self,
        text: str,
        place: tuple[float, float],
        offset: tuple[float, float],
        coordinates: Any = "data",
        **style: Any,
    ) -> None:
        look: dict[str, Any] = {"va": "center", "fontsize": 8, "zorder": 6} | style
        note = self.axes.annotate(text, place, xycoords=coordinates, xytext=offset, textcoords="offset points", **look)
        note.set_bbox(_PAPER)

    def _offsets(self) -> Iterator[tuple[Series, float, float]]:
        """Each series with the offset and the thickness of its bars or points within a category.

        Where no category has two of them, as where series are colours of single bars, they need no offset.
        """
        places = [{point.place for point in series.points} for series in self.panel.series]
        alone = self.chart.kind == "bars" and sum(map(len, places)) == len(set().union(*places))
        count = 1 if alone else len(self.panel.series)
        thick = 0.78 / count
        for index, series in enumerate(self.panel.series):
            yield series, 0.0 if alone else (index - (count - 1) / 2) * thick, thick

    def _bars(self) -> None:
        differ = any(point.own for series in self.panel.series for point in series.points)
        for series, offset, thick in self._offsets():
            look = self.looks[series.name]
            for number, point in enumerate(series.points):
                value, low, high = self._scaled(point.value)
                place = self.categories.index(str(point.place)) + offset
                colour = (COLOURS[0] if point.own else "#BBBBBB") if differ else look.colour
                style: dict[str, Any] = {
                    "color": colour, "hatch": look.hatch, "edgecolor": "black", "linewidth": 0.6,
                    "label": series.name if number == 0 else None,
                }  # fmt: skip
                (bar,) = self.axes.barh(place, value, height=0.96 * thick, **style)
                hover(bar, self._hover(series, point))
                self._whisker(place, low, high)
                if point.text:
                    self._text(point.text, (high, place), (4, 0))

    def _whisker(self, place: float, low: float, high: float, colour: str = "black") -> None:
        if high > low:
            ends = ([low, high], [place, place]) if self.lying else ([place, place], [low, high])
            self.axes.plot(*ends, color=colour, linewidth=1.0, zorder=4)

    def _stacked(self) -> None:
        ends = dict.fromkeys(self.categories, 0.0)
        for series in self.panel.series:
            look, named = self.looks[series.name], False
            for point in series.points:
                value, _, _ = self._scaled(point.value)
                if not value:  # a bar without length would still have an edge
                    continue
                place, start = self.categories.index(str(point.place)), ends[str(point.place)]
                style: dict[str, Any] = {
                    "color": look.colour, "hatch": look.hatch, "edgecolor": "white", "linewidth": 0.5,
                    "label": None if named else series.name,
                }  # fmt: skip
                (bar,) = self.axes.barh(place, value, left=start, height=0.7, **style)
                hover(bar, self._hover(series, point))
                ends[str(point.place)], named = start + value, True
                if point.text:
                    self._text(point.text, (start + value, place), (4, 0))

    def _marks(self) -> None:
        shared = [str(place) for series in self.panel.series for place in {point.place for point in series.points}]
        for series, offset, _ in self._offsets():
            beside = offset if any(shared.count(str(point.place)) > 1 for point in series.points) else 0.0
            self._series(series, beside if self.categories else 0.0)

    def _series(self, series: Series, offset: float) -> None:
        look = _Look(LIMIT_COLOUR, "", "", series.line or "--") if series.guide else self.looks[series.name]
        joined = "" if self.chart.kind == "points" and series.line is None and not series.guide else look.line
        values = [self._scaled(point.value) for point in series.points]
        places = [
            self.categories.index(point.place) + offset
            if isinstance(point.place, str)
            else point.place * self.chart.places.scale
            for point in series.points
        ]
        middles = [middle for middle, _, _ in values]
        along = (middles, places) if self.lying else (places, middles)
        self.axes.plot(
            *along,
            label=series.name,
            color=look.colour,
            linestyle="-" if joined == "step" else joined or "none",
            drawstyle="steps-mid" if joined == "step" else "default",
            linewidth=1.4,
            marker=look.marker,
            markevery=[index for index, point in enumerate(series.points) if point.mark],
            markersize=5,
            markerfacecolor="white" if series.hollow else look.colour,
        )
        if series.band:
            lows, highs = [low for _, low, _ in values], [high for _, _, high in values]
            light = tuple(1 - 0.45 * (1 - part) for part in to_rgb(look.colour))  # opaque: bands that cross stay apart
            self.axes.fill_between(places, lows, highs, facecolor=light, edgecolor=look.colour, zorder=1)
        for point, place, (middle, low, high) in zip(series.points, places, values, strict=True):
            if not point.mark or series.guide:
                continue
            at = (middle, place) if self.lying else (place, middle)
            hover_point(self.axes, at, self._hover(series, point))
            if not series.band:
                self._whisker(place, low, high, look.colour)
            if point.text:
                self._text(point.text, at, (6, 0))

    def scale(self) -> None:
        """Set scales, ends, ticks and titles of the axes."""
        axes, values = self.axes, self._values
        across, along = (axes.xaxis, axes.yaxis) if self.lying else (axes.yaxis, axes.xaxis)
        if self.chart.kind in ("bars", "stacked"):
            axes.margins(x=0.14)
        _scale(axes, "x" if self.lying else "y", values, from_zero=self.chart.kind in ("bars", "stacked"))
        if self.categories:
            along.set_ticks(range(len(self.categories)), list(self.categories))
            axes.set_ylim(len(self.categories) - 0.5, -0.5)
            axes.grid(visible=False, axis="y")
        else:
            _scale(axes, "x", self.chart.places, from_zero=False)
        for place, note in self.panel.notes.items():
            self._text(note, (1.0, self.categories.index(place)), (6, 0), ("axes fraction", "data"))
        if self.panel.values is not None:
            across.set_label_text(values.label)
        axes.set_title(self.panel.title, fontsize=10)


def _scale(axes: Axes, which: str, axis: Axis, *, from_zero: bool) -> None:
    """Set scale, ends and ticks of an axis."""
    here = axes.xaxis if which == "x" else axes.yaxis
    set_scale, get_ends, set_ends = (
        (axes.set_xscale, axes.get_xlim, axes.set_xlim)
        if which == "x"
        else (axes.set_yscale, axes.get_ylim, axes.set_ylim)
    )
    if axis.log:
        set_scale("log", base=axis.log)
    low, high = get_ends()
    low = 0.0 if from_zero and axis.low is None and not axis.log and low > 0 else low
    set_ends(low if axis.low is None else axis.low * axis.scale, high if axis.high is None else axis.high * axis.scale)
    if axis.ticks:
        labels = list(axis.ticks.values()) if isinstance(axis.ticks, dict) else [f"{tick:,.10g}" for tick in axis.ticks]
        here.set_ticks([tick * axis.scale for tick in axis.ticks], labels)
        here.set_minor_locator(NullLocator())
        here.set_minor_formatter(NullFormatter())
    else:
        label_ticks(here, _within_decades(*get_ends()) if axis.log else ())


def _within_decades(low: float, high: float) -> Sequence[float]:
    """The multiples that are labelled in each decade: the more, the narrower the range."""
    if low <= 0 or high / low > 100:
        return (1.0,)
    if high / low > 10:
        return (1.0, 2.0, 5.0)
    if high / low > 1.5:
        return (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    return (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45, 7.0, 7.5, 8.0, 8.5, 9.0, 9.5)


def _name_axes(figure: MatplotlibFigure, places: Sequence[Axes], chart: Chart, lying: bool) -> None:
    across = "" if any(panel.values for panel in chart.panels) else chart.values.label
    x, y = (across, chart.places.label) if lying else (chart.places.label, across)
    if len(chart.panels) == 1:
        places[0].set_xlabel(places[0].get_xlabel() or x)
        places[0].set_ylabel(places[0].get_ylabel() or y)
        return
    figure.supxlabel(x, fontsize=10)
    figure.supylabel(y, fontsize=10)


def _legend(figure: MatplotlibFigure, chart: Chart, places: Sequence[Axes]) -> None:
    """One legend below, in which equal series of several panels have one entry."""
    names = {series.name for panel in chart.panels for series in panel.series}
    entries: dict[str, Any] = {}
    for axes in places:
        artists: list[Any] = [*axes.lines, *axes.containers]
        for artist in artists:  # get_legend_handles_labels leaves out names that begin with _
            if (name := artist.get_label()) in names:
                entries.setdefault(name, artist)
    if not chart.legend or len(entries) < 2:
        return
    where = "outside lower center" if len(chart.panels) == 1 else "outside upper center"  # clear of the common label
    for columns in range(chart.legend, 0, -1):
        legend = figure.legend([*entries.values()], [*entries], loc=where, ncols=columns, fontsize=9, frameon=False)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()

"""Charts as data: what is drawn, without how. :mod:`benchkit.report.drawing` draws them all in one style."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from benchkit.results import Quantity

Row = TypeVar("Row")


# Whose step a bar shows, and its look: the same four colours in every figure that compares whole steps.
WHOSE = {"PyTorch, eager": 7, "torch.compile": 1, "this repository's kernels": 0, "JAX": 2}


@dataclass(frozen=True)
class Point:
    """A bar, a part of a stacked bar, or a point of a line.

    Attributes:
        place: Its category, or its number along the other axis.
        value: The value in base units; a quantity's interval is drawn as whiskers.
        text: A short text beside it.
        hover: What a pointer on it shows; by default series, place and value.
        own: Whether it belongs to this repository, in a series of bars that differ in that.
        mark: Whether it has a marker and a hover text, on a line.
    """

    place: str | float
    value: float | Quantity
    text: str = ""
    hover: str = ""
    own: bool = False
    mark: bool = True


@dataclass(frozen=True)
class Series:
    """Points that belong together and have one entry in the legend.

    Attributes:
        name: Its name in the legend, in plain text.
        points: The points.
        own: Whether it is an implementation of this repository: those have the accent colours in every chart.
        look: Number of its colour and marker, for the same look in several charts; by default its place among the
            series.
        line: How the points are joined; by default solid lines, dotted beside own ones, and none in a chart of points.
        hollow: Whether its markers are empty.
        guide: Whether it is a limit and no implementation: grey and without markers.
        band: Whether the intervals of its values are drawn as a band along the line.
    """

    name: str
    points: Sequence[Point]
    own: bool = False
    look: int | None = None
    line: Literal["", "-", "--", ":", "step"] | None = None
    hollow: bool = False
    guide: bool = False
    band: bool = False


def series_by(
    rows: Iterable[Row],
    name: Callable[[Row], str],
    point: Callable[[Row], Point],
    *,
    own: Container[str] = (),
    guides: Container[str] = (),
) -> list[Series]:
    """A series for each name, in the order in which they come.

    Args:
        rows: Records or other objects, one for each point.
        name: Name of the series that a row belongs to.
        point: Makes its point.
        own: Names of this repository's implementations.
        guides: Names of limits.
    """
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(name(row), []).append(point(row))
    return [Series(title, placed, own=title in own, guide=title in guides) for title, placed in points.items()]


@dataclass(frozen=True)
class Limit:
    """A dashed line at a value.

    Attributes:
        value: The value in base units.
        label: What it is.
        left: Whether the label is at the left end and the line over the data, for data that reach it.
    """

    value: float
    label: str = ""
    left: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis of every panel.

    Attributes:
        label: What is shown, its unit, and which direction is better.
        unit: Unit of values that are plain numbers, for the hover texts; see :func:`benchkit.numbers.with_unit`.
        scale: What values are multiplied by for the numbers along the axis: 1e6 for microseconds.
        log: Base of a logarithmic axis; 0 for a linear one.
        ticks: The numbers that are labelled, and how; by default round numbers.
        low: Lower end; by default from the data, and 0 for bars.
        high: Upper end; by default from the data.
    """

    label: str = ""
    unit: str = ""
    scale: float = 1.0
    log: int = 0
    ticks: Mapping[float, str] | Sequence[float] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """One of the small multiples of a chart.

    Attributes:
        series: What is drawn.
        title: What distinguishes the panel.
        limits: Dashed lines.
        notes: A text at the right end of the row of a category.
        values: The axis of values, where the panels differ in it.
    """

    series: Sequence[Series]
    title: str = ""
    limits: Sequence[Limit] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    values: Axis | None = None


@dataclass(frozen=True)
class Chart:
    """A figure of a report; drawn only when it is written.

    Attributes:
        name: Name of the file without suffix.
        kind: Bars side by side, ``stacked`` bars, single ``points``, or ``lines``.
        panels: Small multiples; a single one for most charts.
        values: The axis of values.
        places: The other axis: of the numbers, where places are numbers.
        caption: How to read the figure; stands below it.
        alt: What the figure shows, for a reader who does not see it; the alternative text.
        columns: Panels in a row.
        legend: Entries of the legend in a row; 0 for none.
        share: Whether all panels share the axis of values, or those of a column (``col``), or none.
        size: Width and height in inches; by default from what is drawn.
        order: The categories in their order; by default as they come.
    """

    name: str
    kind: Literal["bars", "stacked", "points", "lines"]
    panels: Sequence[Panel]
    values: Axis
    caption: str
    alt: str
    places: Axis = field(default_factory=Axis)
    columns: int = 3
    legend: int = 4
    share: Literal["all", "col", "none"] = "all"
    size: tuple[float, float] | None = None
    order: Sequence[str] = ()

    def __bool__(self) -> bool:
        return any(not series.guide and series.points for panel in self.panels for series in panel.series)

    def categories(self) -> list[str]:
        """The names along the other axis, in order; empty where places are numbers."""
        points = [point for panel in self.panels for series in panel.series for point in series.points]
        named = dict.fromkeys(point.place for point in points if isinstance(point.place, str))
        return [
            *(place for place in self.order if place in named),
            *(place for place in named if place not in self.order),
        ]

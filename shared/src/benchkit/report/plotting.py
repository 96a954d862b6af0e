"""One style for every figure: labelled axes with units, readable in greyscale and by colour-blind readers."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchkit.results import write_bytes_atomically

# The palette of Okabe and Ito (2008) for colour-blind readers, ordered so that neighbours differ in lightness. Each
# colour has a marker and a hatch, so that no figure depends on colour.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999999", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo", "---", "||")
LIMIT_COLOUR = "#444444"

_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure on every machine
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",  # an SVG without a background is unreadable on a dark page; see _DARK
    "svg.hashsalt": "benchkit",  # equal data give equal files
    "svg.fonttype": "path",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "hatch.linewidth": 0.6,
}


def new_figure(width: float = 7.0, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure in this style, of a size in inches, without global state."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.add_subplot()


def new_panels(
    rows: int,
    columns: int,
    *,
    width: float,
    height: float,
    sharey: Literal["all", "col"] | bool,
    sharex: Literal["all", "col"] | bool = True,
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure of several panels, of a size in inches.

    All panels share an axis (True or ``"all"``), or those of a column do (``"col"``), or none does (False).
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
        return figure, [list(row) for row in grid]


def save(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG without a date inside. Missing folders are created.

    Raises:
        UserError: If the file cannot be written; an existing file then stays as it is.
    """
    drawn = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.set_dpi(150)
        FigureCanvasSVG(figure).print_svg(drawn, metadata={"Date": None})  # savefig() would draw everything twice
    content = _HOVER.sub(
        lambda artist: f"<g><title>{escape(unquote(artist[1].decode()))}</title>".encode(), drawn.getvalue()
    )
    content = content.replace(b"<defs>", f"<style>{_dark_style()}</style>\n <defs>".encode(), 1)
    write_bytes_atomically(path, _NOT_XML.sub("\ufffd".encode(), content))


# Control characters of a name, which stand in titles and comments: no XML may contain them, not even as an escape.
_NOT_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")

# matplotlib writes an artist's id into the SVG, but has no place for a title: the id carries it there.
_HOVER = re.compile(rb'<g id="hover:([^"]*)">')


# What becomes of the greys of a figure where the reader's system is dark; the colours stay.
DARK = "@media (prefers-color-scheme: dark)"
_DARK = {
    "#ffffff": "#15181b",
    "#eeeeee": "#22272d",
    "#dddddd": "#363d44",
    "#bbbbbb": "#7a848e",
    "#444444": "#a3adb6",
    "#000000": "#e6e8ea",
}


def _dark_style() -> str:
    swaps = "".join(
        f'[style*="{what}: {light}"], [{what}="{light}"] {{ {what}: {dark} !important }} '
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    return f"{DARK} {{ svg {{ fill: {_DARK['#000000']} }} {swaps}}}"


def hover(artist: Artist, text: str) -> None:
    """Show a text beside the pointer when it rests on a bar or another artist, in an SVG.

    Args:
        artist: The artist, drawn as one group.
        text: For example the bar's name and value with its unit.
    """
    artist.set_gid(f"hover:{quote(text)}")


def hover_point(axes: Axes, place: tuple[float, float], text: str) -> None:
    """Show a text beside the pointer when it rests on a point of a line, in an SVG."""
    # Invisible, but the pointer finds it: larger than the line's marker.
    hover(axes.scatter(*place, s=120, alpha=0, linewidths=0, zorder=10), text)


def label_ticks(axis: Axis, within_decades: Sequence[float] = ()) -> None:
    """Label ticks with plain numbers and thousands separators: 10,000 and not 10000 or 10⁴.

    Args:
        axis: An axis of a figure.
        within_decades: On a logarithmic axis, the multiples to label in each decade, such as 1, 2 and 5.
    """
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if within_decades:
        axis.set_major_locator(LogLocator(subs=within_decades))
        axis.set_minor_formatter(NullFormatter())


def draw_limit(axes: Axes, value: float, label: str = "", *, left: bool = False) -> None:
    """Draw a dashed horizontal line at a limit, with a label above one of its ends.

    Args:
        axes: Axes of a figure.
        value: The limit, in the axis's unit.
        label: What the limit is.
        left: Whether the label is at the left end and the line over the data, for data that reach the limit.
    """
    axes.axhline(value, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2, zorder=5 if left else None)
    axes.annotate(
        label,
        xy=(0.0 if left else 1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(2 if left else -2, 3),
        textcoords="offset points",
        ha="left" if left else "right",
        va="bottom",
        fontsize=9,
        color=LIMIT_COLOUR,
    )

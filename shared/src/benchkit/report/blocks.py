"""What a report is made of: a lens declares it once, and every face of the report is made from the declaration.

A block is Markdown text, a :class:`~benchkit.report.tables.Table`, :class:`~benchkit.report.charts.Chart`,
:class:`~benchkit.report.targets.Targets`, or a :class:`Section` of blocks. A table without rows and a chart without
points leave nothing behind, and a section whose tables and charts are all empty vanishes with its heading and texts: a
lens lists its sections whether or not they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from benchkit.report.charts import Chart
from benchkit.report.tables import Table
from benchkit.report.targets import Targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure


@dataclass(frozen=True)
class Figure:
    """A figure with a drawing of its own, for what no :class:`~benchkit.report.charts.Chart` can show.

    Attributes:
        name: Name of the file without suffix.
        caption: How to read the figure; stands below it.
        draw: Draws the figure from the results alone.
        alt: What the figure shows, for a reader who does not see it; the alternative text.
    """

    name: str
    caption: str
    draw: Callable[[], MatplotlibFigure]
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading; a section within a section has a smaller heading.

    Attributes:
        title: The heading, as Markdown; empty for none.
        blocks: What stands below it.
        fold: What a reader sees of the section before he opens it by a click; empty for a section that is open.
    """

    title: str
    blocks: Sequence[Block] = ()
    fold: str = ""

    def __bool__(self) -> bool:
        """Whether there is anything to show: a table, chart or section that is not empty, or nothing but texts."""
        measured = [block for block in self.blocks if not isinstance(block, str)]
        return any(measured) if measured else any(self.blocks)


Block: TypeAlias = "str | Table[Any] | Chart | Targets | Figure | Section"


@dataclass(frozen=True)
class Report:
    """A report, whose faces :mod:`benchkit.report.rendering` makes in one order.

    Attributes:
        title: Its heading.
        headline: What the run found, in one plain sentence of at most 30 words and three figures. The report and its
            line in the index begin with it.
        use: When to use what was measured: the rest of a sentence that begins "Use this when", from the records.
        avoid: When not to: the rest of a sentence that begins "Not when".
        worst: The worst of all ratios of the report, and where it was found, as a sentence.
        answer: The figure and table of the first screen.
        findings: What follows from it, one section after another.
        details: Further sections, which are folded.
        asked: The question, and what was compared.
        method: How it was measured.
        limits: What the report does not show, a sentence or two each; empty ones are left out.
    """

    title: str
    headline: str
    answer: Sequence[Block]
    findings: Sequence[Section]
    asked: Sequence[Block]
    method: Sequence[Block]
    limits: Sequence[str]
    details: Sequence[Section] = field(default=())
    use: str = ""
    avoid: str = ""
    worst: str = ""


def bullets(lines: Iterable[str]) -> str:
    """A list of these lines without the empty ones, as Markdown; empty without lines."""
    return "\n".join(f"- {line}" for line in lines if line)

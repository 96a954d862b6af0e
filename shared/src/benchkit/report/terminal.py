"""The blocks of a report on a terminal: what a command prints is what its report says."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchkit.report.blocks import Block, Figure, Section
from benchkit.report.charts import Chart
from benchkit.report.rendering import block_text
from benchkit.report.tables import Table, cell_text
from benchkit.report.targets import Targets

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(*blocks: Block) -> None:
    """Print blocks: with rich on a terminal, as Markdown where the output goes to a file or another program."""
    if not sys.stdout.isatty():
        print("\n\n".join(text for text in map(block_text, blocks) if text))
        return
    from rich.console import Console

    console = Console()
    for block in blocks:
        if block:
            console.print(to_terminal(block))


def to_terminal(block: Block) -> RenderableType:
    """A block as rich shows it; figures are left out."""
    from rich.console import Group
    from rich.markdown import Markdown

    if isinstance(block, Table):
        return Group(_table(block), *([Markdown(block.notes())] if block.notes() else []))
    if isinstance(block, Targets):
        return Group(_table(block.table()), *(Markdown(f"- {reason}") for reason in block.reasons()))
    if isinstance(block, Section):
        return Group(*_titles(block), *(to_terminal(part) for part in block.blocks if part))
    if isinstance(block, Chart | Figure):
        return Group()
    return Markdown(block)


def _titles(section: Section) -> Iterable[Any]:
    from rich.markdown import Markdown

    return [Markdown(f"**{title}**") for title in (section.title or section.fold,) if title]


def _table(table: Table[Any]) -> RenderableType:
    from rich.table import Table as RichTable
    from rich.text import Text

    columns, rows = table.filled()
    shown = RichTable(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        aligned_left = index == 0 or column.left
        shown.add_column(Text(_plain(column.header)), justify="left" if aligned_left else "right", overflow="fold")
    for cells in rows:
        shown.add_row(*(Text(_plain(cell_text(cell))) for cell in cells))
    return shown


def _plain(text: str) -> str:
    """A cell without the marks of Markdown for code and bold."""
    return text.replace("`", "").replace("**", "").replace("<br>", "\n")

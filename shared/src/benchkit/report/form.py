"""The form of a report, checked on its declaration: a short headline, advice, tables that can be read.

A report answers in a minute, whatever was measured. Each fault is a sentence for the author of the lens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from benchkit.report.blocks import Block, Report, Section
from benchkit.report.tables import Table, above_whole, cell_text
from benchkit.report.targets import Targets

HEADLINE_WORDS, HEADLINE_FIGURES = 30, 3
COLUMNS, FOLDED_COLUMNS, CELL_LETTERS = 9, 12, 280

_SENTENCE_END = re.compile(r"[.!?] (?=[A-Z`])")
_CODE = re.compile(r"`[^`]*`")
# A number that is a figure and no part of a name (bfloat16, H200) or of a shape (4096 × 1024).
_FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])")
_SHAPE = re.compile(r"\d[\d,]*(?: × \d[\d,]*)+")


def faults(report: Report) -> Iterator[str]:
    """Say what the report of a run that measured something lacks of its form."""
    yield from headline_faults(report.headline)
    if not report.use or not report.avoid:
        yield "it does not say when to use what it measured, and when not"
    for blocks, folded in (
        (report.answer, False),
        (report.findings, False),
        (report.asked, True),
        (report.method, True),
        (report.details, True),
    ):
        for table, hidden in _tables(blocks, folded):
            yield from table_faults(table, folded=hidden)


def headline_faults(headline: str) -> Iterator[str]:
    """Say why a sentence is no headline: too long, too many figures, or more than one sentence."""
    words, figures = len(headline.split()), len(figures_of(headline))
    if not headline or words > HEADLINE_WORDS:
        yield f"the headline has {words} words, not 1 to {HEADLINE_WORDS}: {headline}"
    if figures > HEADLINE_FIGURES:
        yield f"the headline has {figures} figures, more than {HEADLINE_FIGURES}: {headline}"
    if _SENTENCE_END.search(headline):
        yield f"the headline is more than one sentence: {headline}"


def figures_of(text: str) -> list[str]:
    """The figures of a sentence. Numbers in code, in names and in shapes are none."""
    return _FIGURE.findall(_SHAPE.sub("", _CODE.sub("", text)))


def table_faults(table: Table[Any], *, folded: bool) -> Iterator[str]:
    """Say why a table is hard to read, or shows a share above 100 % without its reason."""
    columns, rows = table.filled()
    name = " | ".join(column.header for column in columns[:3])
    most = FOLDED_COLUMNS if folded else COLUMNS
    if len(columns) > most:
        yield f"the table {name} has {len(columns)} columns, more than {most}"
    texts = [cell_text(cell) for row in rows for cell in row]
    if long := [line for text in texts for line in text.split("<br>") if len(line) > CELL_LETTERS]:
        yield f"the table {name} has a cell of {len(long[0])} letters, more than {CELL_LETTERS}: {long[0][:60]}…"
    if not table.beyond and (above := [text for text in texts if above_whole(text)]):
        yield f"the table {name} shows {above[0]}, a share above 100 %, and does not say why"


def _tables(blocks: Iterable[Block], folded: bool) -> Iterator[tuple[Table[Any], bool]]:
    for block in blocks:
        if isinstance(block, Section) and block:
            yield from _tables(block.blocks, folded or bool(block.fold))
        elif isinstance(block, Table) and block:
            yield block, folded
        elif isinstance(block, Targets) and block:
            yield block.table(), folded

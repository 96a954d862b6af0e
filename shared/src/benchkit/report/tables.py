"""Tables: what each column shows of a row. How it is written stands in one place, :func:`cell_text`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from benchkit import markdown, numbers
from benchkit.results import Quantity, Record

Row = TypeVar("Row")
ABSENT = "–"


@dataclass(frozen=True)
class Code:
    """A cell that shows a name, path or source as it is."""

    text: object


@dataclass(frozen=True)
class Share:
    """A cell with a fraction, shown in percent with so many decimals."""

    fraction: float
    digits: int = 1


# What a cell may be. A text is Markdown; a Quantity is shown with its interval and unit, an int as a count, a float
# with three digits, a bool as yes or no; None is absent and shown as a dash.
Cell = str | int | float | bool | Quantity | Code | Share | None


def cell_text(cell: Cell) -> str:
    """A cell as Markdown."""
    if cell is None:
        return ABSENT
    if isinstance(cell, Quantity):
        return numbers.quantity(cell)
    if isinstance(cell, Code):
        return markdown.code(cell.text)
    if isinstance(cell, Share):
        return numbers.percent(cell.fraction, cell.digits)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return numbers.count(cell)
    return numbers.significant(cell) if isinstance(cell, float) else cell


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table.

    Attributes:
        header: Its title, as Markdown.
        value: Computes a row's cell, or names a figure, label or datum of a :class:`~benchkit.results.Record` or an
            attribute of another row; what the row lacks is absent.
        left: Whether the column holds text and is aligned left. The first one always is.
        optional: Whether the column is left out where all its cells are absent.
        keep: Whether it stays a column where all its cells are equal. Others become a sentence below the table.
    """

    header: str
    value: Callable[[Row], Cell] | str
    left: bool = False
    optional: bool = False
    keep: bool = False

    def cell(self, row: Row) -> Cell:
        """The row's cell."""
        return self.value(row) if callable(self.value) else _named(row, self.value)


def _named(row: Any, name: str) -> Cell:
    if not isinstance(row, Record):
        cell: Cell = getattr(row, name)
        return cell
    if name in row.values:
        return row.values[name]
    label = row.labels.get(name)
    if label is None and isinstance(row.data, Mapping):
        label = row.data.get(name)
    return str(label) if type(label) is int else label  # a label names: 32768 and not 32,768


# From so many rows on, a column whose cells are all equal says less than a sentence does.
_ROWS_WITH_CONSTANTS = 3
_SHARE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?) %")


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A table with a line for each row.

    Attributes:
        rows: What the lines are about: records or any objects.
        columns: The columns, from left to right.
        beyond: Why a share in it can be above 100 %; stands below a table that has such a share.
    """

    rows: Sequence[Row]
    columns: Sequence[Column[Row]]
    beyond: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def filled(self) -> tuple[list[Column[Row]], list[list[Cell]]]:
        """The columns that are shown, and the cells of each row under them."""
        cells, absent, constant = self._sorted_columns()
        shown = [index for index in range(len(self.columns)) if index not in absent | constant]
        return [self.columns[index] for index in shown], [[line[index] for index in shown] for line in cells]

    def notes(self) -> str:
        """What stands below the table: the cells that are equal in every row, and why a share exceeds 100 %."""
        cells, absent, constant = self._sorted_columns()
        equal = [
            f"{self.columns[index].header}: {text}"
            for index in sorted(constant - absent)
            if (text := cell_text(cells[0][index]))
        ]
        said = f"In every row: {'; '.join(equal)}." if equal else ""
        beyond = self.beyond if any(above_whole(cell_text(cell)) for line in cells for cell in line) else ""
        return "\n\n".join(filter(None, (said, beyond)))

    def _sorted_columns(self) -> tuple[list[list[Cell]], set[int], set[int]]:
        """All cells, which columns have none to show, and which but for the first have the same one in each row."""
        cells = [[column.cell(row) for column in self.columns] for row in self.rows]
        absent, constant = set(), set()
        for index, column in enumerate(self.columns):
            own = [line[index] for line in cells]
            if column.optional and all(cell is None for cell in own):
                absent.add(index)
            if index and not column.keep and len(own) >= _ROWS_WITH_CONSTANTS and len(set(map(cell_text, own))) == 1:
                constant.add(index)
        return cells, absent, constant


def above_whole(text: str) -> bool:
    """Whether a text shows a share above 100 %."""
    return any(float(share.replace(",", "")) > 100 for share in _SHARE.findall(text))


def pivot(
    records: Iterable[Row],
    *,
    corner: str,
    row: Callable[[Row], Hashable],
    column: Callable[[Row], Hashable],
    cell: Callable[[Row], Cell],
    row_title: Callable[[Any], Cell] = str,
    column_title: Callable[[Any], str] = str,
    rows: Iterable[Hashable] | None = None,
    columns: Iterable[Hashable] | None = None,
    beyond: str = "",
) -> Table[Any]:
    """A table with a line for each value of one key and a column for each value of another.

    Args:
        records: What is shown; each has its own place, and a place without one is absent.
        corner: Title of the first column.
        row: Key of a record's line.
        column: Key of a record's column.
        cell: What stands at a record's place.
        row_title: A line's first cell from its key.
        column_title: A column's title from its key.
        rows: Keys of the lines in order; by default as they come. Those without a record are left out.
        columns: Keys of the columns in order; by default as they come. Those without a record are left out.
        beyond: Why a share can be above 100 %, see :class:`Table`.
    """
    placed = {(row(record), column(record)): record for record in records}
    present_rows, present_columns = (dict.fromkeys(place[axis] for place in placed) for axis in (0, 1))
    lines = [key for key in (present_rows if rows is None else rows) if key in present_rows]
    titles = [key for key in (present_columns if columns is None else columns) if key in present_columns]

    def placed_in(title: Hashable) -> Callable[[Hashable], Cell]:
        return lambda line: cell(placed[line, title]) if (line, title) in placed else None

    inner = [Column(column_title(title), placed_in(title), keep=True) for title in titles]
    return Table(lines, [Column(corner, row_title), *inner], beyond)

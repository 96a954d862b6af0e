"""Rewrites GitHub's Markdown so that Python-Markdown, which MkDocs uses, renders it the same way."""

from __future__ import annotations

import re
from typing import Literal

_FENCE = re.compile(r"( *)(```+|~~~+)(\S*)")
_MARKER = re.compile(r"( *)([-*+]|\d+[.)]) +(?=\S)")
_HEADING = re.compile(r" *#+ ")
_BLOCK = re.compile("|".join(pattern.pattern for pattern in (_MARKER, _FENCE, _HEADING)))
_CODE_SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_FIGURE = re.compile(r"^!\[([^\]]*)\]\(([^)\s]+)\)$")


def for_python_markdown(text: str) -> str:
    r"""Return the page in the dialect of Python-Markdown.

    ======================================  ===========================
    GitHub allows                           Python-Markdown needs
    ======================================  ===========================
    a list right after a paragraph          a blank line between
    an item's text under its first letter   an indent of four spaces
    Markdown inside ``<details>``           the attribute ``markdown="1"``
    words after a fence's language          the language alone
    ``\|`` in code inside a table           ``|``
    ======================================  ===========================

    A figure on a line by itself becomes a link to its file, so that a reader on a phone can enlarge it.
    """
    rewriter = _Rewriter()
    return "\n".join(rewriter.line(line) for line in text.split("\n"))


class _Rewriter:
    """Rewrites line by line; keeps the column at which the items of each open list begin, and the open fence."""

    def __init__(self) -> None:
        self._columns: list[int] = []
        self._fence = ""
        self._before: Literal["blank", "text", "block"] = "blank"
        self._second_paragraph = False  # of an item: after it the next item needs a blank line too

    def line(self, line: str) -> str:
        if not line.strip():
            self._before = "blank"
            return line
        indent = len(line) - len(line.lstrip(" "))
        in_list = bool(self._columns)
        if not self._fence:
            self._close_lists(line, indent)
        column = self._columns[-1] if self._columns else 0
        text = " " * (4 * len(self._columns) + max(indent - column, 0)) + line.lstrip(" ")
        fenced = bool(self._fence)
        if fenced:
            if line.strip() == self._fence:
                self._fence = ""
        elif fence := _FENCE.match(text):
            self._fence = fence[2]
            text = fence[0]
        else:
            separate = not in_list or self._second_paragraph or self._before == "block"
            text = self._prose(line, text, interrupts=separate and self._before != "blank")
        self._before = "block" if fenced or _HEADING.match(line) else "text"
        return text

    def _close_lists(self, line: str, indent: int) -> None:
        lazy = self._before == "text" and not _BLOCK.match(line)  # the rest of a paragraph may stand anywhere
        while self._columns and indent < self._columns[-1] and not lazy:
            self._columns.pop()

    def _prose(self, line: str, text: str, *, interrupts: bool) -> str:
        text = text.replace("<details>", '<details markdown="1">')
        text = _FIGURE.sub(r"[![\1](\2)](\2)", text)
        if text.lstrip().startswith("|"):
            text = _CODE_SPAN.sub(lambda span: span[0].replace("\\|", "|"), text)
        marker = _MARKER.match(line)
        if marker is None:
            self._second_paragraph = bool(self._columns) and (self._before == "blank" or self._second_paragraph)
            return text
        if interrupts and marker[2][0].isdigit() and int(marker[2][:-1]) != 1:
            return text  # a number at the start of a line, not a list
        self._columns.append(marker.end())
        self._second_paragraph = False
        return f"\n{text}" if interrupts else text

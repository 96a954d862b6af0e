"""Safe Markdown from names, paths and sources of others, which may contain Markdown or HTML.

:func:`code` and :func:`block` show a text as it is. :func:`inert` is the last step of every page: it leaves only a few
plain HTML tags and links to pages. GitHub does the same, but a site that is built from these files and the preview of
an editor do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

_TAGS = r"</?(?:details|summary)>|<br>|<!-- Generated [^<>]*-->"  # what the templates of this repository use
_HTML = re.compile(rf"(?!{_TAGS})<(?=[A-Za-z/!?])")
_HTML_BLOCK = re.compile(rf" {{0,3}}(?:{_TAGS})")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_LINK = re.compile(r"\](?=\(\s*(?:$|<?(?!https?://)[^)\s>]*[:&]))")
_DEFINITION = re.compile(r"^([\s>*+-]*)\[(?=[^\]]*\]:)")


def code(text: object) -> str:
    """Inline code that shows a text as it is, with line ends as spaces and as many backticks as it needs.

    Args:
        text: Any object; ``str(text)`` is shown.
    """
    shown = re.sub(r"\s", " ", str(text))
    fence = "`" * (_longest_run(shown) + 1)
    # A backtick at an end would join the fence. A space at each end would be stripped.
    ends = shown[:1] + shown[-1:]
    pad = " " if "`" in ends or ends in ("", "  ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """A code block that shows a text as it is, with fences longer than any in the text."""
    fence = "`" * max(_longest_run(text) + 1, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table.

    Args:
        header: Titles of the columns.
        rows: Rows of cells, which are shown as text with ``|`` escaped.
        left: Number of columns on the left that hold text and are aligned left. The others hold numbers and are aligned
            right.
    """

    def line(cells: Iterable[object]) -> str:
        # A backslash before the bar would escape the bar's own backslash.
        escaped = (re.sub(r"(\\*)\|", r"\1\1\\|", " ".join(re.split(r"[\r\n]", str(cell)))) for cell in cells)
        return f"| {' | '.join(escaped)} |"

    rule = "|" + "|".join("---" if index < left else "---:" for index in range(len(header))) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def inert(text: str) -> str:
    """Remove active content from a page; code stays as it is.

    HTML becomes text, except ``<details>``, ``<summary>`` and ``<br>`` without attributes. Links become text, except to
    other pages and to ``http`` or ``https``. What may or may not be code is treated as text.
    """
    return "\n".join(_inert_lines(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")))


def _inert_lines(lines: list[str]) -> Iterator[str]:
    fence = ""
    doubtful = False  # in HTML or after an unmatched backtick, what looks like code may be text
    for line in lines:
        if fence:
            if re.fullmatch(rf" {{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*", line):
                fence = ""
            yield line
            continue
        if not doubtful and (opened := _FENCE.match(line)):
            fence = opened[1]
            yield line
            continue
        doubtful = bool(line.strip()) and (doubtful or bool(_HTML_BLOCK.match(line)))
        # Renderers split a table into cells before they look for code. With an unmatched backtick in a cell, or two
        # backslashes before a bar, they differ in what they take for a cell and for code.
        cells = re.split(r"(?<!\\)\|", line) if line.lstrip().startswith("|") else [line]
        parts = [_inert_part(cell, code_is_known=not doubtful) for cell in cells]
        if not all(whole for _, whole in parts) or (len(cells) > 1 and "\\\\|" in line):
            doubtful = True
            if len(cells) > 1:
                parts = [_inert_part(cell, code_is_known=False) for cell in cells]
        yield "|".join(shown for shown, _ in parts)


def _inert_part(text: str, *, code_is_known: bool) -> tuple[str, bool]:
    """The text without active content outside its code, and whether all its backticks match."""
    if "\\`" in text or not code_is_known:
        return _without_html(text), "`" not in text
    shown, position = "", 0
    for opening in re.finditer(r"`+", text):
        if opening.start() < position:
            continue
        closing = re.compile(rf"(?<!`){opening[0]}(?!`)").search(text, opening.end())
        if closing is None:
            return shown + _without_html(text[position:]), False
        shown += _without_html(text[position : opening.start()]) + text[opening.start() : closing.end()]
        position = closing.end()
    return shown + _without_html(text[position:]), True


def _without_html(text: str) -> str:
    return _DEFINITION.sub(r"\1\\[", _LINK.sub(r"]\\", _HTML.sub("&lt;", text)))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)

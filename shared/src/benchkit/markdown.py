"""Markdown out of values that are not ours: names, paths and sources may hold whatever Markdown or HTML has a use for.

:func:`code` and :func:`block` show a text as it is. :func:`inert` is the last step of every page: whatever a value has
brought, no HTML but a few plain tags is left, and no link but to a page. GitHub does that for itself; a site that is
built from the same files, and an editor's preview, do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TAGS = r"</?(?:details|summary)>|<br>|<!-- Generated [^<>]*-->"  # what the templates of this repository use
_HTML = re.compile(rf"(?!{_TAGS})<(?=[A-Za-z/!?])")
_HTML_BLOCK = re.compile(rf" {{0,3}}(?:{_TAGS})")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_LINK = re.compile(r"\](?=\(\s*(?:$|<?(?!https?://)[^)\s>]*[:&]))")
_DEFINITION = re.compile(r"^([\s>*+-]*)\[(?=[^\]]*\]:)")


def code(text: object) -> str:
    """A text as it is, within a line: in as many backticks as it takes, line ends as spaces.

    Args:
        text: anything; shown as ``str`` does.
    """
    shown = re.sub(r"\s", " ", str(text))
    fence = "`" * (_longest_run(shown) + 1)
    # A backtick at an end would be the fence's; of two spaces at the ends a reader takes one each.
    ends = shown[:1] + shown[-1:]
    pad = " " if "`" in ends or ends in ("", "  ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """A text as it is, in lines of its own: between fences that are longer than any in it.

    Args:
        text: its lines.
        language: for the colours.
    """
    fence = "`" * max(_longest_run(text) + 1, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def inert(text: str) -> str:
    """A page without active content, however it came into its values; code is left as it is.

    HTML is shown as text, but for ``<details>``, ``<summary>`` and ``<br>`` without attributes; links that are neither
    to another page nor to ``http`` are shown as text. Where it is in doubt whether something is code, it is not.

    Args:
        text: Markdown (CommonMark with tables).
    """
    return "\n".join(_inert_lines(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")))


def _inert_lines(lines: list[str]) -> Iterator[str]:
    fence = ""
    doubtful = False  # in HTML, or behind a backtick whose fellow was not found: what looks like code may be none
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
        # The cells of a table are told apart before the code in them is. With a backtick alone in one, or a backslash
        # before a backslash and a bar, readers differ in what the cells and the code are.
        cells = re.split(r"(?<!\\)\|", line) if line.lstrip().startswith("|") else [line]
        parts = [_inert_part(cell, code_is_known=not doubtful) for cell in cells]
        if not all(whole for _, whole in parts) or (len(cells) > 1 and "\\\\|" in line):
            doubtful = True
            if len(cells) > 1:
                parts = [_inert_part(cell, code_is_known=False) for cell in cells]
        yield "|".join(shown for shown, _ in parts)


def _inert_part(text: str, *, code_is_known: bool) -> tuple[str, bool]:
    """The text without active content outside its code, and whether every backtick in it had a fellow."""
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

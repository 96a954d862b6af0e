"""A recorded trace in the formats of ``--format``."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from benchkit import UserError
from dispatcher_trace.capture.dispatcher import near_names
from dispatcher_trace.render.outline import Shown, matching
from dispatcher_trace.render.text import found_text, tree
from dispatcher_trace.trace import Trace


class Format(StrEnum):
    """The formats."""

    markdown = "markdown"
    tree = "tree"
    findings = "findings"
    json = "json"
    html = "html"
    perfetto = "perfetto"


def as_text(recorded: Trace, form: Format, title: str, shown: Shown, *, full: bool) -> str:
    """The trace in one format.

    Args:
        recorded: The trace.
        form: The format.
        title: Heading of the HTML page.
        shown: The part that is printed where a person reads the format.
        full: Whether Markdown has the tree and the reasons below the summary.

    Raises:
        UserError: If ``shown.only`` names no call of the trace.
    """
    if shown.only and not matching(recorded.calls, shown.only):
        called = list(dict.fromkeys(call.operator for call in recorded.all_calls))
        raise UserError(f"--only {shown.only}: no such call in the trace{near_names(shown.only, called)}")
    if not recorded.calls and form in (Format.tree, Format.findings):
        return "".join(f"{note}\n" for note in recorded.notes)
    match form:
        case Format.json:
            return _json(recorded.to_json())
        case Format.perfetto:
            return _json(recorded.to_perfetto())
        case Format.html:
            return recorded.to_html(title)
        case Format.tree:
            return tree(recorded.calls, shown, failed=bool(recorded.error)) + "\n"
        case Format.findings:
            return found_text(recorded.calls, shown) + "\n"
        case Format.markdown:
            return recorded.to_markdown(shown) if full else recorded.summary()


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

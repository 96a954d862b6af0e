"""A trace as one HTML page that needs no server, network or library: ``templates/viewer.html`` with the trace in it.

The state of the page (the search text, the open rows) is in the address after ``#``, so a link can point to a view:
``trace.html#q=softmax``, ``trace.html#open=all``.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import torch

from dispatcher_trace.capture.types import EVIDENCE, Call, Hop
from dispatcher_trace.explain.findings import findings, grouped
from dispatcher_trace.render import outline, text


def page(calls: Sequence[Call], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page.

    Args:
        calls: Top-level calls.
        title: Heading of the page.
        notes: Sentences on what the trace does not show.
    """
    strings = _Strings()
    rows = [row for call in calls for row in _call_rows(call, 0, strings)]
    payload = {
        "torch": torch.__version__,
        "rows": rows,
        "strings": strings.all,
        "findings": [finding.text(str, count) for finding, count in grouped(findings(calls))],
        "notes": list(notes),
        "evidence": EVIDENCE,
    }
    # Compression saves nine tenths. Base64 has no character that could end the script element.
    packed = zlib.compress(json.dumps(payload, separators=(",", ":")).encode(), 9)
    template = resources.files("dispatcher_trace").joinpath("templates/viewer.html").read_text(encoding="utf-8")
    parts = {"{{title}}": html.escape(title), "{{payload}}": base64.b64encode(packed).decode()}
    return re.sub(r"\{\{\w+\}\}", lambda place: parts[place[0]], template)


class _Strings:
    """A table of texts, each stored once: a trace repeats the same texts thousands of times."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._index:
            self._index[text] = len(self.all)
            self.all.append(text)
        return self._index[text]


def _call_rows(call: Call, depth: int, strings: _Strings) -> Iterator[list[Any]]:
    """Rows in order: depth, 0 for a call or 1 for a hop, number, and the fields that the page's ``readTrace`` reads."""
    first = call.hops[0]
    kernels = [strings(outline.device_kernel(kernel)) for kernel in call.kernels]
    came_from = call.forward_source or call.source
    texts = (call.operator, call.title, came_from, first.node, ", ".join(call.missed))
    yield [depth, 0, first.number, *map(strings, texts), call.forward, int(call.agrees), kernels]
    for hop in call.hops:
        yield _hop_row(hop, depth + 1, strings)
        for inner in hop.calls:
            yield from _call_rows(inner, depth + 2, strings)


def _hop_row(hop: Hop, depth: int, strings: _Strings) -> list[Any]:
    below = "" if hop.native_step is None else "\n".join(outline.native_lines(hop.native_step))
    texts = (
        hop.operator,
        hop.key,
        f"{hop.kind}, {hop.where}",
        hop.native,
        hop.why,
        text.key_line(hop).strip(),
        _tensors(hop),
        below,
        hop.thread,
    )
    took = round(max(hop.stop_ns - hop.start_ns, 0) / 1e3, 1)  # no stop if it still ran when the trace ended
    return [depth, 1, hop.number, *map(strings, texts), int(hop.predicted == hop.key), hop.how == "call", took]


def _tensors(hop: Hop) -> str:
    lines = []
    for role, arguments in (("in", hop.arguments), ("out", hop.results)):
        for argument in arguments:
            for tensor in argument.tensors:
                version = "" if tensor.version is None else f", version {tensor.version}"
                strides = ", ".join(map(str, tensor.strides))
                name = f" {argument.name}" if argument.name else ""
                lines.append(
                    f"{role}{name} {tensor}, strides ({strides}), storage {tensor.storage or 'none'}{version}, keys "
                    f"{{{', '.join(tensor.keys)}}}"
                )
    return "\n".join(lines)

"""Migrate the results and pages of a report from version 0.1 to the words of version 0.2.

Only names and sentences change; every number stays.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
import zlib
from pathlib import Path
from typing import Any

from benchkit.results import write_bytes_atomically, write_text_atomically
from dispatcher_trace.render import viewer
from dispatcher_trace.report.cases import PAGE, PERFETTO

_RECORDS = {"walk": "trace", "fold": "source_lines"}
_FIELDS = {"spine": "main_path"}
_PAYLOAD = r'<script id="\w+" type="application/octet-stream">(.*?)</script>'
_SENTENCES = (
    (re.compile(r"\bhanded on, and of what is left (\w+) is highest"), r"redispatched, and \1 is the highest key left"),
    (re.compile(r"\bhanded on to\b"), "redispatched to"),
    (re.compile(r"^(keys \{[^}]*\}) handed on;"), r"\1 from the redispatch;"),
    (re.compile(r"(\$\d+) was made on the memory of"), r"\1 aliases the memory of"),
    (
        re.compile(r"^its kernel at (\w+) is written by hand \((.*)\) and ends the call instead of handing on$"),
        r"the hand-written kernel at \1 (\2) ends the call instead of redispatching",
    ),
    (re.compile(r"^the kernel raised before it could hand on$"), "the kernel raised before it could redispatch"),
    (re.compile(r"^torch's dispatcher in Python chose the kernel$"), "torch's Python dispatcher chose the kernel"),
)


def migrate_results(document: dict[str, Any]) -> dict[str, Any]:
    """The content of a ``results.json`` with the records, fields and sentences of version 0.2."""
    records = [
        {**record, "name": _RECORDS.get(record["name"], record["name"]), "data": migrate_texts(record["data"])}
        for record in document["records"]
    ]
    return {**document, "records": records}


def migrate_texts(value: Any) -> Any:
    """A JSON value with all its texts and field names migrated."""
    if isinstance(value, dict):
        return {_FIELDS.get(name, name): migrate_texts(item) for name, item in value.items()}
    if isinstance(value, list):
        return [migrate_texts(item) for item in value]
    if isinstance(value, str):
        for pattern, replacement in _SENTENCES:
            value = pattern.sub(replacement, value)
    return value


def migrate_folder(folder: Path) -> None:
    """Migrate ``results.json``, the page and the Chrome trace in a report's folder."""
    path = folder / "results.json"
    document = migrate_results(json.loads(path.read_text(encoding="utf-8")))
    write_text_atomically(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    page = (folder / PAGE).read_text(encoding="utf-8")
    title, payload = (re.search(pattern, page, re.DOTALL) for pattern in (r"<title>(.*?)</title>", _PAYLOAD))
    assert title is not None
    assert payload is not None
    unpacked = migrate_texts(json.loads(zlib.decompress(base64.b64decode(payload[1]))))
    write_text_atomically(folder / PAGE, viewer.fill_template(unpacked, html.unescape(title[1])))
    events = migrate_texts(json.loads(gzip.decompress((folder / PERFETTO).read_bytes())))
    packed = gzip.compress(json.dumps(events, separators=(",", ":")).encode(), mtime=0)
    write_bytes_atomically(folder / PERFETTO, packed)

"""Migrate a report's results from version 0.1: the names and sentences of version 0.2, and the same numbers."""

from __future__ import annotations

import re
from typing import Any

_RECORDS = {"walk": "trace", "fold": "source_lines"}
_FIELDS = {"spine": "main_path"}
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
        {**record, "name": _RECORDS.get(record["name"], record["name"]), "data": _migrated(record["data"])}
        for record in document["records"]
    ]
    return {**document, "records": records}


def _migrated(value: Any) -> Any:
    """A JSON value, with its texts and field names migrated."""
    if isinstance(value, dict):
        return {_FIELDS.get(name, name): _migrated(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_migrated(item) for item in value]
    if isinstance(value, str):
        for pattern, replacement in _SENTENCES:
            value = pattern.sub(replacement, value)
    return value

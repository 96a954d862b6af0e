"""Migrate results of version 0.1: new names of records and fields, new words in sentences, the same numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from benchkit.results import Record, Results

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


def migrate(results: Results) -> Results:
    """Turn the records of version 0.1 into those of version 0.2. No number changes."""
    return replace(results, records=tuple(_record(record) for record in results.records))


def _record(record: Record) -> Record:
    return replace(record, name=_RECORDS.get(record.name, record.name), data=_migrated(record.data))


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

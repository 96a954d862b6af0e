"""Outcomes of every cause on the versions of torch that it ran on, recorded in ``outcomes.json``.

The file has one line a cause. The line maps a version to an outcome, and the outcome holds from that version up to the
next one that the line names::

    "class-defined": {"2.10.0": {"seen": […], "registry": ["GB0007"]}, "2.13.0": {"seen": […], "registry": ["GB8977"]}}

An outcome leaves out the fields that are as usual: it happens, and the fixed program is one graph with equal outputs.
``null`` stands for versions that the cause did not run on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchkit.command.progress import working
from benchkit.results import write_text_atomically
from compile_bench.catalogue.cause import Cause
from compile_bench.catalogue.examine import Outcome, examine

RECORDED = Path(__file__).with_name("outcomes.json")

Outcomes = dict[str, dict[str, Outcome]]  # by version of torch, oldest first, and by cause

_USUAL = asdict(Outcome(happens=True, seen=(), registry=(), whole=True, equal=True))


def this_torch() -> str:
    """The version of the installed torch, without its build."""
    return torch.__version__.split("+")[0]


def examine_all(causes: Iterable[Cause]) -> dict[str, Outcome]:
    """Run causes on the installed torch; a cause whose program raises counts as not happening."""
    outcomes = {}
    for cause in causes:
        with working(cause.name):
            try:
                outcomes[cause.name] = examine(cause)
            except Exception as error:  # a repro may need what an older torch does not have
                outcomes[cause.name] = Outcome(False, (), (), False, None, f"{type(error).__name__}: {error}"[:200])
    return outcomes


def write_outcomes(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Add outcomes of the installed torch to a file, beside the outcomes of other versions that it has."""
    known = read_outcomes(path) if path.exists() else {}
    known[this_torch()] = {**known.get(this_torch(), {}), **outcomes}
    write_text_atomically(path, outcomes_as_text(known))


def read_outcomes(path: Path) -> Outcomes:
    """The outcomes that a file holds."""
    document = json.loads(path.read_text(encoding="utf-8"))
    outcomes: Outcomes = {version: {} for version in document["torch"]}
    for name, changes in document["causes"].items():
        fields = None
        for version, known in outcomes.items():
            fields = changes.get(version, fields)
            if fields is not None:
                values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
                known[name] = Outcome(**{**_USUAL, **values})
    return outcomes


def outcomes_as_text(outcomes: Outcomes) -> str:
    """The text that :func:`read_outcomes` reads."""
    versions = sorted(outcomes, key=lambda version: [int(part) for part in version.split(".")])
    lines = []
    for name in dict.fromkeys(name for version in versions for name in outcomes[version]):
        changes: dict[str, dict[str, Any] | None] = {}
        before = None
        for version in versions:
            outcome = outcomes[version].get(name)
            if outcome == before:
                continue
            before = outcome
            changes[version] = None
            if outcome is not None:
                changes[version] = {key: value for key, value in asdict(outcome).items() if value != _USUAL[key]}
        lines.append(f"  {_json(name)}: {_json(changes)}")
    causes = ",\n".join(lines)
    return f'{{\n "torch": {_json(versions)},\n "causes": {{\n{causes}\n }}\n}}\n'


@cache
def recorded() -> Outcomes:
    """The outcomes that come with this package."""
    return read_outcomes(RECORDED)


def status(name: str, version: str) -> str:
    """A cause on a version of torch: ``holds``, ``does not happen``, ``fix fails`` or ``unknown``."""
    outcome = recorded().get(version, {}).get(name)
    if outcome is None:
        return "unknown"
    if not outcome.happens:
        return "does not happen"
    return "holds" if outcome.as_stated else "fix fails"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Reads what ``noxfile.py`` left of each combination: its outcome, and pytest's JUnit files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchkit import Quantity, Record, Results, UserError
from benchkit.environment import Environment
from benchkit.results import load
from tested_versions.plan import SELECTION

NAME = "version-matrix"
RECORD = "combination"


@dataclass
class Outcome:
    """How the selected tests of one package ended.

    Attributes:
        passed: Number of tests that passed.
        failed: Number of tests that failed, and of files that could not be collected.
        skipped: Number of tests that were skipped.
        failures: The first line of each failure.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


def read_tests(path: Path) -> Outcome:
    """Read a JUnit file of pytest."""
    try:
        cases = ElementTree.parse(path).getroot().iter("testcase")  # noqa: S314 - pytest wrote it, a moment ago
    except (OSError, ElementTree.ParseError):
        return Outcome(failed=1, failures=["pytest ended before it wrote its outcomes"])
    outcome = Outcome()
    for case in cases:
        wrong = [element for element in case if element.tag in ("failure", "error")]
        if wrong:
            outcome.failed += 1
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            outcome.failures.append(f"{name} - {(wrong[0].get('message') or '').partition(chr(10))[0]}"[:300])
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    return outcome


def tried(folder: Path) -> Iterator[Record]:
    """Yield a record of each combination that nox tried, or could not try, and left in a folder."""
    for path in sorted(folder.glob("*/outcome.json")):
        outcome = json.loads(path.read_text())
        if why := outcome.get("why"):
            yield _untried(outcome["labels"], why, outcome["commit"], outcome["dirty"])
            continue
        packages = {package: asdict(read_tests(path.with_name(f"{package}.xml"))) for package in SELECTION}
        counts = {
            what: Quantity(sum(tests[what] for tests in packages.values()), "")
            for what in ("passed", "failed", "skipped")
        }
        values = {**counts, "seconds": Quantity(outcome["seconds"], "s")}
        data = {"commit": outcome["commit"], "dirty": outcome["dirty"], "why": ""}
        yield Record(RECORD, outcome["labels"], values, {**data, "versions": outcome["versions"], "packages": packages})
    yield from _without_interpreter(folder / "nox.json")


def _untried(labels: Mapping[str, Any], why: str, commit: str | None, dirty: bool | None) -> Record:
    data: dict[str, Any] = {"commit": commit, "dirty": dirty, "why": why, "versions": {}, "packages": {}}
    return Record(RECORD, labels, {}, data)


def _without_interpreter(summary: Path) -> Iterator[Record]:
    """Yield a record of each combination that nox skipped since this machine lacks its Python."""
    try:
        sessions = json.loads(summary.read_text())["sessions"]
    except (OSError, ValueError, KeyError):
        return
    for session in sessions:
        reason = str(session.get("reason"))
        if session["result"] == "skipped" and "interpreter" in reason:
            python = session["name"].removeprefix("versions-").partition("(")[0]
            yield _untried({"python": python, **session["args"]}, f"no Python {python} here", None, None)


def merged(kept: Path, folder: Path, environment: Environment) -> Results:
    """Return the kept results with the combinations that nox left in a folder, in the order of their versions.

    A combination that was not tried now stays, with its commit.
    """
    try:
        combinations = {_combination(record.labels): record for record in load(kept / "results.json").select(RECORD)}
    except UserError:  # the file is missing or cannot be read
        combinations = {}
    combinations |= {_combination(record.labels): record for record in tried(folder)}
    records = tuple(combinations[combination] for combination in sorted(combinations))
    selection = {package: list(paths) for package, paths in SELECTION.items()}
    return Results(NAME, environment, {"selection": selection}, records, complete=True)


def _combination(labels: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, str(labels[name]).split("."))) for name in ("python", "torch", "jax"))

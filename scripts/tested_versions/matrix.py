"""Tries the combinations one by one and keeps each at once, so that an interrupted run continues."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from benchkit import Quantity, Record, Results, UserError
from benchkit.command import progress
from benchkit.environment import Environment
from benchkit.results import dump, load, write_text_atomically
from tested_versions.plan import SELECTION, Combination

NAME = "version-matrix"
RECORD = "combination"


class Unavailable(Exception):
    """A combination cannot be tried on this machine. The message is the reason, as a clause."""


@dataclass(frozen=True)
class Outcome:
    """How the selected tests of one package ended.

    Attributes:
        passed: Number of tests that passed.
        failed: Number of tests that failed, and of files that could not be collected.
        skipped: Number of tests that were skipped.
        failures: The first line of each failure.
    """

    passed: int
    failed: int
    skipped: int
    failures: list[str] = field(default_factory=list)


class Trial(Protocol):
    """An environment in which a combination is installed."""

    versions: Mapping[str, str]

    def run(self, package: str) -> Outcome:
        """Run the selected tests of a package."""

    def close(self) -> None:
        """Remove the environment from the disk."""


class Machine(Protocol):
    """Makes environments: :class:`tested_versions.machine.ThisMachine`, or a test double."""

    def prepare(self, combination: Combination) -> Trial:
        """Make an environment.

        Raises:
            Unavailable: If an interpreter, a version or a build is missing here.
        """


def attempt(machine: Machine, combination: Combination, environment: Environment) -> Record:
    """Try one combination. That it is unavailable is a result too."""
    start = time.monotonic()
    source = {"commit": environment.commit, "dirty": environment.dirty}
    try:
        trial = machine.prepare(combination)
    except Unavailable as error:
        return Record(RECORD, combination.labels, {}, {**source, "why": str(error), "versions": {}, "packages": {}})
    try:
        found = {package: asdict(trial.run(package)) for package in SELECTION}
    finally:
        trial.close()
    counts = {
        what: Quantity(sum(tests[what] for tests in found.values()), "") for what in ("passed", "failed", "skipped")
    }
    seconds = Quantity(time.monotonic() - start, "s")
    data = {**source, "why": "", "versions": dict(trial.versions), "packages": found}
    return Record(RECORD, combination.labels, {**counts, "seconds": seconds}, data)


def run(
    machine: Machine,
    wanted: Sequence[Combination],
    directory: Path,
    environment: Environment,
    *,
    fresh: bool,
) -> Results:
    """Try the wanted combinations that are not done yet, and keep each at once.

    Args:
        machine: Makes environments.
        wanted: The combinations, in the order of the table.
        directory: The folder of ``results.json``. A combination that was tried at this commit is not tried again. A
            combination that is not wanted stays in the file, with its commit.
        environment: The environment of this run.
        fresh: Whether to try all wanted combinations again.
    """
    path = directory / "results.json"
    found = _kept(path)
    for combination in progress.track(wanted, "combinations"):
        if fresh or not _is_done(found.get(combination), environment):
            found[combination] = attempt(machine, combination, environment)
            write_text_atomically(path, dump(_results(environment, wanted, found)))
    results = _results(environment, wanted, found)
    write_text_atomically(path, dump(results))
    return results


def _kept(path: Path) -> dict[Combination, Record]:
    try:
        return {_combination(record): record for record in load(path).select(RECORD)}
    except UserError:  # the file is missing or cannot be read
        return {}


def _is_done(record: Record | None, environment: Environment) -> bool:
    """Tell whether a combination was tried. An unavailable one may be available now."""
    return record is not None and bool(record.values) and _is_of(record, environment)


def _is_of(record: Record, environment: Environment) -> bool:
    """Tell whether a record was made from the sources as they are now."""
    return record.data["commit"] == environment.commit is not None and not (record.data["dirty"] or environment.dirty)


def _combination(record: Record) -> Combination:
    return Combination(**{key: str(value) for key, value in record.labels.items()})


def _results(environment: Environment, wanted: Sequence[Combination], found: Mapping[Combination, Record]) -> Results:
    order = sorted(found, key=lambda each: [tuple(map(int, part.split("."))) for part in each.labels.values()])
    return Results(
        NAME,
        environment,
        {"selection": {package: [str(path) for path in paths] for package, paths in SELECTION.items()}},
        tuple(found[each] for each in order),
        complete=all(each in found and _is_of(found[each], environment) for each in wanted),
    )

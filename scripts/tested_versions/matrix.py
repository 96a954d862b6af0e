"""Going through the combinations: each is on disk when it is done, so that a run that was ended goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from benchkit import Quantity, Record, Results, UserError, progress
from benchkit.environment import Environment
from benchkit.results import dump, load, write_text_atomically
from tested_versions.plan import SELECTION, Combination

NAME = "version-matrix"
RECORD = "combination"


class CannotBeHad(Exception):
    """A combination that cannot be tried on this machine; the message says why, as a clause."""


@dataclass(frozen=True)
class Outcome:
    """How the selection of one package ended.

    Attributes:
        passed: tests.
        failed: tests, and files that could not be collected.
        skipped: tests.
        failures: the first line of each failure.
    """

    passed: int
    failed: int
    skipped: int
    failures: list[str] = field(default_factory=list)


class Trial(Protocol):
    """An environment with a combination in it."""

    versions: Mapping[str, str]

    def run(self, package: str) -> Outcome:
        """Run a package's selection."""

    def close(self) -> None:
        """Give back what it takes of the disk."""


class Machine(Protocol):
    """What makes environments: :class:`tested_versions.machine.ThisMachine`, or a test's own."""

    def prepare(self, combination: Combination) -> Trial:
        """Make an environment.

        Raises:
            CannotBeHad: where an interpreter, a version or a build of it is not there.
        """


def attempt(machine: Machine, combination: Combination, environment: Environment) -> Record:
    """Try one combination; that it could not be tried is a finding too."""
    start = time.monotonic()
    source = {"commit": environment.commit, "dirty": environment.dirty}
    try:
        trial = machine.prepare(combination)
    except CannotBeHad as error:
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
    """Try what is wanted and not yet done, and keep each at once.

    Args:
        machine: makes environments.
        wanted: combinations, in the order of the table.
        directory: of ``results.json``. What was tried at this commit is not tried again; what is not wanted stays in
            it, with its own commit.
        environment: of this run.
        fresh: try all that is wanted anew.
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
    except UserError:  # there is none, or none that this program reads
        return {}


def _is_done(record: Record | None, environment: Environment) -> bool:
    """Whether it was tried; what could not be had may be there now."""
    return record is not None and bool(record.values) and _is_of(record, environment)


def _is_of(record: Record, environment: Environment) -> bool:
    """Whether it is known to be of the sources as they are now."""
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

"""The report on versions: the table of combinations, and why others were not tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchkit import Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.markdown import code
from benchkit.report import Cell, Column, Report, Section, Table, bullets, pivot
from tested_versions.plan import SELECTION
from tested_versions.records import RECORD

_ASKED = "With which versions of Python, torch and jax does this repository work?"
_METHOD = (
    "Each combination gets a virtual environment with this checkout installed and torch and jax pinned. A selection of "
    "each package's tests runs on a CPU: the tests of the modules that touch private names of a framework, and the "
    "broadest quick ones. Slow tests are left out."
)
_EXPLAINED = (
    "Tests that passed, of all packages together; none failed unless a cell says so. The number of tests differs "
    "between commits."
)
_LIMIT = (
    "Nothing here ran on a GPU, and no test that is marked slow; the times are those of an installation and the tests, "
    "on a machine that may have been busy."
)

_FAILURES = 3  # of a package, that are quoted


def declare(results: Results) -> Report:
    """Declare the report."""
    records = results.select(RECORD)
    tried = [record for record in records if record.values]
    selection: Mapping[str, Sequence[str]] = results.configuration["selection"]
    return Report(
        title="Tested versions",
        headline=_headline(records, tried),
        use="your versions of Python, torch and jax have a cell here without a failure.",
        avoid="you need them on a GPU, or they are not in the table: both are untried.",
        answer=[_overview(records), _EXPLAINED] if records else ["None could be tried."],
        findings=[
            Section("What failed", [bullets(_failures(records))]),
            Section(
                "At which commit", [_commits(tried), "No commit was run whole." if len(_by_commit(tried)) > 1 else ""]
            ),
            Section("Not tried", [_not_tried(records)]),
        ],
        asked=[_ASKED],
        method=[_METHOD, bullets(f"{package}: {', '.join(map(code, paths))}" for package, paths in selection.items())],
        limits=[_LIMIT],
        details=[Section("", [_by_package(tried)], fold="Every combination, by package")],
    )


def _headline(records: Sequence[Record], tried: Sequence[Record]) -> str:
    """Say how many combinations were tried, and how many of those passed."""
    passed = [record for record in tried if not record["failed"].value]
    of_those = f"all {len(tried)}" if len(passed) == len(tried) else f"{len(passed)} of those"
    return (
        f"{len(tried)} of {len(records)} combinations could be tried on this machine; {of_those} passed "
        "the quick selection of every package, on a CPU."
    )


def _label(name: str, record: Record) -> str:
    return str(record.labels[name])


def _in_order(versions: Iterable[str]) -> list[str]:
    return sorted(set(versions), key=lambda version: [int(part) for part in version.split(".")])


def _overview(records: Sequence[Record]) -> Table[Any]:
    """A row for each torch and a column for each Python and jax."""
    return pivot(
        records,
        corner="torch",
        row=lambda record: _label("torch", record),
        column=lambda record: (_label("python", record), _label("jax", record)),
        cell=_outcome,
        column_title=lambda versions: "Python {}, jax {}".format(*versions),
        rows=_in_order(_label("torch", record) for record in records),
        columns=sorted({(_label("python", record), _label("jax", record)) for record in records}),
    )


def _outcome(record: Record) -> str:
    if not record.values:
        return "not available"
    failed = record["failed"].value
    return f"**{numbers.count(failed)} failed**" if failed else f"{numbers.count(record['passed'].value)} passed"


def _failures(records: Sequence[Record]) -> Iterable[str]:
    for record in records:
        name = f"Python {_label('python', record)}, torch {_label('torch', record)}, jax {_label('jax', record)}"
        for package, tests in record.data["packages"].items():
            shown, others = tests["failures"][:_FAILURES], len(tests["failures"]) - _FAILURES
            if shown:
                more = f"; {others} more" if others > 0 else ""
                yield f"{name}, {package}: {'; '.join(map(code, shown))}{more}"


def _by_commit(tried: Sequence[Record]) -> dict[str, list[Record]]:
    """The combinations that were tried, by the commit that they were tried at."""
    commits: dict[str, list[Record]] = {}
    for record in tried:
        commits.setdefault(_commit(record), []).append(record)
    return commits


def _commit(record: Record) -> str:
    return commit_label(record.data["commit"], record.data["dirty"])


def _commits(tried: Sequence[Record]) -> Table[Any]:
    """How many combinations were tried at which commit."""
    return Table(
        list(_by_commit(tried).items()),
        [
            Column("commit", lambda row: row[0]),
            Column("Python", lambda row: ", ".join(dict.fromkeys(_label("python", r) for r in row[1])), left=True),
            Column("combinations", lambda row: len(row[1])),
        ],
    )


def _by_package(tried: Sequence[Record]) -> Table[Record]:
    """A row for each combination that was tried."""

    def exact(name: str) -> Column[Record]:
        title = name if name != "python" else "Python"
        return Column(title, lambda record: record.data["versions"].get(name, record.labels[name]), left=True)

    def of_package(package: str) -> Column[Record]:
        return Column(package, lambda record: _tests(record.data["packages"].get(package)))

    return Table(
        tried,
        [
            *map(exact, ("python", "torch", "jax")),
            Column("commit", _commit, left=True),
            *map(of_package, SELECTION),
            Column("time", lambda record: numbers.with_unit(record["seconds"].value, "s")),
        ],
    )


def _tests(tests: Mapping[str, Any] | None) -> Cell:
    if tests is None:
        return None
    failed = f"**{tests['failed']} failed**, " if tests["failed"] else ""
    skipped = f", {tests['skipped']} skipped" if tests["skipped"] else ""
    return f"{failed}{tests['passed']} passed{skipped}"


def _not_tried(records: Sequence[Record]) -> str:
    """Why combinations were not tried: those of one Python, one jax and one reason in a line."""
    torches: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if not record.values:
            place = _label("python", record), _label("jax", record), record.data["why"]
            torches.setdefault(place, []).append(_label("torch", record))
    return bullets(
        f"Python {python} with jax {jax} and torch {', '.join(versions)}: {why}"
        for (python, jax, why), versions in sorted(torches.items())
    )

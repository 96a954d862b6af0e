"""The report on versions: the table of combinations, and why others were not tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchkit import Record, Results, numbers
from benchkit.environment import commit_label
from benchkit.markdown import code
from benchkit.report import ReportSpec, markdown_table
from tested_versions.plan import SELECTION
from tested_versions.records import RECORD


def finding(results: Results) -> str:
    """Sum the run up: what passed, and at how many commits."""
    records = results.select(RECORD)
    tried = [record for record in records if record.values]
    passed = [record for record in tried if not record["failed"].value]
    of_those = f"all {len(tried)}" if len(passed) == len(tried) else f"{len(passed)} of those"
    commits = list(_by_commit(tried))
    rows = f"The rows come from {len(commits)} commits: no commit was run whole" if len(commits) > 1 else ""
    if len(commits) == 1:
        rows = f"All rows come from commit {commits[0]}"
    return (
        f"{len(tried)} of {len(records)} combinations could be tried on this machine; {of_those} passed "
        f"the quick selection of every package, on a CPU. {rows + '.' if rows else ''}"
    ).strip()


def context(results: Results) -> dict[str, Any]:
    """The template's variables."""
    records = results.select(RECORD)
    tried = [record for record in records if record.values]
    selection = results.configuration["selection"]
    return {
        "overview": _overview(records),
        "commits": _commits(tried),
        "table_of_versions": _table(tried),
        "not_tried": _not_tried(records),
        "failures": [
            (str(_name(record)), package, [code(line) for line in tests["failures"]])
            for record in records
            for package, tests in record.data["packages"].items()
            if tests["failures"]
        ],
        "selection": [(package, [code(path) for path in paths]) for package, paths in selection.items()],
    }


def _by_commit(tried: list[Record]) -> dict[str, list[Record]]:
    """The combinations that were tried, by the commit that they were tried at."""
    found: dict[str, list[Record]] = {}
    for record in tried:
        found.setdefault(commit_label(record.data["commit"], record.data["dirty"]), []).append(record)
    return found


def _overview(records: list[Record]) -> str:
    """Return a row for each torch and a column for each Python and jax; empty without a record."""
    outcomes = {tuple(str(record.labels[key]) for key in ("torch", "python", "jax")): record for record in records}
    torches = dict.fromkeys(torch for torch, _, _ in outcomes)
    columns = sorted({(python, jax) for _, python, jax in outcomes})
    rows = [
        (torch, *(_outcome(outcomes.get((torch, python, jax))) for python, jax in columns))
        for torch in sorted(torches, key=lambda version: [int(part) for part in version.split(".")])
    ]
    header = ["torch", *(f"Python {python}, jax {jax}" for python, jax in columns)]
    return markdown_table(header, rows, left=len(header)) if rows else ""


def _outcome(record: Record | None) -> str:
    if record is None:
        return "–"
    if not record.values:
        return "not available"
    failed = record["failed"].value
    return f"**{numbers.count(failed)} failed**" if failed else f"{numbers.count(record['passed'].value)} passed"


def _commits(tried: list[Record]) -> str:
    """Return how many combinations were tried at which commit; empty if there is none."""
    rows = [
        (commit, ", ".join(dict.fromkeys(str(record.labels["python"]) for record in own)), numbers.count(len(own)))
        for commit, own in _by_commit(tried).items()
    ]
    return markdown_table(["commit", "Python", "combinations"], rows, left=2) if rows else ""


def _name(record: Record) -> str:
    return f"Python {record.labels['python']}, torch {record.labels['torch']}, jax {record.labels['jax']}"


def _table(records: list[Record]) -> str:
    """Return a row for each combination that was tried; empty if there is none."""
    if not records:
        return ""
    rows = []
    for record in records:
        versions = record.data["versions"]
        exact = [versions.get(name, record.labels[name]) for name in ("python", "torch", "jax")]
        cells = [_cell(record.data["packages"].get(package)) for package in SELECTION]
        commit = commit_label(record.data["commit"], record.data["dirty"])
        rows.append([*exact, commit, *cells, numbers.with_unit(record["seconds"].value, "s")])
    return markdown_table(["Python", "torch", "jax", "commit", *SELECTION, "time"], rows, left=4)


def _cell(tests: Mapping[str, Any] | None) -> str:
    if tests is None:
        return "–"
    failed = f"**{tests['failed']} failed**, " if tests["failed"] else ""
    skipped = f", {tests['skipped']} skipped" if tests["skipped"] else ""
    return f"{failed}{tests['passed']} passed{skipped}"


def _not_tried(records: list[Record]) -> str:
    """Return why combinations were not tried, grouped by reason; empty if all were tried."""
    jaxes: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if not record.values:
            key = (record.data["why"], str(record.labels["torch"]), str(record.labels["python"]))
            jaxes.setdefault(key, []).append(str(record.labels["jax"]))
    pythons: dict[tuple[str, str, str], list[str]] = {}
    for (why, torch, python), found in jaxes.items():
        pythons.setdefault((torch, ", ".join(found), why), []).append(python)
    rows = [(torch, ", ".join(found), jax, why) for (torch, jax, why), found in sorted(pythons.items())]
    return markdown_table(["torch", "Python", "jax", "why"], rows, left=4) if rows else ""


REPORT = ReportSpec("tested_versions", context, lambda results: [], finding)

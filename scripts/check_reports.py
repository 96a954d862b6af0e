"""Compare everything committed that was measured, reports, index and tables, with what it was computed from.

./scripts/python.sh scripts/check_reports.py           say what differs; the status is 1 if anything does
./scripts/python.sh scripts/check_reports.py --write   render all of them again, and the golden reports of the tests

This is no part of the tests: they know no measured figure, and are green on any machine after any run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import index_reports
import random_programs
import typer
import version_matrix

from benchkit.command import one_line_errors
from benchkit.report import DeclareReport, figures, form, render, write
from benchkit.results import Results, load_report, write_text_atomically
from benchkit.run import Lens, committed_reports
from lowering.table import COMMITTED as LOWERINGS
from lowering.table import read_table
from tested_versions.report import declare as VERSIONS

UNFOLDED_LINES, FIRST_SCREEN = 250, 40


def golden_reports(lens: Lens) -> list[Path]:
    """The folders of the small frozen results that the tests of a lens render."""
    tests = Path(__file__).parent / "tests" if lens.root == index_reports.HOUSE else lens.root / "tests"
    return sorted(path.parent for path in tests.glob("golden/reports/*/results.json"))


def problems(directory: Path, results: Results, declare: DeclareReport) -> Iterator[str]:
    """Say where a report differs from its results, and where it lacks the form of a report."""
    if not results.complete:
        yield "the run did not reach its end"
    text = _page(directory / "report.md")
    if not text:
        yield "report.md is missing"
        return
    if render(results, declare) != text:
        yield "report.md is not what its results render to"
    shown = {f"{figure.name}.svg" for figure in figures(results, declare)}
    drawn = {path.name for path in (directory / "figures").glob("*")}
    for name in sorted(shown ^ drawn):
        yield f"figures/{name} is {'missing' if name in shown else 'of another run: the report does not show it'}"
    yield from faults_of_form(text)
    yield from form.faults(declare(results))


def _page(path: Path) -> str:
    """The text of a generated page; empty if the page is missing."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def faults_of_form(text: str) -> Iterator[str]:
    """Say what a page lacks of its form: few unfolded lines, the answer in the first screen, each caption once.

    What its declaration says by itself, :mod:`benchkit.report.form` checks.
    """
    shown = unfolded(text)
    if (lines := len(shown.splitlines())) > UNFOLDED_LINES:
        yield f"{lines} lines are unfolded, more than {UNFOLDED_LINES}"
    first = shown.splitlines()[:FIRST_SCREEN]
    if not any(line.startswith("|---") for line in first):
        yield f"the first {FIRST_SCREEN} lines hold no table"
    if "](figures/" in text and not any(re.match(r"!\[.+\]\(figures/", line) for line in first):
        yield f"the first {FIRST_SCREEN} lines hold no figure"
    alternatives = re.findall(r"^!\[(.*)\]\(figures/", text, re.MULTILINE)
    captions = [*re.findall(r"^\*(?!\*)(.+)\*$", text, re.MULTILINE), *alternatives]
    if len(set(captions)) != len(captions) or not all(alternatives):
        yield "a caption is said twice, or a figure has no alternative text"
    if len({text.count(tag) for tag in ("<details>", "</details>", "<summary>")}) != 1:
        yield "a fold is not closed"


def unfolded(text: str) -> str:
    """What a reader sees before he opens anything; a closed part counts with its summary."""
    return re.sub(r"(<details><summary>.*?</summary>).*?</details>", r"\1", text, flags=re.DOTALL)


def check() -> list[str]:
    """Say what is wrong with each committed report and with the index; empty if nothing is."""
    faults = []
    for lens in index_reports.all_lenses().values():
        for directory in committed_reports(lens.root):
            results = lens.load_report(directory)
            wrong = list(problems(directory, results, lens.report))
            if results.environment.machine != directory.name:
                wrong.append(f"it was measured on {results.environment.machine}")
            faults += [f"{directory.relative_to(index_reports.ROOT)}: {what}" for what in wrong]
    versions = version_matrix.DIRECTORY
    faults += [f"{versions.name}: {what}" for what in problems(versions, load_report(versions), VERSIONS)]
    if index_reports.render() != _page(index_reports.HOUSE / "README.md"):
        faults.append("framework-internals/README.md is not what the results render to")
    return faults


def check_tables() -> list[str]:
    """Say what is wrong with the committed tables that no report has: of random programs, and of lowerings."""
    faults = []
    if random_programs.render() != _page(random_programs.PAGE):
        faults.append(f"{random_programs.PAGE.name} is not what its records render to")
    lost = (
        row
        for row in read_table(LOWERINGS)
        if row.choice == "kernel" and row.evidence.low <= max(1.0, row.evidence.control_high)
    )
    return [
        *faults,
        *(f"{LOWERINGS.name}: {row.operator} on {row.machine} took a kernel that did not win" for row in lost),
    ]


def write_all() -> None:
    """Render every committed and golden report, the tested versions, the index and the random programs again."""
    for lens in index_reports.all_lenses().values():
        for directory in committed_reports(lens.root):
            print(write(directory, lens.report, lens.load_report(directory)), flush=True)
        for directory in golden_reports(lens):
            text = render(load_report(directory), lens.report)
            write_text_atomically(directory / "report.md", text)
            print(directory / "report.md", flush=True)
    print(write(version_matrix.DIRECTORY, VERSIONS))
    write_text_atomically(index_reports.HOUSE / "README.md", index_reports.render())
    write_text_atomically(random_programs.PAGE, random_programs.render())


def main(
    rewrite: Annotated[
        bool, typer.Option("--write", help="Render every report and the index again instead of comparing them.")
    ] = False,
) -> None:
    """Compare every committed report and the index with the results they were computed from."""
    with one_line_errors("check_reports"):
        if rewrite:
            write_all()
            return
        if faults := [*check(), *check_tables()]:
            print("\n".join(faults), file=sys.stderr)
            print("check_reports: to render them again: scripts/check_reports.py --write", file=sys.stderr)
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

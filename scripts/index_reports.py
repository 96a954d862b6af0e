"""Write an index of reports: one table, a row for each lens, a column for each machine.

./scripts/python.sh scripts/index_reports.py         framework-internals/README.md, of the committed reports
./scripts/python.sh scripts/index_reports.py --own   framework-internals/THIS_MACHINE.md, which git ignores

The latter has this machine first, then the committed reports. The first row is the end-to-end step. A page is a pure
function of the results and leaves quick runs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jinja2
import lenses
import typer

from benchkit.command import one_line_errors
from benchkit.markdown import inert
from benchkit.report import headline, markdown_table
from benchkit.report import render as render_report
from benchkit.report.rendering import markdown_environment
from benchkit.results import Results, load_report, write_text_atomically
from benchkit.run import OWN, Lens, committed_reports, own_reports
from whole_step.measure import build_lens as build_end_to_end

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "framework-internals"
OWN_INDEX = "THIS_MACHINE.md"


@dataclass(frozen=True)
class Entry:
    """One report in the index; the paths start at the index.

    Attributes:
        report: Path of the report.
        figure: Path of the report's first figure; empty if it has none.
        headline: The finding in one sentence.
        results: What the report was computed from.
    """

    report: str
    figure: str
    headline: str
    results: Results


@dataclass(frozen=True)
class Row:
    """A lens, or the end-to-end step, in the index.

    Attributes:
        name: Name of the lens.
        page: What the name links to; empty for the end-to-end step.
        question: What it answers.
        entries: Its reports by machine.
    """

    name: str
    page: str
    question: str
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Column:
    """A machine in the index.

    Attributes:
        folder: Name of its folders.
        entries: The name of each lens, and its report.
    """

    folder: str
    entries: Sequence[tuple[str, Entry]]

    @property
    def title(self) -> str:
        """What the machine is."""
        described = self.entries[0][1].results.environment.described
        return f"this machine: {described}" if self.folder.startswith(OWN) else described

    @property
    def measured(self) -> str:
        """The hardware and the dates."""
        return measured_on(self.entries)


def all_lenses() -> dict[str, Lens]:
    """Return the end-to-end step and the lenses by name, in the order of the index."""
    return {
        "end to end": build_end_to_end(HOUSE),
        **{name: manifest.build() for name, manifest in lenses.manifests().items()},
    }


def entries(lens: Lens, *, own: bool) -> dict[str, Entry]:
    """Return the committed reports of a lens by machine, and before them this machine's own if they are asked for."""
    by_machine = {}
    for directory in [*(own_reports(lens.root) if own else []), *committed_reports(lens.root)]:
        results = load_report(directory)
        home = directory.relative_to(HOUSE)
        # The first figure of a report carries its finding.
        figure = re.search(r"\]\((figures/[^)]+)\)", render_report(results, lens.report))
        by_machine[directory.name] = Entry(
            f"{home}/report.md",
            f"{home}/{figure[1]}" if figure else "",
            headline(results, lens.report),
            results,
        )
    return by_machine


def rows(*, own: bool) -> list[Row]:
    """Return the end-to-end step and the lenses in their order."""
    questions = {name: manifest.question for name, manifest in lenses.manifests().items()}
    return [
        Row(
            name,
            f"{name}/README.md" if name in questions else "",
            questions.get(name, "one training step, with the parts of every lens"),
            entries(lens, own=own),
        )
        for name, lens in all_lenses().items()
    ]


def measured_on(found: Iterable[tuple[str, Entry]]) -> str:
    """Describe the hardware and the dates of these reports; if the hardware differs, name the lenses that ran on each.

    Args:
        found: The name of each lens, and its report on the machine.
    """
    by_hardware: dict[str, list[str]] = {}
    dates = []
    for name, entry in found:
        environment = entry.results.environment
        hardware = (
            f"{environment.gpu.name}, CUDA {environment.gpu.cuda}"
            if environment.gpu
            else f"{environment.cpu}, {environment.cores} cores, {environment.memory_gib} GiB"
        )
        by_hardware.setdefault(hardware, []).append(name)
        dates.append(environment.date[:10])
    described = [
        hardware if len(by_hardware) == 1 else f"{hardware} ({', '.join(names)})"
        for hardware, names in by_hardware.items()
    ]
    first, last = min(dates), max(dates)
    return f"{'; '.join(described)}; measured {first if first == last else f'from {first} to {last}'}"


def render(*, own: bool = False) -> str:
    """Return the text of the index."""
    environment = markdown_environment(
        jinja2.FileSystemLoader(Path(__file__).parent / "templates"), keep_trailing_newline=True
    )
    lines = rows(own=own)
    folders = {name for row in lines for name in row.entries}
    columns = [
        Column(name, [(row.name, row.entries[name]) for row in lines if name in row.entries])
        for name in sorted(folders, key=lambda name: (not name.startswith(OWN), name))
    ]
    cells = [
        [_lens_cell(row), *(_report_cell(row.name, row.entries.get(column.folder), column.title) for column in columns)]
        for row in lines
    ]
    table = markdown_table(["lens", *(column.title for column in columns)], cells, left=1 + len(columns))
    return inert(environment.get_template("index.md.j2").render(table=table, columns=columns, own=own))


def _lens_cell(row: Row) -> str:
    name = f"[{row.name}]({row.page})" if row.page else f"**{row.name}**"
    return f"{name}: {row.question}"


def _report_cell(lens: str, entry: Entry | None, machine: str) -> str:
    if entry is None:
        return "–"
    figure = f"<br>[![{lens} on {machine}]({entry.figure})]({entry.report})" if entry.figure else ""
    return f"{entry.headline} [Report]({entry.report}){figure}"


def main(
    own: Annotated[
        bool, typer.Option("--own", help="Write THIS_MACHINE.md: this machine's own reports first; git ignores it.")
    ] = False,
) -> None:
    """Write the index of the committed reports, or that of this machine, and print its path."""
    path = HOUSE / (OWN_INDEX if own else "README.md")
    with one_line_errors("index of reports"):
        write_text_atomically(path, render(own=own))
    print(path)


if __name__ == "__main__":
    typer.run(main)

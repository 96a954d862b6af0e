"""Write an index of reports: one table, a row for each lens, a column for each machine.

./scripts/python.sh scripts/index_reports.py         framework-internals/README.md, of the committed reports
./scripts/python.sh scripts/index_reports.py --own   framework-internals/THIS_MACHINE.md, which git ignores

The latter has this machine first, then the committed reports. The first row is the end-to-end step. A page is a pure
function of the results and leaves quick runs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import lenses
import typer

from benchkit.command import one_line_errors
from benchkit.markdown import inert
from benchkit.report import headline, pivot
from benchkit.report import render as render_report
from benchkit.report.rendering import block_text
from benchkit.results import Results, load_report, write_text_atomically
from benchkit.run import OWN, Lens, committed_reports, own_reports
from whole_step.measure import build_lens as build_end_to_end

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "framework-internals"
OWN_INDEX = "THIS_MACHINE.md"
PAGE = Path(__file__).parent / "templates" / "index.md"

# What each index says of the other.
_OF_THIS_MACHINE = (
    "The [committed index](README.md) has the committed reports alone. `run_all.sh --publish` writes "
    "`reports/<machine>/`."
)
_COMMITTED = """\
`run_all.sh` measures your machine: its reports stand beside these, in `reports/own-<machine>/`, and lead an index of \
their own,
`framework-internals/THIS_MACHINE.md`. Git ignores both."""


@dataclass(frozen=True)
class Entry:
    """One report in the index.

    Attributes:
        lens: Name of the lens, or of the end-to-end step.
        folder: Its folder; the name is that of the machine.
        results: What it was computed from.
        cell: What the table says of it: the finding, and a link and its first figure, which carries the finding.
    """

    lens: str
    folder: Path
    results: Results
    cell: str

    @property
    def machine(self) -> str:
        """What the machine is."""
        described = self.results.environment.described
        return f"this machine: {described}" if self.folder.name.startswith(OWN) else described


def all_lenses() -> dict[str, Lens]:
    """Return the end-to-end step and the lenses by name, in the order of the index."""
    return {
        "end to end": build_end_to_end(HOUSE),
        **{name: manifest.build() for name, manifest in lenses.manifests().items()},
    }


def entries(*, own: bool) -> Iterator[Entry]:
    """Yield the committed reports of all lenses, and this machine's own if they are asked for."""
    for name, lens in all_lenses().items():
        for folder in [*(own_reports(lens.root) if own else []), *committed_reports(lens.root)]:
            results, home = load_report(folder), folder.relative_to(HOUSE)
            found = re.search(r"\]\((figures/[^)]+)\)", render_report(results, lens.report))
            entry = Entry(name, folder, results, f"{headline(results, lens.report)} [Report]({home}/report.md)")
            figure = f"<br>[![{name} on {entry.machine}]({home}/{found[1]})]({home}/report.md)" if found else ""
            yield replace(entry, cell=entry.cell + figure)


def measured_on(found: Iterable[Entry]) -> str:
    """Describe the hardware and the dates of reports; if the hardware differs, name the lenses that ran on each."""
    by_hardware: dict[str, list[str]] = {}
    dates = []
    for entry in found:
        environment = entry.results.environment
        hardware = (
            f"{environment.gpu.name}, CUDA {environment.gpu.cuda}"
            if environment.gpu
            else f"{environment.cpu}, {environment.cores} cores, {environment.memory_gib} GiB"
        )
        by_hardware.setdefault(hardware, []).append(entry.lens)
        dates.append(environment.date[:10])
    described = [
        hardware if len(by_hardware) == 1 else f"{hardware} ({', '.join(names)})"
        for hardware, names in by_hardware.items()
    ]
    first, last = min(dates), max(dates)
    return f"{'; '.join(described)}; measured {first if first == last else f'from {first} to {last}'}"


def render(*, own: bool = False) -> str:
    """Return the text of the index."""
    reports = list(entries(own=own))
    by_machine: dict[str, list[Entry]] = {}
    for entry in sorted(reports, key=lambda entry: (not entry.folder.name.startswith(OWN), entry.folder.name)):
        by_machine.setdefault(entry.folder.name, []).append(entry)
    table = pivot(
        reports,
        corner="lens",
        row=lambda entry: entry.lens,
        column=lambda entry: entry.folder.name,
        cell=lambda entry: entry.cell,
        row_title=_lens_cell,
        column_title=lambda name: by_machine[name][0].machine,
        columns=by_machine,
    )
    machines = (
        f"- **{found[0].machine}**: {measured_on(found)}; `reports/{name}/`" for name, found in by_machine.items()
    )
    return inert(
        PAGE.read_text(encoding="utf-8").format(
            table=block_text(replace(table, columns=[replace(column, left=True) for column in table.columns])),
            machines="\n".join(machines),
            other_index=_OF_THIS_MACHINE if own else _COMMITTED,
        )
    )


def _lens_cell(name: str) -> str:
    manifest = lenses.manifests().get(name)
    if manifest is None:
        return f"**{name}**: one training step, with the parts of every lens"
    return f"[{name}]({name}/README.md): {manifest.question}"


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

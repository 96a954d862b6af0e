"""Write an index of reports: a section for each lens, with a figure and a row for each machine.

./scripts/python.sh scripts/index_reports.py         framework-internals/README.md, of the committed reports
./scripts/python.sh scripts/index_reports.py --own   framework-internals/THIS_MACHINE.md, which git ignores

The latter has this machine first, then the committed reports, GPUs before CPUs. The first section is the end-to-end
step. A page is a pure function of the results and leaves quick runs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import lenses
import typer

from benchkit.command import one_line_errors
from benchkit.markdown import inert, markdown_table
from benchkit.report import headline
from benchkit.report import render as render_report
from benchkit.results import Results, write_text_atomically
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
        finding: What it says in one sentence.
        figure: Path of its first figure, which carries the finding, from the folder of the index; empty without one.
    """

    lens: str
    folder: Path
    results: Results
    finding: str
    figure: str

    @property
    def report(self) -> str:
        """Path of the report from the folder of the index."""
        return f"{self.folder.relative_to(HOUSE)}/report.md"

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
    """Yield the committed reports of all lenses, after this machine's own if they are asked for."""
    for name, lens in all_lenses().items():
        committed = [(folder, lens.load_report(folder)) for folder in committed_reports(lens.root)]
        committed.sort(key=lambda report: (report[1].environment.gpu is None, report[0].name))
        for folder, results in [*((f, lens.load_report(f)) for f in own_reports(lens.root) if own), *committed]:
            found = re.search(r"\]\((figures/[^)]+)\)", render_report(results, lens.report))
            figure = f"{folder.relative_to(HOUSE)}/{found[1]}" if found else ""
            yield Entry(name, folder, results, headline(results, lens.report), figure)


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
    by_lens: dict[str, list[Entry]] = {}
    by_machine: dict[str, list[Entry]] = {}
    for entry in entries(own=own):
        by_lens.setdefault(entry.lens, []).append(entry)
        by_machine.setdefault(entry.folder.name, []).append(entry)
    machines = (
        f"- **{found[0].machine}**: {measured_on(found)}; `reports/{name}/`" for name, found in by_machine.items()
    )
    return inert(
        PAGE.read_text(encoding="utf-8").format(
            lenses="\n\n".join(_section(name, found) for name, found in by_lens.items()),
            machines="\n".join(machines),
            other_index=_OF_THIS_MACHINE if own else _COMMITTED,
        )
    )


def _weight(entry: Entry) -> tuple[bool, bool, int]:
    results = entry.results
    return entry.folder.name.startswith(OWN), results.environment.gpu is not None, len(results.records)


def _section(name: str, reports: list[Entry]) -> str:
    """What a lens answers, the figure of one report, and what each report found.

    The figure is this machine's, or of the report with the most records; a GPU's if there is one.
    """
    manifest = lenses.manifests().get(name)
    shown = max(reports, key=_weight)
    pieces = [
        f"## {name.capitalize()}\n\nOne training step, with the parts of every lens."
        if manifest is None
        else f"## {name}\n\n[{name}]({name}/README.md): {manifest.question}"
    ]
    if shown.figure:
        pieces.append(f"[![{name} on {shown.machine}]({shown.figure})]({shown.report})")
    rows = [(f"[{entry.machine}]({entry.report})", entry.finding) for entry in reports]
    return "\n\n".join([*pieces, markdown_table(["machine, and its report", "what was found"], rows, left=2)])


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

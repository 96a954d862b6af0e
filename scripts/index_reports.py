"""Write ``framework-internals/README.md``: one table of every committed report, a row for each lens.

The first row is the end-to-end step. The page is a pure function of the ``results.json`` files and leaves quick runs
out.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from benchkit.command import one_line_errors
from benchkit.markdown import inert
from benchkit.report import markdown_table
from benchkit.report import render as render_report
from benchkit.report.rendering import markdown_environment
from benchkit.results import Results, load, write_text_atomically
from benchkit.run import Lens, report_directories
from whole_step.measure import build_lens as build_end_to_end

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "framework-internals"
LENSES = {
    "dispatcher-trace": "what happens between `a + b` and the kernel, hop by hop, and why",
    "compile-bench": "what torch.compile costs, what it gives, what breaks the graph",
    "jax-baseline": "the same training in JAX: the same numbers? how fast? what did XLA make of it?",
    "rmsnorm-fused": "one operator in PyTorch, Triton, C++ and CUDA C++, forward and backward, at the memory limit",
    "custom-ops": "every road from a C++/CUDA kernel to `torch.ops`, and what each costs",
}


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


def build_lens(name: str) -> Lens:
    """Return the lens of a subproject, from ``<package>.lens.build_lens(root)``."""
    module = importlib.import_module(f"{name.replace('-', '_')}.lens")
    lens: Lens = module.build_lens(HOUSE / name)
    return lens


def entries(lens: Lens) -> dict[str, Entry]:
    """Return the reports of a lens by machine."""
    found = {}
    for directory in report_directories(lens.root):
        if directory.name.endswith("-quick"):
            continue
        results = load(directory / "results.json", migrate=lens.report.migrate)
        home = directory.relative_to(HOUSE)
        # The first figure of a report carries its finding.
        figure = re.search(r"\]\((figures/[^)]+)\)", render_report(results, lens.report))
        found[directory.name] = Entry(
            f"{home}/report.md",
            f"{home}/{figure[1]}" if figure else "",
            lens.report.one_sentence(results),
            results,
        )
    return found


def rows() -> list[Row]:
    """Return the end-to-end step and the lenses, in the order of ``LENSES``."""
    whole = Row("end to end", "", "one training step, with the parts of every lens", entries(build_end_to_end(HOUSE)))
    lenses = [Row(name, f"{name}/README.md", question, entries(build_lens(name))) for name, question in LENSES.items()]
    return [whole, *lenses]


def measured_on(found: Iterable[tuple[str, Entry]]) -> str:
    """Describe the hardware and the dates of these reports; if the hardware differs, name the lenses that ran on each.

    Args:
        found: The name of each lens, and its report on the machine.
    """
    lenses: dict[str, list[str]] = {}
    dates = []
    for name, entry in found:
        environment = entry.results.environment
        hardware = (
            f"{environment.gpu.name}, CUDA {environment.gpu.cuda}"
            if environment.gpu
            else f"{environment.cpu}, {environment.cores} cores"
        )
        lenses.setdefault(hardware, []).append(name)
        dates.append(environment.date[:10])
    described = [
        hardware if len(lenses) == 1 else f"{hardware} ({', '.join(names)})" for hardware, names in lenses.items()
    ]
    first, last = min(dates), max(dates)
    return f"{'; '.join(described)}; measured {first if first == last else f'from {first} to {last}'}"


def render() -> str:
    """Return the text of the index."""
    environment = markdown_environment(
        jinja2.FileSystemLoader(Path(__file__).parent / "templates"), keep_trailing_newline=True
    )
    found = rows()
    machines = {
        machine: measured_on((row.name, row.entries[machine]) for row in found if machine in row.entries)
        for machine in sorted({machine for row in found for machine in row.entries})
    }
    cells = [
        [_lens_cell(row), *(_report_cell(row.name, row.entries.get(machine), machine) for machine in machines)]
        for row in found
    ]
    table = markdown_table(["lens", *machines], cells, left=1 + len(machines))
    return inert(environment.get_template("index.md.j2").render(table=table, machines=machines))


def _lens_cell(row: Row) -> str:
    name = f"[{row.name}]({row.page})" if row.page else f"**{row.name}**"
    return f"{name}: {row.question}"


def _report_cell(lens: str, entry: Entry | None, machine: str) -> str:
    if entry is None:
        return "–"
    figure = f"<br>[![{lens} on {machine}]({entry.figure})]({entry.report})" if entry.figure else ""
    return f"{entry.headline} [Report]({entry.report}){figure}"


def main() -> None:
    """Write the index and print its path."""
    path = HOUSE / "README.md"
    with one_line_errors("index of reports"):
        write_text_atomically(path, render())
    print(path)


if __name__ == "__main__":
    main()

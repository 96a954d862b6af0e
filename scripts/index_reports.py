"""Write ``framework-internals/README.md``: every committed report, by machine, with its one-line finding.

The page opens with the end-to-end step; a machine with a GPU is preferred. It is a pure function of the
``results.json`` files and leaves quick runs out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2

from benchkit.command import one_line_errors
from benchkit.markdown import inert
from benchkit.results import Results, load, write_text_atomically
from benchkit.run import Lens, report_directories
from whole_step.measure import build_lens as build_end_to_end
from whole_step.report import variant_count, variant_table

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
    """One report in the index."""

    lens: str
    report: str
    finding: str
    results: Results


@dataclass(frozen=True)
class WholeStep:
    """The end-to-end report that opens the index."""

    machine: str
    report: str
    figure: str
    finding: str
    table: str
    variant_count: str


def build_lens(name: str) -> Lens:
    """Return the lens of a subproject, from ``<package>.lens.build_lens(root)``."""
    module = importlib.import_module(f"{name.replace('-', '_')}.lens")
    lens: Lens = module.build_lens(HOUSE / name)
    return lens


def entries() -> dict[str, list[Entry]]:
    """Return the reports by machine: machines in alphabetical order, lenses in the order of ``LENSES``."""
    found: dict[str, list[Entry]] = {}
    for name in LENSES:
        for directory in report_directories(HOUSE / name):
            if directory.name.endswith("-quick"):
                continue
            report_spec = build_lens(name).report
            results = load(directory / "results.json", migrate=report_spec.migrate)
            report = str((directory / "report.md").relative_to(HOUSE))
            finding = report_spec.finding(results)
            found.setdefault(directory.name, []).append(Entry(name, report, finding, results))
    return dict(sorted(found.items()))


def measured_on(entries: Iterable[Entry]) -> str:
    """Describe the hardware of these reports; if it differs, name the lenses that ran on each."""
    lenses: dict[str, list[str]] = {}
    for entry in entries:
        found = entry.results.environment
        described = f"{found.gpu.name}, CUDA {found.gpu.cuda}" if found.gpu else f"{found.cpu}, {found.cores} cores"
        lenses.setdefault(described, []).append(entry.lens)
    if len(lenses) == 1:
        return next(iter(lenses))
    return "; ".join(f"{described} ({', '.join(names)})" for described, names in lenses.items())


def whole_step() -> WholeStep | None:
    """Return the end-to-end report to show, or None if there is none."""
    lens = build_end_to_end(HOUSE)
    found = {
        path: load(path / "results.json") for path in report_directories(HOUSE) if not path.name.endswith("-quick")
    }
    if not found:
        return None
    directory, results = max(found.items(), key=lambda item: item[1].environment.gpu is not None)
    return WholeStep(
        directory.name,
        str((directory / "report.md").relative_to(HOUSE)),
        str((directory / "figures" / "throughput.svg").relative_to(HOUSE)),
        lens.report.finding(results),
        variant_table(results),
        variant_count(results),
    )


def render() -> str:
    """Return the text of the index."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 # Markdown, not HTML: `inert` is its escaping
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    machines = {machine: (measured_on(reports), reports) for machine, reports in entries().items()}
    text = environment.get_template("index.md.j2").render(lenses=LENSES, machines=machines, whole_step=whole_step())
    return inert(text)


def main() -> None:
    """Write the index and print its path."""
    path = HOUSE / "README.md"
    with one_line_errors("index of reports"):
        write_text_atomically(path, render())
    print(path)


if __name__ == "__main__":
    main()

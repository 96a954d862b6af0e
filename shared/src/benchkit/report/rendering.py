"""Markdown and figures as a pure function of the results.

A lens provides a function that makes a :class:`~benchkit.report.blocks.Report` of its results. The order of a report,
the table of the machine and the list of what is missing are the same for all lenses, and stand here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchkit import markdown, numbers
from benchkit.environment import commit_label
from benchkit.report.blocks import Block, Figure, Report, Section, bullets
from benchkit.report.charts import Chart
from benchkit.report.tables import Table, cell_text
from benchkit.report.targets import Targets
from benchkit.results import SMALLER, Record, Results, load_report, write_text_atomically

# How a lens makes its report.
DeclareReport = Callable[[Results], Report]


def headline(results: Results, declare: DeclareReport) -> str:
    """The first sentence of the report, for the index."""
    return declare(results).headline


def figures(results: Results, declare: DeclareReport) -> list[Figure | Chart]:
    """The figures of a report."""
    return list(_figures_of(declare(results)))


def render(results: Results, declare: DeclareReport) -> str:
    """The text of ``report.md``."""
    return markdown.inert(_tidy("\n\n".join(_pieces(results, declare(results)))))


def _pieces(results: Results, report: Report) -> Iterator[str]:
    """The order of every report: the answer in one screen, what follows from it, what is folded, and its limits."""
    yield f"# {report.title}\n\n**{report.headline}**"
    yield from _advice(report)
    yield f"Measured on {results.environment.described}."
    yield "<!-- Generated from results.json; edits are lost. -->"
    if not results.complete:
        yield "> This run was interrupted: what stands below is what it had measured by then."
    yield from map(block_text, report.answer)
    yield from map(block_text, report.findings)
    yield folded(
        "What was asked, the machine, and how it was measured",
        [
            "### What was asked",
            *map(block_text, report.asked),
            "### The machine",
            markdown.markdown_table(["", ""], _machine_rows(results), left=2),
            "### How it was measured",
            *map(block_text, report.method),
        ],
    )
    yield from map(block_text, report.details)
    absences = (f"Not in this report: **{absence.what}** ({absence.why})." for absence in results.absences)
    yield "## What this does not show\n\n" + "\n".join(filter(None, (bullets(report.limits), bullets(absences))))


def _advice(report: Report) -> Iterator[str]:
    """When to use what was measured and when not, and the worst result beside them."""
    yield " ".join(
        f"**{label}** {text}" for label, text in (("Use this when", report.use), ("Not when", report.avoid)) if text
    )
    if report.worst:
        yield f"**At worst:** {report.worst}"


def block_text(block: Block, *, level: int = 2) -> str:
    """A block as Markdown; empty if there is nothing to show."""
    if not block:
        return ""
    if isinstance(block, str):
        return block
    if isinstance(block, Table):
        return _table_text(block)
    if isinstance(block, Targets):
        return f"{_table_text(block.table())}\n\n{bullets(block.reasons())}".strip()
    if isinstance(block, Chart | Figure):
        return f"![{block.alt}](figures/{block.name}.svg)\n\n*{block.caption}*"
    title = [f"{'#' * level} {block.title}"] if block.title else []
    inner = level + 1 if block.title else level
    texts = [*title, *(block_text(part, level=inner) for part in block.blocks)]
    return folded(block.fold, texts) if block.fold else "\n\n".join(filter(None, texts))


def _table_text(table: Table[Any]) -> str:
    columns, rows = table.filled()
    left = 1 + max((index for index, column in enumerate(columns) if column.left), default=0)
    cells = ([cell_text(cell) for cell in row] for row in rows)
    text = markdown.markdown_table([column.header for column in columns], cells, left=left)
    return f"{text}\n\n{table.notes()}".strip()


def folded(summary: str, texts: Iterable[str]) -> str:
    """Texts that a reader opens by a click on the summary: HTML, where backticks mark no code and are left out."""
    shown = "\n\n".join(filter(None, texts)).strip()
    return f"<details><summary>{summary.replace('`', '')}</summary>\n\n{shown}\n\n</details>"


def _figures_of(report: Report) -> Iterator[Figure | Chart]:
    for blocks in (report.answer, report.findings, report.asked, report.method, report.details):
        yield from _figures_in(blocks)


def _figures_in(blocks: Iterable[Block]) -> Iterator[Figure | Chart]:
    for block in blocks:
        if isinstance(block, Section) and block:
            yield from _figures_in(block.blocks)
        elif isinstance(block, Chart | Figure) and block:
            yield block


def write(directory: Path, declare: DeclareReport, results: Results | None = None) -> Path:
    """Render the results in ``directory`` into ``report.md`` and ``figures/``.

    A figure that the report there before had, and this one has not, is removed.

    Args:
        directory: The folder ``reports/<machine>/``.
        declare: Makes the report of the lens.
        results: The results that the folder holds, where they have been read; else they are read.

    Returns:
        The path of the report.

    Raises:
        UserError: If the results cannot be read; nothing is written then.
    """
    # matplotlib takes half a second, and tables alone do not need it
    from benchkit.report.drawing import draw_chart
    from benchkit.report.plotting import save

    results = load_report(directory) if results is None else results
    text = render(results, declare)
    for figure in figures(results, declare):
        drawn = draw_chart(figure) if isinstance(figure, Chart) else figure.draw()
        save(drawn, directory / "figures" / f"{figure.name}.svg")
    path = directory / "report.md"
    before = _figure_links(path.read_text(encoding="utf-8")) if path.exists() else set()
    write_text_atomically(path, text)
    for link in before - _figure_links(text):  # a smaller run draws fewer; other files in the folder are the user's
        (directory / link).unlink(missing_ok=True)
    return path


def _figure_links(text: str) -> set[str]:
    return set(re.findall(r"\]\((figures/[\w-]+\.svg)\)", text))


def _tidy(text: str) -> str:
    """Leave one blank line between blocks where an empty text leaves more; fenced code stays as it is."""
    parts = re.split(r"(^(`{3,}).*?^\2$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::3] = [re.sub(r"\n{3,}", "\n\n", part) for part in parts[::3]]
    del parts[2::3]  # the fences, which the pattern captures separately
    return "".join(parts).strip("\n") + "\n"


def _copy_limit(record: Record, *, on_gpu: bool) -> str:
    tensor = f" of tensors of {numbers.quantity(record['tensor'])}" if "tensor" in record.values else ""
    shared = "" if on_gpu else ". Others share this machine's memory, so another run can find another limit"
    return f"{numbers.quantity(record['bandwidth'])}, a copy{tensor}{shared}"


def _machine_rows(results: Results) -> list[tuple[str, str]]:
    environment = results.environment
    rows = []
    if gpu := environment.gpu:
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        rows.append(
            (
                "GPU",
                f"{gpu.name}, compute capability {gpu.capability}, {gpu.multiprocessors} multiprocessors, "
                f"{numbers.with_unit(gpu.memory, 'B')}, L2 {numbers.with_unit(gpu.l2_cache, 'B')}, "
                f"CUDA {gpu.cuda}{driver}",
            )
        )
        if gpu.sm_clock_max_mhz:
            rows.append(
                (
                    "GPU clocks",
                    f"{gpu.sm_clock_mhz} MHz at the start, {gpu.sm_clock_max_mhz} MHz at most, "
                    f"memory {gpu.memory_clock_mhz} MHz, power limit {gpu.power_limit_w} W; left as found",
                )
            )
    threads = f", {environment.threads} threads an operator" if environment.threads else ""
    memory = numbers.with_unit(environment.memory, "B")
    design = "".join(f", {what}" for what in (environment.family, environment.instructions.upper()) if what)
    rows.append(("CPU", f"{environment.cpu}{design}, {environment.cores} cores{threads}, {memory}"))
    if environment.cpu_pressure is not None:
        rows.append(
            ("CPU pressure at the start", f"{environment.cpu_pressure:.1f} % of ten seconds (0 is an idle machine)")
        )
    if smaller := results.configuration.get(SMALLER):
        rows.append(("Sizes that fit", "; ".join(smaller)))
    if copies := results.select("memory limit", traffic="1 read 1 write"):
        rows.append(("Copy limit of this run", _copy_limit(copies[0], on_gpu=gpu is not None)))
    rows.append(("System", f"{environment.system}, Python {environment.python}"))
    rows.append(("Packages", ", ".join(f"{name} {number}" for name, number in environment.packages.items())))
    rows.append(("Commit", commit_label(environment.commit, environment.dirty)))
    rows.append(("Command", markdown.code(environment.command)))
    rows.append(("Date", environment.date))
    return rows

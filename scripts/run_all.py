"""Run every subproject's ``scripts/run.py`` and the end-to-end step, sum up, and write the index of reports."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchkit import UserError, numbers, progress
from benchkit.device import resolve_device

ROOT = Path(__file__).resolve().parents[1]
LENSES = ("dispatcher-trace", "compile-bench", "jax-baseline", "rmsnorm-fused", "custom-ops")
END_TO_END = "end-to-end"
JOBS = {
    **{lens: Path("framework-internals", lens, "scripts", "run.py") for lens in LENSES},
    END_TO_END: Path("scripts", "end_to_end.py"),
}
INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """How one job ended: ``report`` is the path that it printed, None when it failed."""

    job: str
    seconds: float
    status: int
    report: Path | None


def run_job(job: str, *, device: str, quick: bool) -> Outcome:
    """Run one job in a process of its own, its messages and progress shown as they come."""
    command = [sys.executable, str(ROOT / JOBS[job]), "--device", device, *(["--quick"] if quick else [])]
    start = time.perf_counter()
    # Its standard error is ours: progress bars need the terminal. Its standard output is the path of the report.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()  # the terminal's interrupt reaches it too, and it keeps what it measured
            return Outcome(job, time.perf_counter() - start, INTERRUPTED, None)
    lines = output.strip().splitlines()
    report = Path(lines[-1]) if process.returncode == 0 and lines else None
    return Outcome(job, time.perf_counter() - start, process.returncode, report)


def write_index() -> int:
    """Write ``framework-internals/README.md``; the exit status of the script that does it."""
    command = [sys.executable, str(ROOT / "scripts" / "index_reports.py")]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def summary(outcomes: list[Outcome]) -> Table:
    """The table that closes a run."""
    table = Table("job", "seconds", "report", title="framework-internals")
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"
    for outcome in outcomes:
        if outcome.report is not None:
            shown = outcome.report.relative_to(ROOT) if outcome.report.is_relative_to(ROOT) else outcome.report
            result = str(shown)
        else:
            result = f"failed with status {outcome.status}; its message stands above"
        table.add_row(outcome.job, numbers.significant(outcome.seconds), result)
    total = sum(outcome.seconds for outcome in outcomes)
    table.add_section()
    table.add_row("all", numbers.significant(total), "framework-internals/README.md is the index")
    return table


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there is a GPU.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Run this job alone; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller measurements, written to reports/<machine>-quick/.")
    ] = False,
) -> None:
    """Run every subproject's main job and the end-to-end step, go on past one that fails, and sum up."""
    console = Console()
    try:
        if unknown := [name for name in only or () if name not in JOBS]:
            raise UserError(f"--only takes one of {', '.join(JOBS)}; got {', '.join(unknown)}")
        resolved = resolve_device(device)
    except UserError as error:
        print(f"run_all: {error}", file=sys.stderr)
        raise typer.Exit(2) from None

    chosen = [job for job in JOBS if only is None or job in only]
    outcomes: list[Outcome] = []
    for number, job in enumerate(chosen, start=1):
        console.print(f"[bold]{number}/{len(chosen)} {job}[/bold] on {resolved}")
        outcomes.append(run_job(job, device=resolved, quick=quick))
        if outcomes[-1].status == INTERRUPTED:
            break
    with progress.working("index of reports"):
        index_status = write_index()
    # A path cut short is of no use: where nobody watches, the table is as wide as it needs to be.
    (console if console.is_terminal else Console(width=160)).print(summary(outcomes))

    failed = [outcome.job for outcome in outcomes if outcome.report is None]
    if index_status != 0:
        failed.append("index of reports")
    if failed:
        print(f"run_all: failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED if outcomes and outcomes[-1].status == INTERRUPTED else 1)


if __name__ == "__main__":
    typer.run(main)

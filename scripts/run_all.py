"""Run every subproject's ``scripts/run.py`` and the end-to-end step, sum up, and write the index of reports."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchkit import UserError, numbers, progress
from benchkit.command import one_line_errors
from benchkit.device import Device, resolve_device
from benchkit.environment import capture
from benchkit.results import reported, write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
LENSES = ("dispatcher-trace", "compile-bench", "jax-baseline", "rmsnorm-fused", "custom-ops")
END_TO_END = "end-to-end"
JOBS = {
    **{lens: Path("framework-internals", lens, "scripts", "run.py") for lens in LENSES},
    END_TO_END: Path("scripts", "end_to_end.py"),
}
INTERRUPTED = 130
PATIENCE = 60.0  # seconds that a job of a run that was killed is given to end
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Outcome:
    """How one job ended: ``report`` is the path that it printed, None when it failed."""

    job: str
    seconds: float
    status: int
    report: Path | None


@dataclass
class Progress:
    """What an unfinished run has done so far, on disk, so that the next one goes on from there.

    Attributes:
        path: of the file; there is one for each device and size.
        lock: descriptor of the file that says that a run is under way; its jobs hold it too, should they outlive it.
        commit: that the run measures; empty if it is not known or tracked files differ from it. Only the work of the
            same commit is gone on with.
        done: seconds and report of each job that ended well.
    """

    path: Path
    lock: int
    commit: str
    done: dict[str, tuple[float, str]] = field(default_factory=dict)

    def load(self) -> None:
        """Take over what an earlier run of the same commit has done, as far as its reports are still there."""
        try:
            kept = json.loads(self.path.read_text())
            done = {job: (float(seconds), str(report)) for job, (seconds, report) in kept["done"].items()}
            same = bool(self.commit) and kept["commit"] == self.commit
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it was damaged
            return
        if same:
            self.done = {job: what for job, what in done.items() if Path(what[1]).exists()}

    def note(self, outcome: Outcome) -> None:
        """Keep a job that ended well."""
        if outcome.report is not None:
            self.done[outcome.job] = (outcome.seconds, str(outcome.report))
            write_text_atomically(self.path, json.dumps({"commit": self.commit, "done": self.done}))

    def outcome(self, job: str) -> Outcome | None:
        """How a job ended in the earlier run; None if it has to be run."""
        if job not in self.done:
            return None
        seconds, report = self.done[job]
        return Outcome(job, seconds, 0, Path(report))


@contextmanager
def only_run(device: Device, *, quick: bool) -> Iterator[Progress]:
    """The progress of this run; no other run of the same kind can be under way at the same time.

    Raises:
        UserError: if one is.
    """
    folder = ROOT / "build" / "run_all"
    name = device + ("-quick" if quick else "")
    with reported(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(lock, name)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield Progress(folder / f"{name}.json", lock, _sources(device))
    finally:
        os.close(lock)


def _sources(device: Device) -> str:
    """The commit that stands for what is measured; empty where none does."""
    found = capture(device, root=ROOT)
    return "" if found.dirty else found.commit or ""


def _take(lock: int, name: str) -> None:
    """Take the lock; a job that outlived its run was told to end, and is waited for."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode()
            if _lives(holder):
                raise UserError(
                    f"another run_all on {name} is under way in this checkout (process {holder}), and would write the "
                    "same reports; wait for it, end it, or take a checkout of its own"
                ) from None
            if time.monotonic() > until:
                raise UserError(
                    f"a job of a run_all on {name} that was killed has not ended for {PATIENCE:.0f} s, and would write "
                    "the same reports; wait for it, or end it"
                ) from None
            time.sleep(0.1)


def _lives(process: str) -> bool:
    if not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _end_with(parent: int) -> None:
    """In a job, before it begins: have the kernel tell it to end when the run ends, however that ends.

    A run that is killed cannot tell its job. A job that is told to end does as if it were interrupted: it keeps what it
    measured, and ends what it has started. Left alone it would go on measuring for nobody, and hold the lock. Linux
    only: elsewhere the job goes on to its end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)


def run_job(job: str, *, device: str, quick: bool, lock: int) -> Outcome:
    """Run one job in a process of its own, its messages and progress shown as they come; it holds ``lock`` too."""
    command = [sys.executable, str(ROOT / JOBS[job]), "--device", device, *(["--quick"] if quick else [])]
    start = time.perf_counter()
    # Its standard error is ours: progress bars need the terminal. Its standard output is the path of the report.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, pass_fds=[lock], preexec_fn=partial(_end_with, os.getpid())
    ) as process:
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


def summary(outcomes: list[Outcome], *, quick: bool) -> Table:
    """The table that closes a run."""
    table = Table("job", "seconds", "report", title="framework-internals")
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"
    for outcome in outcomes:
        if outcome.report is not None:
            shown = outcome.report.relative_to(ROOT) if outcome.report.is_relative_to(ROOT) else outcome.report
            result = escape(str(shown))
        else:
            result = f"failed with status {outcome.status}; its message stands above"
        table.add_row(outcome.job, numbers.significant(outcome.seconds), result)
    total = sum(outcome.seconds for outcome in outcomes)
    table.add_section()
    index = "" if quick else "framework-internals/README.md is the index"
    table.add_row("all", numbers.significant(total), index)
    return table


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there is a GPU.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Run this job alone; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller measurements, written to reports/<machine>-quick/.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure everything, also what an unfinished run of this commit has.")
    ] = False,
) -> None:
    """Run every subproject's main job and the end-to-end step, go on past one that fails, and sum up.

    A run that was ended goes on when it is started again: jobs that it had finished are not repeated.
    """
    with one_line_errors("run_all"):
        if unknown := [name for name in only or () if name not in JOBS]:
            raise UserError(f"--only takes one of {', '.join(JOBS)}; got {', '.join(unknown)}")
        resolved = resolve_device(device)
        with only_run(resolved, quick=quick) as kept:
            if not fresh and only is None:
                kept.load()
            outcomes = _run(only, resolved, kept, quick=quick)
            index_status = 0
            if not quick:  # of quick reports there is no index
                with progress.working("index of reports"):
                    index_status = write_index()
            failed = [outcome.job for outcome in outcomes if outcome.report is None]
            if not failed and only is None:
                kept.path.unlink(missing_ok=True)  # all is done: the next run measures anew
        # A path cut short is of no use: where nobody watches, the table is as wide as it needs to be.
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(summary(outcomes, quick=quick))
    if index_status != 0:
        failed.append("index of reports")
    if failed:
        print(f"run_all: failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED if outcomes and outcomes[-1].status == INTERRUPTED else 1)


def _run(only: list[str] | None, device: Device, kept: Progress, *, quick: bool) -> list[Outcome]:
    console = Console()
    jobs = [job for job in JOBS if only is None or job in only]
    outcomes: list[Outcome] = []
    for number, job in enumerate(jobs, start=1):
        if (before := kept.outcome(job)) is not None:
            console.print(f"[bold]{number}/{len(jobs)} {job}[/bold] is there from the run before (--fresh repeats it)")
            outcomes.append(before)
            continue
        console.print(f"[bold]{number}/{len(jobs)} {job}[/bold] on {device}")
        outcomes.append(run_job(job, device=device, quick=quick, lock=kept.lock))
        if only is None:
            kept.note(outcomes[-1])
        if outcomes[-1].status == INTERRUPTED:
            break
    return outcomes


if __name__ == "__main__":
    typer.run(main)

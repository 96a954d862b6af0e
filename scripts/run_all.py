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

import lenses
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchkit import UserError, numbers
from benchkit.command import one_line_errors, progress
from benchkit.device import Device, resolve_device
from benchkit.environment import capture
from benchkit.results import reported, write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
END_TO_END = "end-to-end"
JOBS = {
    **{lens: Path("framework-internals", lens, "scripts", "run.py") for lens in lenses.manifests()},
    END_TO_END: Path("scripts", "end_to_end.py"),
}
INTERRUPTED = 130
PATIENCE = 60.0  # seconds that a job of a run that was killed is given to end
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Size:
    """Which run it is, and where its reports go.

    Attributes:
        quick: Fewer and smaller measurements; the index leaves their reports out.
        publish: The reports go to the committed place.
    """

    quick: bool = False
    publish: bool = False

    @property
    def arguments(self) -> list[str]:
        """What a job is called with."""
        return [*(["--quick"] if self.quick else []), *(["--publish"] if self.publish else [])]

    @property
    def index(self) -> str:
        """The index that names the reports; empty if none does."""
        return "" if self.quick else f"framework-internals/{'README.md' if self.publish else 'THIS_MACHINE.md'}"


@dataclass(frozen=True)
class Outcome:
    """How one job ended. ``report`` is the path that the job printed, or None when it failed."""

    job: str
    seconds: float
    status: int
    report: Path | None


@dataclass
class Progress:
    """The finished jobs of an unfinished run. It is kept on disk, so that the next run continues from there.

    Attributes:
        path: The file. Each device and size has one.
        lock: Descriptor of the lock file, which says that a run is under way. The jobs inherit it, so the lock stays
            taken while a job outlives its run.
        commit: The commit that the run measures; empty if it is unknown or if tracked files differ from it. A run
            continues only work of the same commit.
        done: Seconds and report of each job that succeeded.
    """

    path: Path
    lock: int
    commit: str
    done: dict[str, tuple[float, str]] = field(default_factory=dict)

    def load(self) -> None:
        """Load the finished jobs of an earlier run of the same commit whose reports still exist."""
        try:
            kept = json.loads(self.path.read_text())
            done = {job: (float(seconds), str(report)) for job, (seconds, report) in kept["done"].items()}
            same = bool(self.commit) and kept["commit"] == self.commit
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it was damaged
            return
        if same:
            self.done = {job: what for job, what in done.items() if Path(what[1]).exists()}

    def note(self, outcome: Outcome) -> None:
        """Keep a job that succeeded."""
        if outcome.report is not None:
            self.done[outcome.job] = (outcome.seconds, str(outcome.report))
            write_text_atomically(self.path, json.dumps({"commit": self.commit, "done": self.done}))

    def outcome(self, job: str) -> Outcome | None:
        """Return how a job ended in the earlier run, or None if it has to run."""
        if job not in self.done:
            return None
        seconds, report = self.done[job]
        return Outcome(job, seconds, 0, Path(report))


@contextmanager
def only_run(device: Device, size: Size) -> Iterator[Progress]:
    """Take the lock of a run on this device and of this size.

    Raises:
        UserError: If another such run is under way.
    """
    folder = ROOT / "build" / "run_all"
    name = "".join([device, *size.arguments]).replace("--", "-")
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
    """Return the commit that is measured; empty if it is unknown or the checkout is dirty."""
    found = capture(device, root=ROOT)
    return "" if found.dirty else found.commit or ""


def _take(lock: int, name: str) -> None:
    """Take the lock. A job that outlives its run has been told to end; wait for it."""
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
                    "same reports; wait for it, end it, or use another checkout"
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
    """Ask the kernel to end this job when the run ends, also when the run is killed.

    It runs in the job's process before the job starts. The job then behaves as if it were interrupted: it keeps what
    it measured and ends its own children. Otherwise it would go on measuring and hold the lock. This works on Linux
    only; elsewhere the job runs to its end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)


def run_job(job: str, *, device: str, size: Size, lock: int) -> Outcome:
    """Run one job in a child process that inherits ``lock``; its messages and progress go to the terminal."""
    command = [sys.executable, str(ROOT / JOBS[job]), "--device", device, *size.arguments]
    start = time.perf_counter()
    # The job shares this standard error, since progress bars need the terminal. It prints the path of its report.
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


def write_index(*, publish: bool) -> int:
    """Write the index of this machine, or the committed one, and return the exit status of the script that does it."""
    command = [sys.executable, str(ROOT / "scripts" / "index_reports.py"), *([] if publish else ["--own"])]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def summary(outcomes: list[Outcome], size: Size) -> Table:
    """Return the table that ends a run."""
    table = Table("job", "seconds", "report", title="framework-internals")
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"
    for outcome in outcomes:
        if outcome.report is not None:
            shown = outcome.report.relative_to(ROOT) if outcome.report.is_relative_to(ROOT) else outcome.report
            result = escape(str(shown))
        else:
            result = f"failed with status {outcome.status}; its message is above"
        table.add_row(outcome.job, numbers.significant(outcome.seconds), result)
    total = sum(outcome.seconds for outcome in outcomes)
    table.add_section()
    index = f"{size.index} is the index" if size.index else ""
    table.add_row("all", numbers.significant(total), index)
    return table


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there is a GPU.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Run only this job; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller measurements, written to reports/own-<machine>-quick/.")
    ] = False,
    publish: Annotated[
        bool,
        typer.Option("--publish", help="Write reports/<machine>/ and the committed index, which are to be committed."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Repeat the jobs that an unfinished run of this commit has finished.")
    ] = False,
) -> None:
    """Run the main job of every lens and the end-to-end step, continue past failures, and sum up.

    The reports stand in reports/own-<machine>/ of every lens, and their index in framework-internals/THIS_MACHINE.md;
    git ignores both. An interrupted run continues when it is started again: finished jobs are not repeated.
    """
    with one_line_errors("run_all"):
        if unknown := [name for name in only or () if name not in JOBS]:
            raise UserError(f"--only takes one of {', '.join(JOBS)}; got {', '.join(unknown)}")
        if publish and quick:
            raise UserError("--publish writes the reports of a whole run; remove --quick or --publish")
        resolved, size = resolve_device(device), Size(quick, publish)
        with only_run(resolved, size) as kept:
            if not fresh and only is None:
                kept.load()
            outcomes = _run(only, resolved, kept, size)
            index_status = 0
            if size.index:
                with progress.working("index of reports"):
                    index_status = write_index(publish=publish)
            failed = [outcome.job for outcome in outcomes if outcome.report is None]
            if not failed and only is None:
                kept.path.unlink(missing_ok=True)  # the next run measures everything
        # A truncated path is useless in a log file: without a terminal the table is as wide as it needs to be.
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(summary(outcomes, size))
    if index_status != 0:
        failed.append("index of reports")
    if failed:
        print(f"run_all: failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED if outcomes and outcomes[-1].status == INTERRUPTED else 1)


def _run(only: list[str] | None, device: Device, kept: Progress, size: Size) -> list[Outcome]:
    console = Console()
    jobs = [job for job in JOBS if only is None or job in only]
    outcomes: list[Outcome] = []
    for number, job in enumerate(jobs, start=1):
        if (before := kept.outcome(job)) is not None:
            console.print(
                f"[bold]{number}/{len(jobs)} {job}[/bold] was finished by the previous run (--fresh repeats it)"
            )
            outcomes.append(before)
            continue
        console.print(f"[bold]{number}/{len(jobs)} {job}[/bold] on {device}")
        outcomes.append(run_job(job, device=device, size=size, lock=kept.lock))
        if only is None:
            kept.note(outcomes[-1])
        if outcomes[-1].status == INTERRUPTED:
            break
    return outcomes


if __name__ == "__main__":
    typer.run(main)

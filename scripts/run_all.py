"""Run every subproject's ``scripts/run.py`` and the end-to-end step, sum up, and write the index of reports."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from benchkit.processes.resources import user_cache
from benchkit.results import MAIN, load, reported, write_text_atomically
from benchkit.run import DURATION, parse_duration

ROOT = Path(__file__).resolve().parents[1]
END_TO_END = "end-to-end"
# Of a run's time, how much each job gets: what it takes on two cores of an AVX-512 server, in seconds. In a quick run
# on a GPU, compiling takes the most.
SHARES = {**{name: manifest.seconds for name, manifest in lenses.manifests().items()}, END_TO_END: 105}
QUICK_SHARES_GPU = {
    **{name: manifest.quick_seconds_gpu for name, manifest in lenses.manifests().items()}, END_TO_END: 35
}  # fmt: skip
# In this order, since what a job takes beyond its share is missing in the end.
JOBS = {
    END_TO_END: Path("scripts", "end_to_end.py"),
    **{lens: Path("framework-internals", lens, "scripts", "run.py") for lens in lenses.manifests()},
}
SEVERAL_GPUS = "end-to-end on several GPUs"  # a job of whole runs on a machine that has them
SEVERAL_GPUS_SECONDS = 240  # its share
TUNING = 360  # seconds more of it for the whole step, where a machine has no rows of lowerings yet
BUDGET, QUICK_BUDGET = 720.0, 180.0  # seconds
STARTING = 10.0  # seconds that each job needs before it measures: its process, its imports, a GPU's context
INTERRUPTED = 130
ENDING = 10.0  # seconds in which a job that was interrupted ends
PATIENCE = 60.0  # seconds that a job of a run that was killed is given to end
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Size:
    """Which run it is, and where its reports go.

    Attributes:
        quick: Fewer and smaller measurements; the index leaves their reports out.
        publish: The reports go to the committed place.
        budget: Seconds for all jobs, first builds apart; infinity for no limit.
    """

    quick: bool = False
    publish: bool = False
    budget: float = math.inf

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
    """How one job ended.

    Attributes:
        job: Its name.
        seconds: How long it took.
        status: Its exit status.
        report: The path that the job printed, or None when it failed.
        apart: Seconds of it that went into first builds, which no budget counts.
    """

    job: str
    seconds: float
    status: int
    report: Path | None
    apart: float = 0.0


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
        before: Seconds that each job took the last time that it succeeded, first builds apart; for the estimate.
    """

    path: Path
    lock: int
    commit: str
    done: dict[str, tuple[float, str]] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)

    def load(self, *, go_on: bool) -> None:
        """Load the seconds of earlier runs; to go on, also the jobs that one of this commit finished, with reports."""
        try:
            kept = json.loads(self.path.read_text())
            done = {job: (float(seconds), str(report)) for job, (seconds, report) in kept["done"].items()}
            before = {job: float(seconds) for job, seconds in kept["before"].items()}
            same = bool(self.commit) and kept["commit"] == self.commit
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it was damaged
            return
        self.before = before
        if same and go_on:
            self.done = {job: what for job, what in done.items() if Path(what[1]).exists()}

    def note(self, outcome: Outcome) -> None:
        """Keep a job that succeeded."""
        if outcome.report is not None:
            self.done[outcome.job] = (outcome.seconds, str(outcome.report))
            self.before[outcome.job] = outcome.seconds - outcome.apart
            self._write()

    def finish(self) -> None:
        """Forget the finished jobs: the next run measures everything."""
        self.done = {}
        self._write()

    def _write(self) -> None:
        write_text_atomically(self.path, json.dumps({"commit": self.commit, "done": self.done, "before": self.before}))

    def outcome(self, job: str) -> Outcome | None:
        """Return how a job ended in the earlier run, or None if it has to run."""
        if job not in self.done:
            return None
        seconds, report = self.done[job]
        return Outcome(job, seconds, 0, Path(report))


@contextmanager
def only_run(device: Device, size: Size) -> Iterator[Progress]:
    """Take the lock of a run on this device and of this size."""
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
    environment = capture(device, root=ROOT)
    return "" if environment.dirty else environment.commit or ""


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
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):  # it has ended, or had not written its number yet
        return False
    except PermissionError:  # another user's
        pass
    return True


def _end_with(parent: int) -> None:
    """In the job's process, before it starts: ask the kernel to interrupt it when the run ends, also when it is killed.

    Otherwise it would go on measuring and hold the lock, as it does where there is no Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os.kill(os.getpid(), signal.SIGTERM)


def run_job(job: str, *, device: str, size: Size, seconds: float, lock: int) -> Outcome:
    """Run one job in a child process that inherits ``lock``; its messages and progress go to the terminal."""
    limit = [] if math.isinf(seconds) else ["--budget", f"{seconds:.0f}s"]
    script, part = (JOBS[END_TO_END], ["--sweep"]) if job == SEVERAL_GPUS else (JOBS[job], [])
    command = [sys.executable, str(ROOT / script), *part, "--device", device, *size.arguments, *limit]
    start = time.perf_counter()
    # The job shares this standard error, since progress bars need the terminal. It prints the path of its report.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, pass_fds=[lock], preexec_fn=partial(_end_with, os.getpid()),
        env={**os.environ, **bytecode()},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            # The terminal's interrupt reaches the job too, and it keeps what it measured. A stop button's does not.
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
            process.terminate()  # no signal is sent to a process that has ended
            process.wait()
            return Outcome(job, time.perf_counter() - start, INTERRUPTED, None)
    lines = output.strip().splitlines()
    report = Path(lines[-1]) if process.returncode == 0 and lines else None
    apart = 0.0 if report is None or part else _first_builds(report)
    return Outcome(job, time.perf_counter() - start, process.returncode, report, apart)


def bytecode() -> dict[str, str]:
    """What makes the jobs keep compiled Python where torch's is neither kept already nor would be.

    Otherwise each process compiles torch's modules again, for ten seconds or more: an image whose packages were
    installed without bytecode, and which is read-only or sets ``PYTHONDONTWRITEBYTECODE``.
    """
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    module = Path(torch.origin).with_name("_dynamo") / "convert_frame.py"  # of those that take long, the last one
    kept = Path(importlib.util.cache_from_source(module))
    if kept.exists() or not module.exists() or not (sys.dont_write_bytecode or not os.access(module.parent, os.W_OK)):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(user_cache() / "bytecode")}


def _first_builds(report: Path) -> float:
    """The seconds of first builds in the run that wrote a report."""
    return sum(record["first builds"].value for record in load(report.parent / MAIN).select(DURATION))


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
        elif outcome.status == INTERRUPTED:
            result = "interrupted"
        else:
            result = f"failed with status {outcome.status}; its message is above"
        table.add_row(outcome.job, numbers.significant(outcome.seconds), result)
    total = sum(outcome.seconds for outcome in outcomes)
    table.add_section()
    table.add_row("all", numbers.significant(total), f"{size.index} is the index" if size.index else "")
    return table


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there is a GPU.")] = "auto",
    only: Annotated[list[str] | None, typer.Option(help="Run only this job; may be repeated.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller measurements, written to reports/own-<machine>-quick/.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for all jobs, such as 12m, the default, or 3m, that of --quick; set-up and first builds are "
            "counted apart. --only and --publish have none by default.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="No budget: every measurement with all its repeats.")] = False,
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
        if full and (quick or budget is not None):
            raise UserError("--full has no budget and leaves nothing out; remove --full, or --quick and --budget")
        if budget is not None:
            seconds = parse_duration(budget)
        else:
            seconds = math.inf if full or publish or only else QUICK_BUDGET if quick else BUDGET
        resolved, size = resolve_device(device), Size(quick, publish, seconds)
        with only_run(resolved, size) as kept:
            kept.load(go_on=not fresh and only is None)
            outcomes = _run(only, resolved, kept, size)
            index_status = 0
            if size.index:
                with progress.working("index of reports"):
                    index_status = write_index(publish=publish)
            interrupted = [each.job for each in outcomes if each.status == INTERRUPTED]
            failed = [each.job for each in outcomes if each.report is None and each.status != INTERRUPTED]
            if not (failed or interrupted) and only is None:
                kept.finish()
        # A truncated path is useless in a log file: without a terminal the table is as wide as it needs to be.
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(summary(outcomes, size))
    if index_status != 0:
        failed.append("index of reports")
    for how, jobs in (("failed", failed), ("interrupted", interrupted)):
        if jobs:
            print(f"run_all: {how}: {', '.join(jobs)}", file=sys.stderr)
    if failed or interrupted:
        raise typer.Exit(INTERRUPTED if interrupted else 1)


def _run(only: list[str] | None, device: Device, kept: Progress, size: Size) -> list[Outcome]:
    console = Console()
    jobs = [job for job in JOBS if only is None or job in only]
    if only is None and not size.quick and _has_several(device):
        jobs.append(SEVERAL_GPUS)
    to_do = [job for job in jobs if kept.outcome(job) is None]
    left, shares = size.budget, _shares(device, size)
    outcomes: list[Outcome] = []
    for number, job in enumerate(jobs, start=1):
        if (before := kept.outcome(job)) is not None:
            console.print(
                f"[bold]{number}/{len(jobs)} {job}[/bold] was finished by the previous run (--fresh repeats it)"
            )
            outcomes.append(before)
            continue
        measuring = max(left - STARTING * len(to_do), 1.0)
        share = STARTING + measuring * shares[job] / sum(shares[name] for name in to_do)
        console.print(f"[bold]{number}/{len(jobs)} {job}[/bold] on {device}{_outlook(kept, to_do, left, share)}")
        outcomes.append(run_job(job, device=device, size=size, seconds=share, lock=kept.lock))
        to_do.remove(job)
        left -= outcomes[-1].seconds - outcomes[-1].apart
        if only is None:
            kept.note(outcomes[-1])
        if outcomes[-1].status == INTERRUPTED:
            break
    return outcomes


def _shares(device: Device, size: Size) -> dict[str, int]:
    if size.quick:
        return QUICK_SHARES_GPU if device == "cuda" else SHARES
    from whole_step.tuning import tuned  # here, since it imports torch

    untuned = math.isfinite(size.budget) and not tuned(device)
    end_to_end = SHARES[END_TO_END] + (TUNING if untuned else 0)
    return {**SHARES, END_TO_END: end_to_end, SEVERAL_GPUS: SEVERAL_GPUS_SECONDS}


def _has_several(device: Device) -> bool:
    if device == "cpu":
        return False
    import torch

    return torch.cuda.device_count() > 1


def _outlook(kept: Progress, to_do: list[str], left: float, share: float) -> str:
    """How long the job may take, and how long all that is left will: the estimate, corrected by each job that ends."""
    known = sum(kept.before[job] for job in to_do) if all(job in kept.before for job in to_do) else math.inf
    parts = [] if math.isinf(share) else [f"at most {_minutes(share)}"]
    if math.isfinite(expected := min(known, left)):
        parts.append(f"{_minutes(max(expected, 0.0))} to go{' by the last run' if known < left else ' at most'}")
    return "".join(f", {part}" for part in parts)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


if __name__ == "__main__":
    typer.run(main)

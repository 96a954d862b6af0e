"""The main job of a lens, and the command line of every ``scripts/run.py``: measure, keep results, write the report."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchkit import progress
from benchkit.command import one_line_errors
from benchkit.device import Device, resolve_device
from benchkit.environment import Environment, capture
from benchkit.errors import UserError, machine_fault
from benchkit.report import ReportSpec, write
from benchkit.results import WRITING, Json, Label, Quantity, Record, Recorder, reported

# Of --time-limit, for drawing the figures and writing the report at the end.
_REPORT_SECONDS = 20.0


@dataclass(frozen=True)
class Lens:
    """One subproject, as its ``scripts/run.py`` and the index of reports see it.

    Attributes:
        name: the folder's name.
        root: the folder.
        configure: sizes, dtypes and counts for (device, quick), as plain JSON; it goes into the results.
        collect: does the measuring, and hands each record to the run as soon as it is there.
        report: turns results into a report.
        sweep: a part that takes far longer than the main job: adds to what a complete run has measured, one piece after
            the other, until it is done or the seconds that it is given (None: no limit) are over; called again, it goes
            on with what is missing. None for a lens without.
    """

    name: str
    root: Path
    configure: Callable[[Device, bool], Mapping[str, Json]]
    collect: Callable[[Run], None]
    report: ReportSpec
    sweep: Callable[[Run, float | None], None] | None = None


@dataclass(frozen=True)
class Run:
    """One run in progress.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        configuration: what the lens's ``configure`` returned.
        recorder: where records go.
    """

    device: Device
    configuration: Mapping[str, Json]
    recorder: Recorder

    def add(self, record: Record) -> None:
        """Keep a record; it is on disk when this returns."""
        self.recorder.add(record)

    def add_all(self, records: Iterable[Record]) -> None:
        """Keep records that belong together; they are on disk when this returns."""
        self.recorder.add_all(records)

    def record(
        self,
        name: str,
        labels: Mapping[str, Label] | None = None,
        values: Mapping[str, Quantity] | None = None,
        data: Json = None,
    ) -> None:
        """Make a record and keep it."""
        self.add(Record(name, labels or {}, values or {}, data))

    def absent(self, what: str, why: str) -> None:
        """Say what this machine cannot measure, and why: a noun phrase and a clause without full stops."""
        self.recorder.absent(what, why)

    def working(self, description: str) -> AbstractContextManager[None]:
        """A spinner on a terminal while one step runs."""
        return progress.working(description)


def main(lens: Lens) -> None:
    """Parse the command line of a ``scripts/run.py`` and do what it says; exits the process.

    Exit status: 0 done; 2 for what the user can mend, in one line; 130 interrupted (from the keyboard, or told to end),
    with what was measured kept.
    """

    def command(
        device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where there is a GPU.")] = "auto",
        quick: Annotated[
            bool, typer.Option("--quick", help="Fewer and smaller measurements, written to reports/<machine>-quick/.")
        ] = False,
        out: Annotated[Path | None, typer.Option(help="Folder for the report; reports/<machine>/ by default.")] = None,
        render_only: Annotated[
            bool,
            typer.Option(
                "--render-only", help="Measure nothing: write report.md anew from each results.json there is."
            ),
        ] = False,
        sweep: Annotated[
            bool,
            typer.Option("--sweep", help="The long part, for lenses that have one: add what is missing to the report."),
        ] = False,
        time_limit: Annotated[
            float | None, typer.Option(min=1.0, help="Seconds after which --sweep ends with what it has.")
        ] = None,
    ) -> None:
        with one_line_errors(lens.name):
            if time_limit is not None and not sweep:
                raise UserError("--time-limit is for --sweep, which can be gone on with; add --sweep or leave it out")
            if sweep:
                print(sweep_and_write(lens, device=device, quick=quick, out=out, time_limit=time_limit), flush=True)
            elif render_only:
                for directory in [out] if out else report_directories(lens.root):
                    print(write(directory, lens.report), flush=True)
            else:
                print(measure_and_write(lens, device=device, quick=quick, out=out), flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has started ends with it, as by Ctrl-C
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(help=f"Measure, and write the report of {lens.name}.")(command)
    app()


def report_directories(root: Path) -> list[Path]:
    """The folders under ``root/reports`` that hold a complete run."""
    return sorted(path.parent for path in root.glob("reports/*/results.json"))


def sweep_and_write(lens: Lens, *, device: str, quick: bool, out: Path | None, time_limit: float | None) -> Path:
    """Go on with the long part of a lens, in the folder of a complete run or in an empty one.

    Args:
        lens: which one.
        device: as for :func:`measure_and_write`.
        quick: likewise.
        out: likewise.
        time_limit: seconds from now on, those of writing the report included; None for none.

    Returns:
        The path of the report.

    Raises:
        UserError: for a lens without such a part, and for what else the user can mend.
        typer.Exit: with status 130 when interrupted from the keyboard.
    """
    start = time.monotonic()
    if lens.sweep is None:
        raise UserError(f"{lens.name} has no long part; leave out --sweep")
    resolved = resolve_device(device)
    environment = capture(resolved, root=lens.root)
    directory = out or _directory(lens, environment, quick)
    configuration = {"sweep": lens.configure(resolved, quick)["sweep"]}
    with only_writer(directory):
        recorder = Recorder.going_on(
            directory,
            lens=lens.name,
            environment=environment,
            configuration=configuration,
            migrate=lens.report.migrate,
        )
        run = Run(resolved, recorder.results.configuration, recorder)
        left = None if time_limit is None else time_limit - _REPORT_SECONDS - (time.monotonic() - start)
        with _keeping(recorder):
            lens.sweep(run, left)
        return write(directory, lens.report)


def _directory(lens: Lens, environment: Environment, quick: bool) -> Path:
    return lens.root / "reports" / (environment.machine + ("-quick" if quick else ""))


def measure_and_write(lens: Lens, *, device: str, quick: bool, out: Path | None) -> Path:
    """Do the main job of a lens.

    Args:
        lens: which one.
        device: ``auto``, ``cpu`` or ``cuda``.
        quick: as the lens's ``configure`` understands it.
        out: where to write; by default ``reports/<machine>/`` in the lens's folder, with ``-quick`` when quick.

    Returns:
        The path of the report.

    Raises:
        UserError: for what the user can mend.
        typer.Exit: with status 130 when interrupted from the keyboard.
    """
    resolved = resolve_device(device)
    environment = capture(resolved, root=lens.root)
    directory = out or _directory(lens, environment, quick)
    configuration = dict(lens.configure(resolved, quick))
    recorder = Recorder(directory, lens=lens.name, environment=environment, configuration=configuration)
    with only_writer(directory):
        with _keeping(recorder):
            lens.collect(Run(resolved, configuration, recorder))
        recorder.finish()
        return write(directory, lens.report)


@contextmanager
def _keeping(recorder: Recorder) -> Iterator[None]:
    """Inside, a run measures: ended, or refused something by the machine, it says where what it measured is."""
    recorder.begin()
    gc.collect()
    gc.freeze()  # what was imported stays: the collection before every comparison need not walk a framework's objects
    try:
        yield
    except KeyboardInterrupt:
        print(f"{recorder.results.lens}: interrupted; {_kept(recorder)}", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        raise UserError(f"{fault} ({_kept(recorder)})") from error
    finally:
        gc.unfreeze()


def _kept(recorder: Recorder) -> str:
    return f"{len(recorder.results.records)} records are kept in {recorder.path}"


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Inside, no other run writes into a folder of reports; made if need be.

    Args:
        directory: ``reports/<machine>/``.

    Raises:
        UserError: if another run does, or if the folder cannot be made.
    """
    with reported(directory):
        directory.mkdir(parents=True, exist_ok=True)
        folder = os.open(directory, os.O_RDONLY)  # the lock is the folder's own: no file is left behind
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run writes {directory}; wait for it, end it, or name another folder: --out"
            ) from None
        for half_written in directory.rglob(f".*{WRITING}"):  # by a run that was killed
            half_written.unlink(missing_ok=True)
        yield
    finally:
        os.close(folder)

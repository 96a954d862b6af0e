"""The command line of every ``scripts/run.py``: measure, save results, write the report."""

from __future__ import annotations

import gc
import math
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from benchkit.command import one_line_errors, progress
from benchkit.command.errors import printable
from benchkit.device import Device, resolve_device
from benchkit.environment import capture
from benchkit.errors import UserError, machine_fault, why_missing
from benchkit.processes import budget, memory
from benchkit.report import DeclareReport, write
from benchkit.results import (
    MAIN,
    SWEEP,
    Absence,
    Json,
    Label,
    Quantity,
    Record,
    Recorder,
    Results,
    load_report,
    only_writer,
)

# A machine's own reports stand beside the committed ones, under this prefix, which git ignores.
OWN = "own-"

# Seconds that are kept for drawing the figures and writing the report: at most, of --budget.
_REPORT_SECONDS = 20.0

# The record that says how long a run took, in seconds, and how many of them went into first builds.
DURATION = "duration"


@dataclass(frozen=True)
class Lens:
    """One subproject, as its ``scripts/run.py`` and the index of reports see it.

    Attributes:
        name: Name of the folder.
        root: The folder.
        configure: Returns sizes, dtypes and counts for (device, quick) as plain JSON, which is saved in the results.
        collect: Measures, and adds each record to the run as soon as it exists.
        report: Turns results into a report.
        sweep: Measures a part that takes much longer than ``collect``, into a document of its own, one piece at a time,
            until everything is measured or the budget is spent. The next call continues with what is missing. None for
            a lens without such a part.
        fit: Returns what is different in a configuration on a device with so many bytes free: smaller sizes, with a
            sentence for each under :data:`benchkit.results.SMALLER`. None for a lens whose sizes fit everywhere.
    """

    name: str
    root: Path
    configure: Callable[[Device, bool], Mapping[str, Json]]
    collect: Callable[[Run], None]
    report: DeclareReport
    sweep: Callable[[Run], None] | None = None
    fit: Callable[[Mapping[str, Json], Device, int], Mapping[str, Json]] | None = None

    def configured(self, device: Device, quick: bool) -> dict[str, Json]:
        """Return the configuration for this machine, as it is now."""
        asked = dict(self.configure(device, quick))
        return asked if self.fit is None else asked | dict(self.fit(asked, device, memory.free(device)))

    def load_report(self, directory: Path) -> Results:
        """Read a folder of reports, see :func:`benchkit.results.load_report`.

        Raises:
            UserError: Also if another lens wrote what is there.
        """
        results = load_report(directory)
        if results.lens != self.name:
            raise UserError(f"{directory} holds results of {results.lens}, not of {self.name}; name another folder")
        return results


@dataclass(frozen=True)
class Step:
    """One measurement of a run (:meth:`Run.steps`).

    Attributes:
        what: Its name as readers of the report know it, a noun phrase without a full stop.
        measure: Takes the measurement. What it returns or yields is added at once: records, and absences of its parts.
        needs: Seconds that it takes at least, compilation included; with less time left it is left out.
        memory: Bytes of the device that it takes at most, as far as they are known; with fewer free it is not begun.
    """

    what: str
    measure: Callable[[], Iterable[Record | Absence] | None]
    needs: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class Run:
    """One run in progress.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        configuration: What the lens's ``configure`` returned.
        recorder: Saves the records.
    """

    device: Device
    configuration: Mapping[str, Json]
    recorder: Recorder

    def add(self, record: Record) -> None:
        """Add a record; it is on disk when this returns."""
        self.recorder.add(record)

    def add_all(self, records: Iterable[Record]) -> None:
        """Add records that belong together; they are on disk when this returns."""
        self.recorder.add_all(records)

    def record(
        self,
        name: str,
        labels: Mapping[str, Label] | None = None,
        values: Mapping[str, Quantity] | None = None,
        data: Json = None,
    ) -> None:
        """Make a record and add it."""
        self.add(Record(name, labels or {}, values or {}, data))

    def absent(self, what: str, why: str) -> None:
        """Say what this run does not measure (a noun phrase) and why (a clause), both without a full stop."""
        self.recorder.absent(what, why)

    def working(self, description: str) -> AbstractContextManager[None]:
        """Show a spinner on a terminal while one step runs."""
        return progress.working(description)

    def steps(self, steps: Iterable[Step]) -> None:
        """Take measurements one after another, the most important first; none that fails ends the run.

        A step that fails (too little memory, a kernel, a child process that died, a tool that is missing) becomes an
        absence with its reason; what it had added stays. A step may take half of the time that the budget has left
        (:mod:`benchkit.processes.budget`), the last one all of it. Those for which there is none become one absence,
        which says how to measure them.
        """
        steps, left_out = list(steps), []
        for number, step in enumerate(steps, start=1):
            if budget.left() <= step.needs:
                left_out.append(step.what)
                continue
            place = f" ({number} of {len(steps)})" if len(steps) > 1 else ""
            share = budget.left() if number == len(steps) else max(budget.left() / 2, step.needs)
            try:
                with budget.within(share), self.working(f"{step.what}{place}"):
                    self._take(step)
            except budget.OutOfTime:
                left_out.append(step.what)
        if left_out:
            self.recorder.left_out(left_out)

    def _take(self, step: Step) -> None:
        """Take one measurement, or record why there is none."""
        try:
            _wait_for_gpu(self.device)  # raises where an earlier kernel has left the GPU unusable
            if step.memory:
                memory.require(step.memory, self.device)
            for outcome in step.measure() or ():
                if isinstance(outcome, Absence):
                    self.absent(_capital(outcome.what), outcome.why)
                else:
                    self.add(outcome)
            _settle(self.device)  # raises where a kernel of this step failed after it had been launched
            return
        except budget.OutOfTime:
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc(file=sys.stderr)
            reason = why_missing(error)
        gc.collect()  # what the failed step held: an autograd graph is gigabytes, and this may be the lack of memory
        with suppress(RuntimeError):  # where the step has left the GPU unusable
            _settle(self.device)
        self.absent(_capital(step.what), printable(reason))  # compilers colour what they say


def _settle(device: Device) -> None:
    """Wait for the GPU, and give the memory that torch keeps for later back to it."""
    if (torch := _wait_for_gpu(device)) is not None:
        gc.collect()
        torch.cuda.empty_cache()


def _wait_for_gpu(device: Device) -> ModuleType | None:
    """Wait for what torch has started on the GPU; return torch where it is imported and may have."""
    torch = sys.modules.get("torch") if device == "cuda" else None
    if torch is not None:
        torch.cuda.synchronize()
    return torch


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(lens: Lens) -> None:
    """Parse the command line of a ``scripts/run.py``, execute it and exit.

    Exit status: 0 for success; 2 for an error that the user can fix, reported in one line; 130 after an interrupt or
    SIGTERM, with all finished measurements saved.
    """

    def command(
        device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda if there is a GPU.")] = "auto",
        quick: Annotated[
            bool,
            typer.Option("--quick", help="Fewer and smaller measurements, written to reports/own-<machine>-quick/."),
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option(help="Folder for the report; reports/own-<machine>/ by default, which git ignores."),
        ] = None,
        publish: Annotated[
            bool, typer.Option("--publish", help="Write reports/<machine>/, which is to be committed.")
        ] = False,
        render_only: Annotated[
            bool,
            typer.Option("--render-only", help="Measure nothing; render every report.md again from its results."),
        ] = False,
        limit: Annotated[
            str | None,
            typer.Option(
                "--budget",
                help="Time for the measurements, such as 90s or 12m: with less, there are fewer repeats, and the least "
                "important ones are left out by name; --sweep leaves the rest to its next call. No limit by default. "
                "First builds are counted apart.",
            ),
        ] = None,
        sweep: Annotated[
            bool,
            typer.Option("--sweep", help="Measure what is missing of the long part, for lenses that have one."),
        ] = False,
        again: Annotated[
            list[str] | None,
            typer.Option(
                help="With --sweep: measure again what another commit measured and has this text in a label=value, "
                "such as variant=jax or gpus=2; '' means everything. An old row stays until there is a new one.",
            ),
        ] = None,
    ) -> None:
        if publish and (quick or out):
            raise UserError("--publish writes the report of a whole run to its own place; remove --quick or --out")
        if again is not None and not sweep:
            raise UserError("--again is for the long part, whose rows stay from call to call; add --sweep")
        seconds = math.inf if limit is None else parse_duration(limit)
        if render_only:
            if limit is not None:
                raise UserError("--render-only measures nothing; remove it, or --budget")
            if not (directories := [out] if out else report_directories(lens.root)):
                raise UserError("there is no report yet to render again; run without --render-only")
            for directory in directories:
                print(write(directory, lens.report, lens.load_report(directory)), flush=True)
            return
        run = partial(sweep_and_write, again=again or ()) if sweep else measure_and_write
        with budget.within(seconds - min(_REPORT_SECONDS, seconds / 10)):
            report = run(lens, device=device, quick=quick, out=out, publish=publish)
        print(report, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # child processes end as after Ctrl-C
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(help=f"Measure, and write the report of {lens.name}.")(command)
    with one_line_errors(lens.name):
        app()


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``12m`` or ``1.5h``; a number alone is seconds.

    Raises:
        UserError: If the text is not one.
    """
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())) is None or not float(match[1]):
        raise UserError(f"expected a duration such as 90s, 12m or 1h, received {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def report_directories(root: Path) -> list[Path]:
    """The folders under ``root/reports`` that contain results, committed or not."""
    return sorted({path.parent for name in (MAIN, SWEEP) for path in root.glob(f"reports/*/{name}")})


def committed_reports(root: Path) -> list[Path]:
    """The folders under ``root/reports`` with the results of a known machine, which are or will be committed."""
    return [
        path for path in report_directories(root) if not path.name.startswith(OWN) and not path.name.endswith("-quick")
    ]


def own_reports(root: Path) -> list[Path]:
    """The folders under ``root/reports`` with whole runs that were not published: those of this machine."""
    return [path for path in report_directories(root) if path.name.startswith(OWN) and not path.name.endswith("-quick")]


def sweep_and_write(
    lens: Lens, *, device: str, quick: bool, out: Path | None, publish: bool = False, again: Collection[str] = ()
) -> Path:
    """Continue the long part of a lens, in a document of its own beside that of the main run.

    The arguments are those of :func:`measure_and_write`, and ``again`` that of :meth:`Recorder.going_on`.

    Returns:
        The path of the report.

    Raises:
        UserError: If the lens has no such part, and for other errors that the user can fix.
        typer.Exit: With status 130 after an interrupt.
    """
    if lens.sweep is None:
        raise UserError(f"{lens.name} has no long part; remove --sweep")
    return _write(lens, lens.sweep, partial(Recorder.going_on, again=again), device, quick, out, publish)


def measure_and_write(lens: Lens, *, device: str, quick: bool, out: Path | None, publish: bool = False) -> Path:
    """Measure everything that a lens is configured for, and write its report.

    Args:
        lens: The lens.
        device: ``auto``, ``cpu`` or ``cuda``.
        quick: Passed to the lens's ``configure``: fewer and smaller measurements.
        out: Folder of the report; by default ``reports/own-<machine>/`` in the lens's folder, which git ignores, with
            ``-quick`` if quick.
        publish: Write ``reports/<machine>/`` instead, which is to be committed.

    Returns:
        The path of the report.

    Raises:
        UserError: For errors that the user can fix.
        typer.Exit: With status 130 after an interrupt.
    """
    start, apart = time.monotonic(), budget.seconds_apart()

    def collect(run: Run) -> None:
        lens.collect(run)
        durations = {"all": time.monotonic() - start, "first builds": budget.seconds_apart() - apart}
        run.record(DURATION, values={name: Quantity(seconds, "s") for name, seconds in durations.items()})
        run.recorder.finish()

    return _write(lens, collect, Recorder, device, quick, out, publish)


def _write(
    lens: Lens,
    measure: Callable[[Run], None],
    make_recorder: Callable[..., Recorder],
    device: str,
    quick: bool,
    out: Path | None,
    publish: bool,
) -> Path:
    """Measure into the recorder of a folder that no other run writes to, and write the report there."""
    resolved = resolve_device(device)
    environment = capture(resolved, root=lens.root)
    name = environment.machine if publish else f"{OWN}{environment.machine}{'-quick' if quick else ''}"
    directory = out or lens.root / "reports" / name
    with only_writer(directory):
        configuration = lens.configured(resolved, quick)
        recorder = make_recorder(directory, lens=lens.name, environment=environment, configuration=configuration)
        with _keeping(recorder):
            measure(Run(resolved, recorder.results.configuration, recorder))
        return write(directory, lens.report)


@contextmanager
def _keeping(recorder: Recorder) -> Iterator[None]:
    """Around a measurement: after an interrupt or an error of the machine, say where the finished records are."""
    frozen = gc.get_freeze_count()  # by whoever measures in a process of their own
    try:
        recorder.begin()
        gc.collect()
        gc.freeze()  # the collection before every comparison then skips the objects of imported frameworks
        yield
    except KeyboardInterrupt:
        print(f"{recorder.results.lens}: interrupted; {_kept(recorder)}", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        if (fault := machine_fault(error)) is None:
            raise
        raise UserError(f"{fault} ({_kept(recorder)})") from error
    finally:
        if not frozen:
            gc.unfreeze()


def _kept(recorder: Recorder) -> str:
    return f"{len(recorder.results.records)} records are kept in {recorder.path}"

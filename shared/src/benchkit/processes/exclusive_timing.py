"""Exclusive timing: one process measures at a time, and the others are stopped meanwhile.

Compiling takes minutes and mostly one core; measuring takes a second and needs the whole machine. So many processes
compile side by side, and each asks for exclusive timing before it measures (:func:`exclusive`). Their owner
(:class:`ExclusiveTiming`) stops all others with SIGSTOP, waits until the GPU has finished their work, lets the one
measure, and lets the others continue. Work that may run beside compilation but not beside its like, such as the
timings of autotuning, takes a lock (:func:`one_at_a_time`).

Pauses are recorded: when a process was stopped or waited for a lock (:func:`pauses`). They are subtracted from the
figures of the process (:class:`Stopwatch`). The time in which it was stopped does not count against its time limit
(:meth:`ExclusiveTiming.stopped_seconds`).

Owner and processes share a folder. A process that wants to measure creates ``<pid>.waiting``; the owner answers with
``<pid>.granted``; the process creates ``<pid>.finished`` when it has measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

# Begin and end, of ``time.time()``.
Pause = tuple[float, float]

# When this process waited for a lock.
_lock_waits: list[Pause] = []

_POLL_SECONDS = 0.02
# What a stopped process had queued on the GPU still runs: a few training steps at most.
_GPU_DRAIN_SECONDS = 0.3
_PAUSES = "pauses"
# A shorter wait for a lock is not recorded: a thousand of them are a twentieth of a second.
_SHORTEST_WAIT = 5e-5


@contextmanager
def exclusive(folder: Path | None) -> Iterator[None]:
    """In a measuring process: wait until the other processes are stopped; they continue when the block ends.

    Args:
        folder: The folder of the :class:`ExclusiveTiming`; None if no other process runs.
    """
    if folder is None:
        yield
        return
    waiting, granted, finished = (folder / f"{os.getpid()}.{what}" for what in ("waiting", "granted", "finished"))
    waiting.touch()
    while not granted.exists():
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        finished.touch()


@contextmanager
def one_at_a_time(folder: Path | None, what: str) -> Iterator[None]:
    """In a measuring process: hold a lock that the system releases when the process ends.

    Args:
        folder: See :func:`exclusive`.
        what: Name of the lock. A process must not ask for a lock that it has.
    """
    if folder is None:
        yield
        return
    with (folder / f"{what}.lock").open("a") as handle:
        begin = time.time()
        fcntl.flock(handle, fcntl.LOCK_EX)
        if (end := time.time()) - begin > _SHORTEST_WAIT:
            _lock_waits.append((begin, end))
        yield


def pauses(folder: Path | None) -> list[Pause]:
    """When this process was stopped or waited for a lock so far: sorted intervals that do not overlap."""
    file = None if folder is None else folder / _PAUSES
    stopped = file.read_text().splitlines() if file is not None and file.exists() else []
    intervals = sorted([*((float(begin), float(end)) for begin, end in map(str.split, stopped)), *_lock_waits])
    merged: list[Pause] = []
    for begin, end in intervals:
        if merged and begin <= merged[-1][1]:  # stopped while it waited for a lock
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


class Stopwatch:
    """Measures the seconds that a block takes, without the pauses of its process.

    Args:
        folder: See :func:`exclusive`.

    Attributes:
        seconds: Seconds that the block took; set when it ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.seconds = 0.0
        self._folder = folder

    def __enter__(self) -> Stopwatch:
        self._wall = time.time()
        self._start = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        took, wall = time.perf_counter() - self._start, time.time()
        paused = sum(max(min(end, wall) - max(begin, self._wall), 0.0) for begin, end in pauses(self._folder))
        self.seconds = max(took - paused, 0.0)


@dataclass
class _Stop:
    """When a process group was stopped and when it continued, of ``time.monotonic()``."""

    begin: float
    end: float = math.inf


class ExclusiveTiming:
    """Lets processes measure one after the other, inside a ``with`` block.

    Args:
        folder: Folder that the processes share; made if it does not exist.
        groups: Returns the groups of all processes that run now, as :meth:`benchkit.processes.Runner.groups` does. The
            number of a group is the process id of its first process.

    Attributes:
        fault: Why a pause could not be recorded; raised when the block ends.
    """

    def __init__(self, folder: Path, groups: Callable[[], Collection[int]]) -> None:
        self.folder = folder
        self.fault: OSError | None = None
        self._groups = groups
        self._stops: dict[int, list[_Stop]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ExclusiveTiming:
        self.folder.mkdir(exist_ok=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self.fault is not None and error is None:
            raise self.fault

    def stopped_seconds(self, group: int, since: float) -> float:
        """Seconds that a process group was stopped until now.

        Args:
            group: Its number.
            since: A time of ``time.monotonic()``. Before that, another group may have had the number.
        """
        now = time.monotonic()
        stops = self._stops.get(group, ())
        return sum(max(min(stop.end, now) - max(stop.begin, since), 0.0) for stop in list(stops))

    def _serve(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            for waiting in sorted(self.folder.glob("*.waiting"), key=lambda file: file.stat().st_mtime):
                waiting.unlink()
                try:
                    self._let_measure(int(waiting.stem))
                except OSError as error:  # such as a full disk: the pause is not recorded, and the others continue
                    self.fault = self.fault or error

    def _let_measure(self, process: int) -> None:
        """Stop all other processes until this one has measured or ended."""
        granted, finished = (self.folder / f"{process}.{what}" for what in ("granted", "finished"))
        stopped: dict[int, _Stop] = {}
        begin = time.time()
        try:
            self._stop_others(process, stopped)
            time.sleep(_GPU_DRAIN_SECONDS if stopped else 0.0)
            granted.touch()
            while process in self._groups() and not finished.exists() and not self._ended.wait(_POLL_SECONDS):
                self._stop_others(process, stopped)  # those that were started meanwhile
        finally:
            try:
                with (self.folder / _PAUSES).open("a") as file:  # before they continue, so that they find it
                    file.write(f"{begin!r} {time.time()!r}\n")
            finally:
                for group, stop in stopped.items():
                    with contextlib.suppress(ProcessLookupError):  # it was killed at its time limit
                        os.killpg(group, signal.SIGCONT)
                    stop.end = time.monotonic()
                granted.unlink(missing_ok=True)
                finished.unlink(missing_ok=True)

    def _stop_others(self, process: int, stopped: dict[int, _Stop]) -> None:
        for group in set(self._groups()) - {process} - stopped.keys():
            with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
                os.killpg(group, signal.SIGSTOP)
                stopped[group] = _Stop(time.monotonic())
                self._stops.setdefault(group, []).append(stopped[group])

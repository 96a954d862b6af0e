"""One process samples while all others stand still: how many processes compile side by side and are timed alone.

Compiling takes minutes and mostly a core, sampling a second and the whole machine. So processes that are ready wait
for their turn (:func:`alone`); the :class:`Conductor` stops every other process (``SIGSTOP``), lets the GPU run dry,
has the one sample, and lets the others go on. What may go on beside compiling but not beside its like, as autotuning's
own timings, holds a lock (:func:`one_at_a_time`). What a process was made to wait is written down, and taken out of its
own figures (:class:`Stopwatch`, :func:`pauses`); what it was stopped is no part of its time limit
(:meth:`Conductor.stood_still`). Nothing here imports torch.
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

Pause = tuple[float, float]

# When this process waited for a lock.
_waits: list[Pause] = []

_BEAT = 0.02
# What a process had queued on the GPU before it was stopped still runs: a few training steps at most.
_DRAIN = 0.3
_PAUSES = "pauses"
# A wait for a lock that is shorter than this is none: a thousand of them are a twentieth of a second.
_NOTICED = 5e-5


@contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """In a measuring process: wait for its turn, and hold it.

    Args:
        folder: of the :class:`Conductor`; None where nothing else runs.
    """
    if folder is None:
        yield
        return
    ready, go, over = (folder / f"{os.getpid()}.{what}" for what in ("ready", "go", "over"))
    ready.touch()
    while not go.exists():
        time.sleep(_BEAT)
    try:
        yield
    finally:
        over.touch()


@contextmanager
def one_at_a_time(folder: Path | None, what: str) -> Iterator[None]:
    """In a measuring process: hold a lock that goes with the process, whatever happens to it.

    Args:
        folder: as for :func:`alone`.
        what: what no two processes may do at once; not to be asked for again inside.
    """
    if folder is None:
        yield
        return
    with (folder / f"{what}.lock").open("a") as handle:
        begin = time.time()
        fcntl.flock(handle, fcntl.LOCK_EX)
        if (end := time.time()) - begin > _NOTICED:
            _waits.append((begin, end))
        yield


def pauses(folder: Path | None) -> list[Pause]:
    """When this process was made to wait so far: begin and end, of ``time.time()``, in order and apart."""
    file = None if folder is None else folder / _PAUSES
    stopped = file.read_text().splitlines() if file is not None and file.exists() else []
    found = sorted([*((float(begin), float(end)) for begin, end in map(str.split, stopped)), *_waits])
    apart: list[Pause] = []
    for begin, end in found:
        if apart and begin <= apart[-1][1]:  # stopped while it waited for a lock
            apart[-1] = (apart[-1][0], max(apart[-1][1], end))
        else:
            apart.append((begin, end))
    return apart


class Stopwatch:
    """Seconds that a block took, without those in which its process stood still.

    Args:
        folder: as for :func:`alone`.

    Attributes:
        seconds: once the block is over.
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
        still = sum(max(min(end, wall) - max(begin, self._wall), 0.0) for begin, end in pauses(self._folder))
        self.seconds = max(took - still, 0.0)


@dataclass
class _Stop:
    """When a process group was stopped, and when it went on; of ``time.monotonic()``."""

    begin: float
    end: float = math.inf


class Conductor:
    """Gives measuring processes their turns, one after the other, inside a ``with`` block.

    Args:
        folder: where they ask for it; made if need be.
        groups: process groups of all that run now, each named after its first process.

    Attributes:
        fault: why a turn could not be written down; raised when the block ends.
    """

    def __init__(self, folder: Path, groups: Callable[[], Collection[int]]) -> None:
        self.folder = folder
        self.fault: OSError | None = None
        self._groups = groups
        self._stops: dict[int, list[_Stop]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Conductor:
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

    def stood_still(self, group: int, since: float) -> float:
        """Seconds that a process group was stopped for others until now.

        Args:
            group: its number.
            since: of ``time.monotonic()``; before that, another group may have had the number.
        """
        now = time.monotonic()
        stops = self._stops.get(group, ())
        return sum(max(min(each.end, now) - max(each.begin, since), 0.0) for each in list(stops))

    def _serve(self) -> None:
        while not self._ended.wait(_BEAT):
            for ready in sorted(self.folder.glob("*.ready"), key=lambda file: file.stat().st_mtime):
                ready.unlink()
                try:
                    self._give(int(ready.stem))
                except OSError as error:  # a disk that is full: one turn's pauses are not known, and the others go on
                    self.fault = self.fault or error

    def _give(self, process: int) -> None:
        """Its turn, until it says that it is over or has ended."""
        go, over = (self.folder / f"{process}.{what}" for what in ("go", "over"))
        stopped: dict[int, _Stop] = {}
        begin = time.time()
        try:
            self._stop_others(process, stopped)
            time.sleep(_DRAIN if stopped else 0.0)
            go.touch()
            while process in self._groups() and not over.exists() and not self._ended.wait(_BEAT):
                self._stop_others(process, stopped)  # those that have begun meanwhile
        finally:
            try:
                with (self.folder / _PAUSES).open("a") as file:  # before they go on, so that they find it
                    file.write(f"{begin!r} {time.time()!r}\n")
            finally:
                for group, stop in stopped.items():
                    with contextlib.suppress(ProcessLookupError):  # it was ended at its time limit
                        os.killpg(group, signal.SIGCONT)
                    stop.end = time.monotonic()
                for file_of_the_turn in (go, over):
                    file_of_the_turn.unlink(missing_ok=True)

    def _stop_others(self, process: int, stopped: dict[int, _Stop]) -> None:
        for group in set(self._groups()) - {process} - stopped.keys():
            with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
                os.killpg(group, signal.SIGSTOP)
                stopped[group] = _Stop(time.monotonic())
                self._stops.setdefault(group, []).append(stopped[group])

"""An interpreter that has imported what every measurement needs, does nothing else, and forks a process for each.

Importing torch takes two seconds of every fresh interpreter, the compiler three more, and a report needs dozens of
processes. A process forked before anything was computed or compiled is as fresh, and starts where measuring starts.

The server (:func:`serve`) does one order at a time: a line of JSON comes in, the number of the forked process goes out,
and its exit status once it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, cast

# Seconds that a process group was stopped since a time of ``time.monotonic()``.
StoodStill = Callable[[int, float], float]


def never_stopped(group: int, since: float) -> float:
    """Where no other process has turns."""
    return 0.0


@dataclass(frozen=True)
class Order:
    """What a forked process is to do, and where.

    Attributes:
        request: file of a pickled :class:`compile_bench.measure.measurements.Request`.
        result: file for the answer.
        log: file for what it prints.
        environment: all of it.
        directory: its working directory.
        path: where it looks for modules.
    """

    request: str
    result: str
    log: str
    environment: dict[str, str]
    directory: str
    path: list[str]


class Nursery:
    """The server's owner; one order at a time.

    Args:
        modules: imported before the first fork. None of them may start threads of Python's or a GPU's driver.
        environment: of the server; what a module reads from it while it is imported comes from here.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._child = 0
        self._stopped = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the server
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from compile_bench.measure.nursery import serve; serve()", *modules],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        # Unbuffered: select() does not see the second of two lines that a buffer has taken in with the first.
        self._answers = cast(io.FileIO, cast(io.BufferedReader, self._server.stdout).raw)

    def run(self, order: Order, limit: float, stood_still: StoodStill = never_stopped) -> int | None:
        """Fork a process and wait for it; whatever is left of its process group is ended when this returns.

        Args:
            order: what it does.
            limit: seconds.
            stood_still: how many more it has, asked when they are over.

        Returns:
            The exit status, below 0 for a signal, or None if it had not ended within its time.
        """
        try:
            return self._answer(order, limit, stood_still)
        except BaseException:  # interrupted in between: what comes next would be the answer to this order
            self.close()
            raise

    def _answer(self, order: Order, limit: float, stood_still: StoodStill) -> int | None:
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the server has ended, as its next answer says
            self._server.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            self._server.stdin.flush()
        if not self._speaks_within(max(limit, _IMPORT_LIMIT)):
            self.stop()
            _end(self._server.pid)
        begun = self._answers.readline()
        if not begun:
            status = self._server.wait()
            self._log.seek(0)
            Path(order.log).write_bytes(self._log.read())
            return None if self._stopped else status
        self._child = int(begun)
        if self._stopped:
            _end(self._child)
        in_time = self._ends_within(limit, stood_still)
        _end(self._child)
        ended = self._answers.readline()
        self._child = 0
        status = int(ended) if ended else -signal.SIGKILL
        return status if in_time else None

    def _ends_within(self, limit: float, stood_still: StoodStill) -> bool:
        begin, left = time.monotonic(), limit
        while left > 0:
            if self._speaks_within(max(left, _BEAT)):
                return True
            left = begin + limit + stood_still(self._child, begin) - time.monotonic()
        return False

    def _speaks_within(self, seconds: float) -> bool:
        return bool(select.select([self._answers], [], [], seconds)[0])

    @property
    def usable(self) -> bool:
        """Whether it takes another order."""
        return not self._stopped and self._server.poll() is None

    @property
    def busy(self) -> bool:
        """Whether a forked process runs."""
        return self._child != 0

    @property
    def group(self) -> int:
        """The process group of what runs, named after the forked process; 0 where nothing does."""
        return self._child

    def stop(self) -> None:
        """End the process that runs; :meth:`run` returns its status."""
        self._stopped = True
        if self._child:
            _end(self._child)

    def close(self) -> None:
        """End the server and what it has forked."""
        self.stop()
        _end(self._server.pid)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._log.close()


# Seconds that the imports of a server are given; they are no part of what an order is limited to.
_IMPORT_LIMIT = 300.0

# Seconds between two looks at whether a forked process has ended.
_BEAT = 0.01

# Of this process, for all harnesses: what no order is done by at the moment, by modules and environment.
_idle: dict[tuple[object, ...], list[Nursery]] = defaultdict(list)
_choosing = threading.Lock()

# What interpreter, torch and OpenMP read while they start; an order brings an environment of its own for the rest.
_READ_AT_START = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH_", "CUDA_", "LD_")
_OF_AN_ORDER = ("TORCHINDUCTOR_CACHE_DIR",)


@contextmanager
def nursery(modules: Sequence[str], environment: Mapping[str, str]) -> Iterator[Nursery]:
    """A nursery that nobody else uses meanwhile, and that is kept for the next one.

    Args:
        modules: that it has imported.
        environment: as for :class:`Nursery`.
    """
    read = {
        (name, value)
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _OF_AN_ORDER
    }
    key = (*modules, frozenset(read))
    with _choosing:
        found = _idle[key].pop() if _idle[key] else Nursery(modules, environment)
    try:
        yield found
    finally:
        if found.usable:
            _idle[key].append(found)
        else:
            found.close()


@atexit.register
def _close_all() -> None:
    for nurseries in _idle.values():
        for each in nurseries:
            each.close()


def _end(pid: int) -> None:
    """End a process and all of its group: the compiler's own workers may outlive it, and hang with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def serve() -> None:
    """Import the modules that the command line names, and do orders until there are no more."""
    warnings.simplefilter("ignore")  # what PyTorch warns about while compiling is on the record already
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            _become(order)
        with contextlib.suppress(OSError):  # the child was first
            os.setpgid(pid, pid)
        print(pid, file=answers, flush=True)
        print(_exit_status(pid), file=answers, flush=True)


def _exit_status(pid: int) -> int:
    """Wait for a forked process; if this server's owner ends before it, even killed, end it and the server.

    The pipe of the orders closes with the owner, and nothing else comes in while an order is being done.
    """
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([sys.stdin], [], [], _BEAT)[0]:
            _end(pid)
            os._exit(1)


def _become(order: Order) -> NoReturn:
    """In the forked process: do the order and end, without the server's loop or its exit handlers."""
    status = 1
    try:
        os.setpgid(0, 0)
        null, log = os.open(os.devnull, os.O_RDONLY), os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(order.environment)
        os.chdir(order.directory)
        sys.path[:] = order.path
        importlib.import_module("compile_bench.measure.worker").answer_to(Path(order.request), Path(order.result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

"""Fork servers: interpreters that have imported what every job needs, and that fork a fresh process for each.

Importing torch takes two seconds of every new interpreter and its compiler three more, while a report needs dozens of
processes. A process that is forked before anything was computed or compiled is as fresh as a new interpreter. Where two
jobs run at once, the second server is a fork of the first, and imports only what that one lacks.

The fork server of :mod:`multiprocessing` does not fit, in Python 3.11 to 3.14, for four reasons:

- A process has only one, with one list of preloaded modules and its own environment. Here each list of modules needs a
  server, and so does each environment, because torch, OpenMP and XLA read variables when they are imported.
- Its children inherit the pipe that keeps the server alive, and nothing ends them together with their owner. After a
  SIGKILL of the owner, a child that is stopped or hangs in compiled code would remain.
- Its children import the ``__main__`` module of the owner, which may be a user's script.
- It ignores the ImportError of a preloaded module, and does not use process groups.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TypeVar, cast

from benchkit.errors import namesakes_of_standard_modules
from benchkit.processes.failures import ChildCrashed, ChildTimedOut, last_line
from benchkit.processes.server import FORK_CHILD, FORK_SERVER, Answer, ChildSettings, kill_group

Result = TypeVar("Result")

# Seconds that a process group was stopped, from a time of ``time.monotonic()`` until now.
StoppedSeconds = Callable[[int, float], float]

_START = "import sys; from benchkit.processes.server import serve; serve(int(sys.argv[1]), sys.argv[2:])"
# Without the working directory, a token.py there does not hide Python's from the modules that a server imports.
_SAFE_PATH = "-P"

# Seconds for the imports of a server. They do not count against the time limit of a job.
_IMPORT_LIMIT = 300.0
# Shortest wait for an answer, when the limit is over and the process was stopped meanwhile.
_POLL_SECONDS = 0.01
# An interrupt that another thread has received is raised in the main thread when its wait ends, not before.
_LONGEST_WAIT_SECONDS = 1.0
# Time between two rounds in which the servers of interrupted threads are stopped.
_STOP_SECONDS = 0.05
# Longest time between the end of a process and the server's message about it.
_EXIT_SECONDS = 10.0

# Prefixes of the variables that the interpreter, torch, OpenMP and XLA read when they start. Jobs share a server if
# these variables are equal.
_READ_AT_START = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH_", "CUDA_", "LD_", "JAX_", "XLA_")


class Child:
    """A forked process, as its owner sees it; :meth:`ForkServer.child` makes it.

    Attributes:
        pid: Process id, which is also the number of its process group.
    """

    def __init__(self, pid: int, connection: Connection, control: Connection, log: IO[bytes]) -> None:
        self.pid = pid
        self._connection = connection
        self._control = control
        self._log = log
        self._status: int | None = None
        self._reading = threading.Lock()  # the status comes once: who closes the process and who waits for it both ask

    def call(
        self,
        function: Callable[[], Result],
        name: str,
        limit: float,
        stopped_seconds: StoppedSeconds | None = None,
        on_message: Callable[[object], None] | None = None,
    ) -> Result:
        """Call a function in the process and return what it returns.

        Args:
            function: A function or ``functools.partial`` that can be pickled.
            name: What error messages call it.
            limit: Seconds until the answer. When they are over, the process is killed.
            stopped_seconds: Says for how long the process was stopped, which the limit does not count.
            on_message: Called with each message that the function sends.

        Raises:
            UserError: If the function raises one.
            ChildCrashed: If it raises another exception, or the process ends.
            ChildTimedOut: If there is no answer within the limit.
            TypeError: If ``function`` cannot be pickled or is defined in ``__main__``.
        """
        request = _pickled(function)
        begin = time.monotonic()
        with contextlib.suppress(ConnectionError):  # the process has ended, as the next lines find
            self._connection.send_bytes(request)
        answer: Answer | None = Answer(is_message=True)
        while answer is not None and answer.is_message:
            if not self._responds(begin, limit, stopped_seconds):
                kill_group(self.pid)
                raise ChildTimedOut(f"{name} was ended after its time limit of {limit:g} s", _text(self._log))
            answer = self._answer()
            if answer is not None and answer.is_message and on_message is not None:
                on_message(answer.value)
        if answer is None:
            log = _text(self._log)
            status = self.exit_status()
            by_signal = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
            raise ChildCrashed(f"{name} ended with status {status}{by_signal}: {last_line(log)}", log)
        if answer.user_error is not None:
            raise answer.user_error
        if answer.traceback:
            raise ChildCrashed(f"{name} raised {last_line(answer.traceback)}", answer.traceback)
        return cast(Result, answer.value)

    def _responds(self, begin: float, limit: float, stopped_seconds: StoppedSeconds | None) -> bool:
        """Whether an answer or the end of the process comes in time."""
        left = limit
        while left > 0:
            # The control connection reports the end even where a grandchild has inherited the other connection.
            if wait([self._connection, self._control], min(max(left, _POLL_SECONDS), _LONGEST_WAIT_SECONDS)):
                return True
            stopped = 0.0 if stopped_seconds is None else stopped_seconds(self.pid, begin)
            left = begin + limit + stopped - time.monotonic()
        return False

    def _answer(self) -> Answer | None:
        """The answer that has come; None if the process has ended without one."""
        with contextlib.suppress(EOFError, ConnectionError):
            if self._connection.poll():
                return cast(Answer, self._connection.recv())
        with self._reading:
            ended = self._status is not None or self._control.poll(_EXIT_SECONDS)
        if not ended:
            kill_group(self.pid)  # it has closed its connection and goes on
        return None

    def exit_status(self) -> int:
        """Wait for the end of the process and return its exit status."""
        with self._reading:
            if self._status is None:
                try:
                    self._status = int(self._control.recv())
                except (EOFError, OSError):  # the server was killed together with the process, or its owner closed it
                    self._status = -signal.SIGKILL
            return self._status


class ForkServer:
    """The owner of a server process that forks one child at a time.

    Attributes:
        preload: The modules that the server imports.

    Args:
        preload: Modules that the server imports. None of them may start Python threads or initialize a GPU driver.
        environment: All environment variables of the server. The preloaded modules read them.
        python: The interpreter.
        source: A server of the same interpreter and environment that has the first of these modules; the new one is a
            fork of it. If that one ends before it has forked, an interpreter is started.

    Raises:
        OSError: If the interpreter cannot be started, or the source has ended.
    """

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        python: str = sys.executable,
        *,
        source: ForkServer | None = None,
    ) -> None:
        self.preload, self._environment, self._python = tuple(preload), dict(environment), python
        self._group = 0
        self._stopped = False
        self._pid = 0  # of a fork that has begun
        self._ours: Connection | None = None  # to the child
        self._process: subprocess.Popen[bytes] | None = None  # None of a fork, which is no child of this process
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed with the server
        try:
            self._begin(source)
        except OSError:
            self._log.close()
            raise
        _open.add(self)

    def _begin(self, source: ForkServer | None) -> None:
        self._control, theirs = Pipe()
        try:
            with theirs:
                if source is None:
                    self._process = subprocess.Popen(
                        [self._python, _SAFE_PATH, "-c", _START, str(theirs.fileno()), *self.preload],
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=self._log,
                        stderr=self._log,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                else:
                    source.send(FORK_SERVER, theirs.fileno(), self._log.fileno())
                    self._control.send(self.preload[len(source.preload) :])
        except OSError:
            self._control.close()
            raise

    def _socket(self) -> socket.socket:
        return socket.fromfd(self._control.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)

    def send(self, asked: bytes, *handles: int) -> None:
        """Ask the server to fork something that gets these file descriptors.

        Raises:
            OSError: If the server has ended.
        """
        with self._socket() as control:
            socket.send_fds(control, [asked], handles)

    @contextmanager
    def child(self, settings: ChildSettings) -> Iterator[Child]:
        """Fork a process; at the end of the block, kill it and everything else in its process group.

        Raises:
            ChildCrashed: If the server could not import its modules, or was stopped.
        """
        ours, theirs = Pipe()
        self._ours = ours
        with ours, tempfile.TemporaryFile() as log:
            try:
                with theirs:
                    self._group = self._fork(theirs, log)
                if self._stopped:  # stop() came before the group was known
                    kill_group(self._group)
                with contextlib.suppress(ConnectionError):  # the process has ended, as the first call finds
                    ours.send(settings)
                child = Child(self._group, ours, self._control, log)
                try:
                    yield child
                except Exception:
                    self._end(child)
                    raise
                self._end(child)
            except Exception:
                raise
            except BaseException:  # interrupted: the connection to the server may be in the middle of a message
                self.close()
                raise
            finally:
                self._group = 0

    def _end(self, child: Child) -> None:
        kill_group(self._group)
        child.exit_status()

    def _fork(self, connection: Connection, log: IO[bytes]) -> int:
        with contextlib.suppress(ConnectionError):  # the server has ended, as the next lines find
            self.send(FORK_CHILD, connection.fileno(), log.fileno())
        try:
            if self._process is None and self._pid == 0:
                self._pid = self._number()
                if self._stopped:  # stop() came before it was known
                    kill_group(self._pid)
            return self._number()
        except (EOFError, ConnectionError):
            if self._process is None and self._pid == 0 and not self._stopped:  # its source has ended
                self._control.close()
                self._begin(None)
                return self._fork(connection, log)
            ended = "" if self._process is None else f" with status {self._process.wait()}"
            printed = _text(self._log)
            # An installed package's folder in PYTHONPATH may hide a module, too.
            message = f"the fork server ended{ended}: {last_line(printed)}"
            message += namesakes_of_standard_modules(_before_the_library(sys.path), printed)
            raise ChildCrashed(message, printed) from None

    def _number(self) -> int:
        """A process id, which may come after imports."""
        if not self._control.poll(_IMPORT_LIMIT):
            self.stop()
            raise ChildCrashed(f"importing {', '.join(self.preload)} was ended after {_IMPORT_LIMIT:g} s")
        return int(self._control.recv())

    @property
    def usable(self) -> bool:
        """Whether the server can fork another process."""
        return not self._stopped and self._runs()

    def _runs(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        try:  # a fork's end closes its connection
            with self._socket() as control:
                return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:  # nothing is there to be read
            return True
        except OSError:
            return False

    @property
    def group(self) -> int:
        """The process group of the child that runs now; 0 if none does."""
        return self._group

    def stop(self) -> None:
        """Kill the child and the server, from any thread; a pending call raises :class:`ChildCrashed`."""
        self._stopped = True
        if self._group:
            kill_group(self._group)
        if not self._runs():
            return
        if self._process is not None:
            kill_group(self._process.pid)
        elif self._pid:
            kill_group(self._pid)
        else:  # it ends when it sends its process id
            with contextlib.suppress(OSError), self._socket() as control:
                control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the child and the server, and release what belongs to them."""
        _open.discard(self)
        _sources.pop(self, None)
        self.stop()
        if self._process is not None:
            self._process.wait()
        self._control.close()
        if self._ours is not None:
            self._ours.close()
        self._log.close()


# The servers of this process that are not closed. Those that an interrupt has left open are closed at the exit: the
# garbage collector would close the descriptors of their connections before them.
_open: set[ForkServer] = set()
# Those among them that are not in use, by preloaded modules and the variables that these have read.
_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]
_idle: dict[_Key, list[ForkServer]] = defaultdict(list)
# Those that others may be forked from, in use or not, with the variables that their modules have read.
_sources: dict[ForkServer, frozenset[tuple[str, str]]] = {}
_choosing = threading.Lock()


@contextmanager
def fork_server(preload: Sequence[str], environment: Mapping[str, str]) -> Iterator[ForkServer]:
    """A server for exclusive use inside the block. Afterwards it is kept for the next caller with the same arguments.

    Args:
        preload: See :class:`ForkServer`.
        environment: See :class:`ForkServer`. Only variables that are read at start tell servers apart.
    """
    key = tuple(preload), frozenset(item for item in environment.items() if item[0].startswith(_READ_AT_START))
    with _choosing:
        server = _idle[key].pop() if _idle[key] else _started(key, environment)
    try:
        yield server
    finally:
        if server.usable:
            with _choosing:
                _idle[key].append(server)
        else:
            server.close()


def _started(key: _Key, environment: Mapping[str, str]) -> ForkServer:
    """A new server, forked from the one with most of its modules, if any has the first of them."""
    preload, variables = key
    known = [
        server
        for server, read in tuple(_sources.items())
        if read == variables and server.preload and preload[: len(server.preload)] == server.preload and server.usable
    ]
    try:
        source = max(known, key=lambda server: len(server.preload), default=None)
        server = ForkServer(preload, environment, source=source)
    except OSError:
        server = ForkServer(preload, environment)
    _sources[server] = variables
    return server


@contextmanager
def waiting_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that wait for child processes; it ends when they do, or at once by an exception.

    An exception that leaves the block, such as an interrupt, cancels what has not begun and stops every server that
    came into use inside. A plain executor would wait for all of it, which can take hours.
    """
    before = _in_use()
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=pool.shutdown)
        ending.start()
        while ending.is_alive():  # again and again: a thread may be about to open one
            for server in _in_use() - before:
                server.stop()
            ending.join(_STOP_SECONDS)
        raise


def result_of(future: Future[Result]) -> Result:
    """Wait for a future in the main thread, where a signal's handler may raise; return its result or raise its error.

    ``Future.result`` waits in a ``threading.Condition`` and lets go of its lock there. An exception that comes in that
    moment is lost: leaving the condition raises "cannot release un-acquired lock" in its place.
    """
    while not future.done():
        time.sleep(_POLL_SECONDS)
    return future.result()


def _in_use() -> frozenset[ForkServer]:
    with _choosing:
        return frozenset(_open).difference(*_idle.values())


@atexit.register
def _close_all() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it would leave the others open, and a traceback
    for server in tuple(_open):
        server.close()


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with other variables, and with its import path in ``PYTHONPATH``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}


def child_settings(environment: dict[str, str]) -> ChildSettings:
    """Settings with this process's working directory and import path."""
    directory = str(Path.cwd())
    return ChildSettings(environment, directory, [directory, *filter(None, sys.path)])


def _before_the_library(path: Sequence[str]) -> list[str]:
    """The folders of an import path that are searched before Python's own library."""
    library = sysconfig.get_path("stdlib")
    return list(takewhile(lambda folder: folder != library, filter(None, path)))


def _text(log: IO[bytes]) -> str:
    """The contents of a log. Reading does not move the file position, which the writing process shares."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")


def _pickled(function: Callable[[], object]) -> bytes:
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    if getattr(inner, "__module__", None) == "__main__":
        raise TypeError(f"a child process cannot import {inner!r} from __main__; move it to a module")
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"a child process takes a function at the top level of a module with arguments that can be pickled, got "
            f"{function!r}: {error}"
        ) from error

"""The fork server's interpreter, and the child processes that it forks.

:mod:`benchkit.processes.fork_server` starts this code and talks to it. Two connections are involved:

- control, between owner and server: the owner sends the file descriptors of a new child's connection and log; the
  server answers with the child's process id and later with its exit status. At any time the owner may also send those
  of another server's control connection and log: the server forks itself; the fork sends its process id, is sent the
  modules that it lacks, and imports them.
- one connection between owner and child: the owner sends a :class:`ChildSettings`, then pickled functions; the child
  answers each with an :class:`Answer`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn

from benchkit.errors import UserError

# Seconds between two checks whether a child has ended.
_POLL_SECONDS = 0.01

# What the owner may ask a server to fork, beside two file descriptors.
FORK_CHILD = b"c"
FORK_SERVER = b"s"


@dataclass(frozen=True)
class ChildSettings:
    """What a child adopts before it answers requests.

    Attributes:
        environment: All of its environment variables; empty for those of its interpreter.
        directory: Its working directory.
        path: Its ``sys.path``; empty for that of its interpreter.
    """

    environment: dict[str, str]
    directory: str
    path: list[str]


@dataclass(frozen=True)
class Answer:
    """What a function returned or raised in a child.

    Attributes:
        value: The function's result.
        user_error: The :class:`benchkit.UserError` that it raised.
        traceback: The traceback of any other exception.
        is_message: Whether ``value`` is a message of :func:`send_message`; the result comes later.
    """

    value: object = None
    user_error: UserError | None = None
    traceback: str = ""
    is_message: bool = False


# In a child: its connection to the owner.
_owner: Connection | None = None


def send_message(value: object) -> None:
    """Send something to the owner while a job runs. Outside a child process nothing happens.

    Args:
        value: Anything that can be pickled; the ``on_message`` of :meth:`benchkit.processes.Runner.run` gets it.
    """
    if _owner is not None:
        _owner.send(Answer(value, is_message=True))


def kill_group(group: int) -> None:
    """Kill a process group. A stopped process is killed too, and so are a compiler's own worker processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def serve(control_handle: int, preload: Sequence[str]) -> None:
    """Import modules, then fork one child after another until the owner closes the control connection.

    Args:
        control_handle: File descriptor of the control connection.
        preload: Modules to import. None of them may start Python threads or initialize a GPU driver.
    """
    warnings.simplefilter("ignore")  # jobs record the warnings of PyTorch themselves
    for module in preload:
        importlib.import_module(module)
    with socket.socket(fileno=control_handle) as control, Connection(os.dup(control_handle)) as answers:
        while True:
            asked, handles, _, _ = socket.recv_fds(control, 1, 2)
            if not handles:
                return
            if asked == FORK_SERVER:
                _fork_server(handles, control, answers)
                continue
            pid = os.fork()
            if pid == 0:
                control.close()
                answers.close()
                _run_child(*handles)
            for handle in handles:
                os.close(handle)
            with contextlib.suppress(OSError):  # the child may have done so first
                os.setpgid(pid, pid)
            answers.send(pid)
            answers.send(_wait_for_exit(pid, control, answers))


def _wait_for_exit(pid: int, control: socket.socket, answers: Connection) -> int:
    """Wait for a child; if the owner dies first, even by SIGKILL, kill the child's group and end the server."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([control], [], [], _POLL_SECONDS)[0]:
            # While a child runs, the owner asks for no other one.
            _, handles, _, _ = socket.recv_fds(control, 1, 2)
            if not handles:
                kill_group(pid)
                os._exit(1)
            _fork_server(handles, control, answers)


def _fork_server(handles: Sequence[int], *inherited: socket.socket | Connection) -> None:
    """Fork a server with all that is imported here. It is no child of this one, which need not wait for it."""
    if (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        for handle in handles:
            os.close(handle)
        return
    status = 1
    try:
        if os.fork() == 0:
            os.setsid()
            for each in inherited:
                each.close()
            control_handle, log_handle = handles
            for target in (1, 2):
                os.dup2(log_handle, target)
            os.close(log_handle)
            with Connection(os.dup(control_handle)) as owner:
                owner.send(os.getpid())
                lacking = owner.recv()
            serve(control_handle, lacking)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_child(connection_handle: int, log_handle: int) -> NoReturn:
    """In the forked child: answer requests until the connection closes, then end without the server's exit handlers."""
    status = 1
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log_handle, 1), (log_handle, 2)):
            os.dup2(source, target)
        global _owner
        with Connection(connection_handle) as connection:
            _owner = connection
            _apply(connection.recv())
            _answer_requests(connection)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _apply(settings: ChildSettings) -> None:
    if settings.environment:
        os.environ.clear()
        os.environ.update(settings.environment)
    os.chdir(settings.directory)
    sys.path[:] = settings.path or sys.path


def _answer_requests(connection: Connection) -> None:
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # the owner needs no more
            return
        try:
            connection.send(Answer(pickle.loads(request)()))  # noqa: S301 # from the owner, over a private socket
        except UserError as error:
            connection.send(Answer(user_error=error))
        except Exception:  # whatever it is, the owner raises it with this traceback
            connection.send(Answer(traceback=traceback.format_exc()))

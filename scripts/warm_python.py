"""Runs programs in forks of one Python that has torch loaded, for tests that need a process of their own.

To import torch takes a new interpreter most of two seconds. A fork starts with torch and the libraries of command lines
and figures loaded, and with nothing of this repository: what it imports of ours, it imports anew. Tests of an
interpreter's start, of its options or of torch's own variables need a real one.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

LOADED = (
    *("torch", "typer", "rich.console", "rich.progress", "jinja2"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg"),
)


class _WarmPython:
    """A process that forks; the first program starts it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def connection(self) -> socket.socket:
        """Where a request goes."""
        if self._server is None:
            self._socket, theirs = socket.socketpair()
            path = os.pathsep.join(filter(None, sys.path))
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": path},
                    process_group=0,
                )
            atexit.register(self._close)
        return self._socket

    def run(self, request: bytes, out: IO[bytes], err: IO[bytes]) -> int:
        """Run a program, and return its exit status."""
        with self._lock, Path(os.devnull).open("rb") as nothing:
            connection = self.connection()
            streams = [stream.fileno() for stream in (nothing, out, err)]
            try:
                socket.send_fds(connection, [len(request).to_bytes(8, "big")], streams)
                connection.sendall(request)
                status = connection.recv(4, socket.MSG_WAITALL)
            except BaseException:  # an interrupt or a test's time limit: this answer would be taken for the next one's
                self._kill()
                raise
            if len(status) < 4:
                raise RuntimeError("the Python that forks has ended")
            return int.from_bytes(status, "big", signed=True)

    def _close(self) -> None:
        if self._server is not None:
            self._socket.close()
            self._server.wait()

    def _kill(self) -> None:
        """End the program that runs, with the Python that it was forked from."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGKILL)
        self._close()
        self._server = None
        atexit.unregister(self._close)


_warm = _WarmPython()


def run(
    arguments: Sequence[object], *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run([sys.executable, *arguments])`` does.

    Args:
        arguments: ``-W ACTION`` any number of times; ``-c PROGRAM``, ``-m MODULE`` or a file; what the program gets.
        env: The whole environment; its ``PYTHONPATH`` comes before this process' path.
        cwd: The working directory; this process' own by default.

    Raises:
        ValueError: For another option of the interpreter, which needs a real one.
    """
    words = [str(argument) for argument in arguments]
    first = next(word for word, before in zip(words, ["", *words], strict=False) if "-W" not in (word, before))
    if first.startswith("-") and first not in ("-c", "-m"):
        raise ValueError(f"{first} is an option of the interpreter: start one")
    request = json.dumps({"words": words, "env": dict(env), "cwd": str(cwd or Path.cwd())}).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = _warm.run(request, out, err)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, status, out.read().decode(), err.read().decode())


def _serve(connection: socket.socket) -> None:
    for name in LOADED:
        __import__(name)
    while True:
        length, streams, _, _ = socket.recv_fds(connection, 8, 3)
        if not length:
            return
        request = json.loads(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        child = os.fork()
        if child == 0:
            connection.close()
            _become(request, streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(child, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Run the program of a request, and end as an interpreter ends."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        _run_program(request["words"])
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _run_program(words: Sequence[str]) -> None:
    kind, *rest = words
    while kind == "-W":
        warnings.simplefilter(cast("Any", rest.pop(0)))
        kind = rest.pop(0)
    name = kind if kind not in ("-c", "-m") else rest.pop(0)
    first = "" if kind in ("-c", "-m") else str(Path(name).parent)
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv = ["-c" if kind == "-c" else name, *rest]
    if kind == "-c":
        module = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(name, "<string>", "exec"), vars(module))  # noqa: S102 - a test's own program
    elif kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def _end(status: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)

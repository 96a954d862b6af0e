"""Runs programs in forks of one Python that has torch loaded, for tests that need a process of their own.

To import torch takes a new interpreter most of two seconds. A fork starts with torch and the libraries of command lines
and figures loaded, and with nothing of this repository: what it imports of ours, it imports anew. Tests of an
interpreter's start, of its options or of torch's own variables need a real one.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOADED = (
    *("torch", "typer", "rich.console", "rich.progress", "jinja2"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg"),
)


class WarmPython:
    """A process that forks. It is started by the first program and ended by :meth:`close`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def run(
        self, arguments: Sequence[object], *, env: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run([sys.executable, *arguments])`` does.

        Args:
            arguments: ``-c PROGRAM``, ``-m MODULE`` or a file, and the program's own arguments.
            env: The whole environment; its ``PYTHONPATH`` comes before this process' path.
            cwd: The working directory; this process' own by default.
        """
        words = [str(argument) for argument in arguments]
        if self._socket is None:
            self._start()
        assert self._socket is not None
        request = json.dumps({"words": words, "env": dict(env), "cwd": str(cwd or Path.cwd())}).encode()
        with (
            Path(os.devnull).open("rb") as nothing,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], [f.fileno() for f in (nothing, out, err)])
            self._socket.sendall(request)
            status = int.from_bytes(self._socket.recv(4), "big", signed=True)
            for stream in (out, err):
                stream.seek(0)
            return subprocess.CompletedProcess(words, status, out.read().decode(), err.read().decode())

    def close(self) -> None:
        """End the process."""
        if self._socket is not None and self._server is not None:
            self._socket.close()
            self._server.wait()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )


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
    kind, *rest = request["words"]
    name = kind if kind not in ("-c", "-m") else rest.pop(0)
    own = [str(Path(name).parent)] if kind == name else [""]
    sys.path[:] = [*own, *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
    sys.argv = ["-c" if kind == "-c" else name, *rest]
    status = 0
    try:
        if kind == "-c":
            module = type(sys)("__main__")
            sys.modules["__main__"] = module
            exec(compile(name, "<string>", "exec"), vars(module))  # noqa: S102 - a test's own program
        elif kind == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _end(status: int) -> None:
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)

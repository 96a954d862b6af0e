"""A child process that holds one object and calls its methods on request.

Engines that are timed against one another live in processes of their own: each has its allocator, its thread pools and
its configuration to itself, while the parent lets them run one at a time. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from benchkit import UserError

# The longest that one answer is known to take is 100 s: torch.compile tuning every kernel of gpt2-124m.
LIMIT_SECONDS = 300.0

_LAST_LINES = 60


class WorkerError(RuntimeError):
    """The child raised or died; the message holds its traceback or the end of its standard error."""


# A line that names an exception, as Python ends a traceback; frameworks go on with advice.
_RAISED = re.compile(r"([\w.]+(Error|Exception|Interrupt)\b|Fatal Python error)")
# XLA ends its messages with the place in its own sources.
_PLACE = re.compile(r"[\w./+-]+:\d+:?$")


def last_line(error: str) -> str:
    """The line of a failure that says most: of a traceback, the exception; else the last one that is not empty."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no message"]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or [line for line in lines if not _PLACE.match(line)] or lines)[-1]


class Worker:
    """Starts a child and makes the object in it.

    Args:
        factory: ``package.module:function``; called in the child as ``function(**arguments)``.
        arguments: plain JSON.
        environment: variables to set in the child, besides the parent's.
        limit_seconds: that one answer may take, the first one (imports and the object's making) included; a child that
            needs longer is ended. Compilers, drivers and collectives can all wait for ever.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._limit = limit_seconds
        # What lets this process find its packages (editable installs, PYTHONPATH, a test runner) holds for the child.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jax_baseline.worker", factory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        try:
            self._ask(arguments)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object in the child and wait for it.

        Raises:
            UserError: if the method raised one.
            WorkerError: if it raised anything else, took longer than the limit, or the child is gone.
        """
        return self._ask({"method": method, "arguments": arguments})

    def close(self) -> None:
        """End the child."""
        with contextlib.suppress(BrokenPipeError):  # it died with a request unread; wait() below collects it
            self._requests.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._errors.close()

    def _ask(self, request: Any) -> Any:
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            self._process.kill()  # the read below then ends

        timer = threading.Timer(self._limit, end)
        timer.start()
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer and too_late.is_set():
            raise WorkerError(
                f"the worker was ended: no answer after {self._limit:g} s. The end of what it wrote:\n"
                f"{self._end_of_errors()}"
            )
        if not answer:
            raise WorkerError(f"the worker ended with status {self._process.wait()}:\n{self._end_of_errors()}")
        kind, value = json.loads(answer)
        if kind == "user error":
            raise UserError(value)
        if kind == "error":
            raise WorkerError(f"in the worker:\n{value}")
        return value

    def _end_of_errors(self) -> str:
        self._errors.seek(0)
        return "".join(self._errors.readlines()[-_LAST_LINES:])


def serve(factory: str) -> None:
    """Be the child: make the object from the first line, then answer one call a line until the input ends."""
    module, _, function = factory.partition(":")
    # Answers have a channel of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        served: Any = None
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if served is None:
                    served = getattr(importlib.import_module(module), function)(**request)
                    answer = ["value", None]
                else:
                    answer = ["value", getattr(served, request["method"])(**request["arguments"])]
            except UserError as error:
                answer = ["user error", str(error)]
            except Exception:  # whatever it is, the parent raises it with this traceback
                answer = ["error", traceback.format_exc()]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])

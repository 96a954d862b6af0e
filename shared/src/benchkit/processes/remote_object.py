"""An object that lives in a child process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchkit.processes.fork_server import ForkServer, child_environment, child_settings
from benchkit.processes.server import ChildSettings

# The longest known answer takes 100 s: torch.compile tunes every kernel of gpt2-124m.
LIMIT_SECONDS = 300.0

# In the child: the object.
_object: Any = None


class RemoteObject:
    """Makes an object in a process of its own and calls its methods.

    Programs that are timed against one another live in processes of their own: each has its allocator, its thread pools
    and its configuration to itself, while the caller lets one of them run at a time.

    Args:
        factory: A class or function at the top level of a module; the child calls ``factory(**arguments)``.
        arguments: Anything that can be pickled.
        environment: Environment variables to set in the child, in addition to this process's.
        python: Another interpreter, which imports its own packages, and from ``path`` what it shares with this one.
        path: Folders of packages for that interpreter.
        limit: Seconds that one answer may take; the first one includes imports and the making of the object. A process
            that takes longer is killed: compilers, drivers and collectives can all wait for ever.

    Raises:
        OSError: If ``python`` cannot be run.
        UserError: If the factory raises one.
        ChildFailure: If it fails in any other way.
    """

    def __init__(
        self,
        factory: Callable[..., object],
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        python: str | None = None,
        path: Sequence[str] = (),
        limit: float = LIMIT_SECONDS,
    ) -> None:
        self.limit = limit
        variables = child_environment(environment or {})
        settings = child_settings(variables)
        if python is not None:
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH", "")]))
            settings = ChildSettings({}, str(Path.cwd()), [])
        with ExitStack() as stack:
            server = ForkServer((), variables) if python is None else ForkServer((), variables, python)
            stack.callback(server.close)
            self._child = stack.enter_context(server.child(settings))
            made = functools.partial(_make, factory, dict(arguments))
            self._class = self._child.call(made, factory.__name__, limit)
            self._resources = stack.pop_all()

    def __enter__(self) -> RemoteObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the object and wait for its result.

        Raises:
            UserError: If the method raises one.
            ChildCrashed: If it raises another exception, or the process has ended.
            ChildTimedOut: If it takes longer than the limit; the process is killed.
        """
        return self._child.call(functools.partial(_call, method, arguments), f"{self._class}.{method}", self.limit)

    def close(self) -> None:
        """Kill the process, and with it everything that it has started."""
        self._resources.close()


def _make(factory: Callable[..., object], arguments: Mapping[str, Any]) -> str:
    """Make the object and return the name of its class, for messages."""
    global _object
    _object = factory(**arguments)
    return type(_object).__qualname__


def _call(method: str, arguments: Mapping[str, Any]) -> Any:
    return getattr(_object, method)(**arguments)

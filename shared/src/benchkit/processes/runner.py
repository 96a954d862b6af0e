"""Runs jobs in fresh child processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from benchkit.processes.failures import ChildCancelled, ChildCrashed, ChildTimedOut
from benchkit.processes.fork_server import (
    ForkServer,
    StoppedSeconds,
    child_environment,
    child_settings,
    fork_server,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Job(Generic[Result]):
    """A function call for a fresh process.

    Attributes:
        call: A function, or ``functools.partial`` of one, at the top level of a module. It is pickled by its qualified
            name; its arguments and its result are pickled too. See also :func:`deferred_module`.
        name: What error messages call the job.
        preload: Modules that the process finds imported. Figures of the job do not contain these imports.
        environment: Environment variables to set before the preloaded modules are imported.
        child_environment: Variables to set in the process alone. Jobs that differ only in these share a fork server.
    """

    call: Callable[[], Result]
    name: str
    preload: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    child_environment: Mapping[str, str] = field(default_factory=dict)


class Runner:
    """Runs each job in a fresh process, in this process's working directory; several threads may use it at once.

    Args:
        limit: Seconds after which a job's process and everything that it started are killed.

    Attributes:
        deadline: Time of ``time.monotonic()`` after which no job runs or starts; None for no deadline.
        stopped_seconds: Says for how long a process was stopped, which its limit does not count; see
            :meth:`benchkit.processes.ExclusiveTiming.stopped_seconds`.

    Examples:
        >>> runner = Runner(limit=60)
        >>> runner.run(Job(partial(math.factorial, 5), "factorial"))  # doctest: +SKIP
        120
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.deadline: float | None = None
        self.stopped_seconds: StoppedSeconds | None = None
        self.stopped = False
        self._servers: list[ForkServer] = []

    def run(self, job: Job[Result], *, on_message: Callable[[object], None] | None = None) -> Result:
        """Run a job and return its result.

        Args:
            job: The job.
            on_message: Called with each message that the job sends (:func:`send_message`).

        Raises:
            UserError: If the job raises one.
            ChildCrashed: If it raises another exception, or its process ends.
            ChildTimedOut: If its process was ended at the time limit.
            ChildCancelled: If the runner was stopped, or its deadline has passed.
            TypeError: If the job cannot be pickled.
        """
        if self.stopped:
            raise ChildCancelled(f"{job.name} was not begun: measuring was stopped")
        deadline = math.inf if self.deadline is None else self.deadline
        left = deadline - time.monotonic()
        limit = min(self.limit, left)
        if limit <= 0:
            raise ChildCancelled(f"{job.name} was not begun: the time for all measurements was over")

        def stopped_seconds(group: int, since: float) -> float:
            stopped = 0.0 if self.stopped_seconds is None else self.stopped_seconds(group, since)
            return min(stopped, left - limit)  # the deadline counts that time

        environment = child_environment(job.environment)
        settings = child_settings({**environment, **job.child_environment})
        try:
            with self._server(job, environment) as server, server.child(settings) as child:
                return child.call(job.call, job.name, limit, stopped_seconds, on_message)
        except (ChildCrashed, ChildTimedOut) as failure:
            if self.stopped:
                raise ChildCancelled(f"{job.name} was ended: measuring was stopped") from None
            if isinstance(failure, ChildTimedOut) and time.monotonic() >= deadline:
                raise ChildCancelled(f"{job.name} was ended: the time for all measurements was over") from None
            raise

    def stop(self) -> None:
        """Kill every running process and start no other; pending calls raise :class:`ChildCancelled`."""
        self.stopped = True
        for server in list(self._servers):
            server.stop()

    def groups(self) -> list[int]:
        """Process groups of the jobs that run now."""
        return [server.group for server in list(self._servers) if server.group]

    @contextmanager
    def _server(self, job: Job[Result], environment: Mapping[str, str]) -> Iterator[ForkServer]:
        with fork_server(job.preload, environment) as server:
            self._servers.append(server)
            try:
                if self.stopped:  # stop() has not seen this server
                    raise ChildCancelled(f"{job.name} was not begun: measuring was stopped")
                yield server
            finally:
                self._servers.remove(server)

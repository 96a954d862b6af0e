"""Child processes: a fresh one for every job, a persistent one for an object, and exclusive timing.

- :class:`Runner` runs each :class:`Job` in a fresh process that a fork server starts, under a time limit.
- :class:`RemoteObject` keeps one object in a process and calls its methods.
- :class:`ExclusiveTiming` lets one of several processes measure while the others are stopped.

Neither torch nor jax is imported here.
"""

from benchkit.processes.deferred import deferred_module
from benchkit.processes.exclusive_timing import (
    ExclusiveTiming,
    Pause,
    Stopwatch,
    exclusive,
    one_at_a_time,
    pauses,
)
from benchkit.processes.failures import ChildCancelled, ChildCrashed, ChildFailure, ChildTimedOut, last_line
from benchkit.processes.fork_server import result_of, waiting_threads
from benchkit.processes.remote_object import RemoteObject
from benchkit.processes.runner import Job, Runner
from benchkit.processes.server import kill_group, send_message

__all__ = [
    "ChildCancelled",
    "ChildCrashed",
    "ChildFailure",
    "ChildTimedOut",
    "ExclusiveTiming",
    "Job",
    "Pause",
    "RemoteObject",
    "Runner",
    "Stopwatch",
    "deferred_module",
    "exclusive",
    "kill_group",
    "last_line",
    "one_at_a_time",
    "pauses",
    "result_of",
    "send_message",
    "waiting_threads",
]

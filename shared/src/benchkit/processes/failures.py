"""What can go wrong with a child process."""

from __future__ import annotations

import re

# A line that names an exception, as Python ends a traceback. CUDA and XLA add lines of advice after it.
_EXCEPTION = re.compile(r"([\w.]+(Error|Exception|Interrupt)\b|Fatal Python error)")
# XLA ends its messages with a position in its own sources.
_POSITION = re.compile(r"[\w./+-]+:\d+:?$")


class ChildFailure(RuntimeError):
    """A child process gave no answer. The message is one line; notes hold the traceback or the end of the log."""


class ChildCrashed(ChildFailure):
    """The function raised, or the process ended before it answered."""


class ChildTimedOut(ChildFailure):
    """The process was ended because its time limit was over."""


class ChildCancelled(ChildFailure):
    """The process is not at fault: the runner was stopped, or its deadline has passed."""


_NOTED_LINES = 60


def with_note(failure: ChildFailure, text: str) -> ChildFailure:
    """Add the last lines of a traceback or log, which Python shows when nobody catches the failure."""
    if lines := text.rstrip().splitlines()[-_NOTED_LINES:]:
        failure.add_note("\n".join(["In the child process:", *lines]))
    return failure


def last_line(text: str) -> str:
    """The most informative line of a traceback or log: the last exception, else the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or [line for line in lines if not _POSITION.match(line)] or lines)[-1]

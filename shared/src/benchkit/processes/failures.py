"""What can go wrong with a child process."""

from __future__ import annotations

import re

# A line that names an exception, as Python ends a traceback. CUDA and XLA add lines of advice after it.
_EXCEPTION = re.compile(r"([\w.]+(Error|Exception|Interrupt)\b|Fatal Python error)")
# XLA ends its messages with a position in its own sources.
_POSITION = re.compile(r"[\w./+-]+:\d+:?$")


_NOTED_LINES = 60


class ChildFailure(RuntimeError):
    """A child process gave no answer.

    Args:
        message: What happened, in one line.
        details: The traceback, or what the process has printed. Python shows the end of it when nobody catches the
            failure.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        if lines := details.rstrip().splitlines()[-_NOTED_LINES:]:
            self.add_note("\n".join(["In the child process:", *lines]))


class ChildCrashed(ChildFailure):
    """The function raised, or the process ended before it answered."""


class ChildTimedOut(ChildFailure):
    """The process was ended because its time limit was over."""


class ChildCancelled(ChildFailure):
    """The process is not at fault: the runner was stopped, or its deadline has passed."""


def last_line(text: str) -> str:
    """The most informative line of a traceback or log: the last exception, else the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or [line for line in lines if not _POSITION.match(line)] or lines)[-1]

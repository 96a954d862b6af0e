"""The time that a run may still take, known to this process and to those that it starts.

A run with a budget ends in time on a slow machine as well: comparisons take fewer rounds, then measurements are left
out, the least important first. Without a budget nothing here has an effect.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from benchkit.errors import UserError

# Both are seconds of CLOCK_MONOTONIC, which all processes of a machine share; child processes inherit them.
_DEADLINE = "BENCHKIT_DEADLINE"
_APART = "BENCHKIT_SECONDS_APART"

# Seconds that what is prepared gets at least (:func:`at_least`), to be timed. Preparing takes far longer.
TIMING = 10.0


class OutOfTime(UserError):
    """The budget is spent: what was to be measured is left out."""


def left() -> float:
    """Return the seconds until the deadline, negative after it; infinity without a budget."""
    deadline = os.environ.get(_DEADLINE)
    return math.inf if deadline is None else float(deadline) - _now()


def require(what: str) -> None:
    """Raise where the budget is spent.

    Raises:
        OutOfTime: If no time is left.
    """
    if left() <= 0:
        raise OutOfTime(f"no time was left for {what}; give the run more with --budget")


def within(seconds: float) -> AbstractContextManager[None]:
    """Give what runs inside the block a deadline; an earlier one that is in force stays.

    Args:
        seconds: Seconds from now; infinity for no further limit.
    """
    return _ending_in(min(seconds, left()))


def at_least(seconds: float) -> AbstractContextManager[None]:
    """Give what runs inside the block so many seconds, also where fewer are left: it is prepared already."""
    return _ending_in(max(seconds, left()))


@contextmanager
def _ending_in(seconds: float) -> Iterator[None]:
    before = os.environ.get(_DEADLINE)
    if math.isfinite(seconds):
        os.environ[_DEADLINE] = repr(_now() + seconds)
    try:
        yield
    finally:
        os.environ.pop(_DEADLINE, None)
        if before is not None:
            os.environ[_DEADLINE] = before


@contextmanager
def apart() -> Iterator[None]:
    """Count the seconds inside the block apart, for builds that the next run does not repeat: all deadlines move."""
    start = time.monotonic()
    try:
        yield
    finally:
        os.environ[_APART] = repr(seconds_apart() + time.monotonic() - start)


def seconds_apart() -> float:
    """Return the seconds that this process and those that started it have counted apart."""
    return float(os.environ.get(_APART, 0.0))


def _now() -> float:
    return time.monotonic() - seconds_apart()

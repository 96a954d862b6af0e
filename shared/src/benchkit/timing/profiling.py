"""torch's profiler without its log output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Stop Kineto, torch's profiler, from printing to standard error, unless the user has chosen a log level.

    Torch before 2.12 also warns that it clears events at the end of a cycle; ``acc_events=True`` spares its users that.
    """
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]

"""Shims of the core keys, and a trace of a function with the shims of its module."""

from collections.abc import Callable, Iterator

import pytest

from dispatcher_trace import Shims, Trace, installed, record

Traced = Callable[[Callable[[], object]], Trace]


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    """Installed once for a module. Those that watch all keys, or do something before, have a fixture of their own."""
    with installed("core") as shims:
        yield shims


@pytest.fixture
def traced(shims: Shims) -> Traced:
    """Calls a function and returns the trace of the call."""

    def traced(function: Callable[[], object]) -> Trace:
        with record(shims, kernels=False) as t:
            function()
        return t

    return traced

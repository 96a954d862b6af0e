"""Shims of the core keys, and a trace of a function with the shims of its module."""

from collections.abc import Callable, Iterator

import pytest
import torch

from dispatcher_trace import Shims, Trace, installed, record
from dispatcher_trace.capture import dispatcher

if torch.__version__ < (2, 13):  # where it can't be imported after an operator's library has ended, as in these tests
    import torch._inductor.decomposition

Traced = Callable[[Callable[[], object]], Trace]


@pytest.fixture(scope="module")
def usual_operators() -> list[str]:
    """PyTorch's own without their ``out=`` forms: the tests call none of the others, half of the shims."""
    return [
        name
        for name in dispatcher.operators()
        if name.startswith("aten::") and not name.partition(".")[2].endswith("out")
    ]


@pytest.fixture
def few_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PyTorch of a few operators, for a trace of all whose subject is its begin or its end."""
    names = ("ones", "empty.memory_format", "fill_.Scalar", "add.Tensor", "select.int", "as_strided")
    monkeypatch.setattr(dispatcher, "operators", lambda: [f"aten::{name}" for name in names])


@pytest.fixture(scope="module")
def shims(usual_operators: list[str]) -> Iterator[Shims]:
    """Installed once for a module. Those that watch all keys, or do something before, have a fixture of their own."""
    with installed("core", only=usual_operators) as shims:
        yield shims


@pytest.fixture
def traced(shims: Shims) -> Traced:
    """Calls a function and returns the trace of the call."""

    def traced(function: Callable[[], object]) -> Trace:
        with record(shims, kernels=False) as t:
            function()
        return t

    return traced

"""The three counts of one target, in a process of its own."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from compile_bench.capture.collector import BREAK_LOGGERS, Collector, user_code_filter
from compile_bench.measure.agreement import Agreement
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import Case
from compile_bench.targets.target import Target, describe_error

_PLACE = re.compile(r"Graph break in user code at (?P<file>.*):(?P<line>\d+)")
_INNERMOST = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def agreement(case: Case) -> Agreement:
    """Count a target's graphs and breaks by the collector, by ``explain`` and by PyTorch's log."""
    target = load_case(case)
    with _logged() as messages, Collector() as collector:
        _once(target, case)
    own = collector.trace(user_code_filter(libraries=False))
    torch.compiler.reset()
    graphs, breaks, error = _explain(target, case)
    return Agreement(
        case,
        len(own.graphs),
        tuple(sorted({entry.place for entry in own.breaks})),
        sum(entry.times for entry in own.breaks),
        sum(entry.whole_frame for entry in own.breaks),
        graphs,
        breaks,
        error,
        tuple(sorted(places(messages))),
    )


def _once(target: Target, case: Case) -> None:
    torch.manual_seed(0)
    model = target.copied()
    compiled: Any = torch.compile(model, backend="eager")
    target.step(compiled, train=case.train)()


def _explain(target: Target, case: Case) -> tuple[int, int, str]:
    torch.manual_seed(0)
    explain = importlib.import_module("torch._dynamo").explain
    try:
        with torch.set_grad_enabled(case.train), target.precision():
            told = explain(target.copied())(*target.args, **target.kwargs)
    except Exception as error:  # explain runs every graph by itself, and fails where the model runs
        return 0, 0, describe_error(error)
    return told.graph_count, told.graph_break_count, ""


@contextmanager
def _logged() -> Iterator[list[str]]:
    """What ``TORCH_LOGS=graph_breaks`` prints."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(level=logging.DEBUG)
    torch._logging.set_logs(graph_breaks=True)  # type: ignore[attr-defined] # documented, but not listed
    loggers = [logging.getLogger(name) for name in BREAK_LOGGERS]
    try:
        for logger in loggers:
            logger.addHandler(handler)
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        torch._logging.set_logs()  # type: ignore[attr-defined]


def places(messages: list[str]) -> set[str]:
    """``file.py:LINE`` of every break in the log: the last line of the user's that a message names."""
    found = set()
    library = str(Path(torch.__file__).parent)
    for message in messages:
        text = message.partition("User code traceback:")[2].split("\nTraceback (most recent call last):")[0]
        stack = [m for m in _INNERMOST.finditer(text) if not m["file"].startswith(library)]
        named = stack[-1] if stack else _PLACE.search(message)
        if named:
            found.add(f"{named['file']}:{named['line']}")
    return found

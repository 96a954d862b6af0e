"""A long trace summarized: one row for each line of the user's code, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dispatcher_trace.capture.types import Call


@dataclass(frozen=True)
class LineSummary:
    """The top-level calls that came from one line, in one direction.

    Attributes:
        direction: ``forward``, or ``backward`` if a node that the line made was running.
        source: The line.
        operators: Operators that the line calls at the top level, each with its number of calls.
        calls: Number of operator calls, nested ones too.
        hops: Number of hops, nested ones too.
        keys: Keys that were visited, in order of first arrival.
        kernels: Number of device kernels that were launched.
        disagreements: Number of calls that visited other keys than predicted.
    """

    direction: str
    source: str
    operators: tuple[tuple[str, int], ...]
    calls: int
    hops: int
    keys: tuple[str, ...]
    kernels: int
    disagreements: int


def summarize(calls: Sequence[Call]) -> list[LineSummary]:
    """One row for each line and direction, in order of first call."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        direction = "backward" if call.hops[0].node else "forward"
        groups.setdefault((direction, call.forward_source or call.source), []).append(call)
    return [_summary(direction, source, group) for (direction, source), group in groups.items()]


def _summary(direction: str, source: str, group: list[Call]) -> LineSummary:
    counted = [pair for top in group for pair in _with_times(top, 1)]
    every = [call for call, _ in counted]
    operators: Counter[str] = Counter()
    for call in group:
        operators[call.operator] += 1 + call.alike
    return LineSummary(
        direction=direction,
        source=source,
        operators=tuple(operators.items()),
        calls=sum(times for _, times in counted),
        hops=sum(times * len(call.hops) for call, times in counted),
        keys=tuple(dict.fromkeys(hop.key for call in every for hop in call.hops)),
        kernels=sum(len(call.kernels) for call in every),
        disagreements=sum(not call.agrees for call in every),
    )


def _with_times(call: Call, times: int) -> Iterator[tuple[Call, int]]:
    """A call and the calls inside it, each with how often it was made: those that were counted too."""
    times *= 1 + call.alike
    yield call, times
    for hop in call.hops:
        for inner in hop.calls:
            yield from _with_times(inner, times)

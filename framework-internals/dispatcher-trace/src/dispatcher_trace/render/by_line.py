"""A long trace summarized: one row for each line of the user's code, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    every = [call for top in group for call in top.walk()]
    return LineSummary(
        direction=direction,
        source=source,
        operators=tuple(Counter(call.operator for call in group).items()),
        calls=len(every),
        hops=sum(len(call.hops) for call in every),
        keys=tuple(dict.fromkeys(hop.key for call in every for hop in call.hops)),
        kernels=sum(len(call.kernels) for call in every),
        disagreements=sum(not call.agrees for call in every),
    )

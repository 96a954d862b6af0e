"""A long walk folded to what fits a page: one row for each line of the user's code, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher_trace.records import Call


@dataclass(frozen=True)
class Fold:
    """The top-level calls that came from one line, in one direction.

    Attributes:
        direction: ``forward``, or ``backward``: a node made by the line was running.
        source: the line.
        operators: called by it at the top level, with their numbers of calls, in order of first call.
        calls: operator calls, nested ones too.
        hops: likewise.
        keys: that were visited, in order of first arrival.
        kernels: device kernels that were launched.
        disagreements: calls that took another way than predicted.
    """

    direction: str
    source: str
    operators: tuple[tuple[str, int], ...]
    calls: int
    hops: int
    keys: tuple[str, ...]
    kernels: int
    disagreements: int


def folded(calls: Sequence[Call]) -> list[Fold]:
    """The rows, in order of the first call of each."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        direction = "backward" if call.hops[0].node else "forward"
        groups.setdefault((direction, call.forward_source or call.source), []).append(call)
    return [_fold(direction, source, group) for (direction, source), group in groups.items()]


def _fold(direction: str, source: str, group: list[Call]) -> Fold:
    every = [call for top in group for call in top.walk()]
    counted: dict[str, int] = {}
    for call in group:
        counted[call.operator] = counted.get(call.operator, 0) + 1
    return Fold(
        direction=direction,
        source=source,
        operators=tuple(counted.items()),
        calls=len(every),
        hops=sum(len(call.hops) for call in every),
        keys=tuple(dict.fromkeys(hop.key for call in every for hop in call.hops)),
        kernels=sum(len(call.kernels) for call in every),
        disagreements=sum(not call.agrees for call in every),
    )

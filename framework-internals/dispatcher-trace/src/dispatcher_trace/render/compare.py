"""Differences between two traces: calls that only one has, and calls with other keys, tensors or kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher_trace.capture.profile import matching_positions
from dispatcher_trace.capture.types import SCHEMA_VERSION, Call, calls_from_json


@dataclass(frozen=True)
class Difference:
    """One difference between two traces, A and B.

    Attributes:
        kind: ``only in A``, ``only in B``, ``keys`` (the call visited other keys), ``tensors`` (its arguments have
            other dtypes, shapes or devices), ``kernel`` (the same keys have another kernel), ``times`` (calls alike to
            it were counted another number of times).
        number_a: Number of the call's first hop in A; 0 if A does not have the call.
        number_b: Number of the call's first hop in B; 0 if B does not have the call.
        operator: Operator that was called.
        detail: What differs.
    """

    kind: str
    number_a: int
    number_b: int
    operator: str
    detail: str

    def __str__(self) -> str:
        hops = " / ".join(
            f"{side} hop {number}" for side, number in (("A", self.number_a), ("B", self.number_b)) if number
        )
        return f"{self.kind}: {self.operator} ({hops}): {self.detail}"


def load_calls(document: Mapping[str, Any]) -> list[Call]:
    """The calls of a trace that :meth:`dispatcher_trace.Trace.to_json` wrote.

    Raises:
        ValueError: If the document is not a trace, is incomplete, or has another schema version.
    """
    if not isinstance(document, Mapping) or "schema_version" not in document or "calls" not in document:
        raise ValueError("not a trace: expected what --format json writes")
    if document["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {document['schema_version']}, expected {SCHEMA_VERSION}; record it again")
    try:
        return calls_from_json(document["calls"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a complete trace ({type(error).__name__}: {error}); record it again") from error


def differences(a: Sequence[Call], b: Sequence[Call]) -> list[Difference]:
    """The differences, in order.

    Calls are paired by operator and depth of nesting, in order. A call without a partner is reported once, without the
    calls inside it.
    """
    ours, theirs = _flattened(a), _flattened(b)
    pairs = matching_positions([key for key, _ in ours], [key for key, _ in theirs])
    different: list[Difference] = []
    a_from = b_from = 0
    for a_to, b_to in [*pairs, (len(ours), len(theirs))]:
        different += [_only("only in A", call) for call in _outermost(ours[a_from:a_to])]
        different += [_only("only in B", call) for call in _outermost(theirs[b_from:b_to])]
        if a_to < len(ours) and b_to < len(theirs):
            different += _pair(ours[a_to][1], theirs[b_to][1])
        a_from, b_from = a_to + 1, b_to + 1
    return different


_Flat = list[tuple[tuple[int, str], Call]]


def _flattened(calls: Sequence[Call], depth: int = 0) -> _Flat:
    flat: _Flat = []
    for call in calls:
        flat.append(((depth, call.operator), call))
        for hop in call.hops:
            flat += _flattened(hop.calls, depth + 1)
    return flat


def _outermost(flat: _Flat) -> list[Call]:
    inside: set[int] = set()
    outermost = []
    for _, call in flat:
        if id(call) not in inside:
            outermost.append(call)
            inside |= {id(inner) for inner in call.walk()}
    return outermost


def _only(kind: str, call: Call) -> Difference:
    number = call.hops[0].number
    numbers = (number, 0) if kind.endswith("A") else (0, number)
    return Difference(kind, *numbers, call.operator, f"{' → '.join(call.path)}  {call.title}")


def _pair(a: Call, b: Call) -> list[Difference]:
    numbers = a.hops[0].number, b.hops[0].number
    if a.path != b.path:
        return [Difference("keys", *numbers, a.operator, f"{' → '.join(a.path)} | {' → '.join(b.path)}")]
    if a.shapes != b.shapes:
        return [Difference("tensors", *numbers, a.operator, f"{a.shapes} | {b.shapes}")]
    kernels = [
        f"{mine.native or mine.kind} | {other.native or other.kind} at {mine.key}"
        for mine, other in zip(a.hops, b.hops, strict=True)
        if (mine.native, mine.kind) != (other.native, other.kind)
    ]
    if kernels:
        return [Difference("kernel", *numbers, a.operator, "; ".join(kernels))]
    times = f"{1 + a.alike} | {1 + b.alike}"
    return [Difference("times", *numbers, a.operator, times)] if a.alike != b.alike else []

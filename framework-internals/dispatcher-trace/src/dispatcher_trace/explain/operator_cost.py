"""The operators that take most of a run's time, with shapes and source lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchkit import numbers
from dispatcher_trace.capture.profile import Profile, match_calls, operator_spans
from dispatcher_trace.capture.types import Call

THRESHOLD = 0.05


@dataclass(frozen=True)
class OperatorCost:
    """The time of one operator over a run, and the place that took most of it.

    Attributes:
        operator: Name without overload, as the profiler has it.
        calls: Number of calls.
        seconds: Time of these calls without the operators that they called: on the device if kernels ran there, else
            on the host.
        share: Fraction of the time of all operators.
        shapes: Dtypes and shapes of the tensors at the place that took most; empty if the trace has no such call.
        stack: Lines of the user's code that called the operator there, innermost first; in a backward, of the forward.
        node: Name of the autograd node that ran there, without its number.
    """

    operator: str
    calls: int
    seconds: float
    share: float
    shapes: str
    stack: tuple[str, ...]
    node: str


# Shapes of one call that are shown.
_SHAPES = 4

_Place = tuple[str, tuple[str, ...], str]


def operator_costs(profiled: Profile, calls: Sequence[Call]) -> list[OperatorCost]:
    """Every operator's own time, largest first.

    Args:
        profiled: Profile of an untraced run, so that no time is the tracer's.
        calls: All calls of a trace of the same code, for shapes and source lines.
    """
    spans = operator_spans(profiled.events)
    call_of_span = match_calls(calls, [span.name for span in spans])
    total = sum(span.seconds for span in spans) or 1.0
    operators: dict[str, dict[_Place, list[float]]] = {}
    for index, span in enumerate(spans):
        operators.setdefault(span.name, {}).setdefault(_place(call_of_span.get(index)), []).append(span.seconds)
    costs = []
    for operator, places in operators.items():
        times = [seconds for samples in places.values() for seconds in samples]
        costliest = max(places, key=lambda place: sum(places[place]))
        costs.append(OperatorCost(operator, len(times), sum(times), sum(times) / total, *costliest))
    return sorted(costs, key=lambda cost: -cost.seconds)


def _place(call: Call | None) -> _Place:
    if call is None:
        return "", (), ""
    stack = (call.forward_source,) if call.forward_source else call.stack
    return call.shapes, stack, call.hops[0].node.partition("#")[0]


def first_shapes(shapes: str) -> str:
    """The shapes of a call's first tensors; an optimizer's call has all parameters of a model."""
    tensors = re.split(r", (?![^\[]*\])", shapes)
    left_out = len(tensors) - _SHAPES
    return shapes if left_out <= 1 else f"{', '.join(tensors[:_SHAPES])} and {left_out} more"


def table(costs: Sequence[OperatorCost]) -> str:
    """The operators over :data:`THRESHOLD`, one line each."""
    if not costs:
        return "No operator ran, so no operator's time was measured."
    lines = [f"Operators over {numbers.percent(THRESHOLD, 0)} of the operators' own time, untraced:"]
    for cost in costs:
        if cost.share >= THRESHOLD:
            times = "1 call" if cost.calls == 1 else f"{cost.calls} calls"
            node = f" in {cost.node}" if cost.node else ""
            head = f"{numbers.percent(cost.share)}  {numbers.with_unit(cost.seconds, 's')}  {cost.operator}, {times}"
            stack = " < ".join(cost.stack) or "no line of your code on the stack"
            lines.append(f"{head}; most in ({first_shapes(cost.shapes)}){node}, {stack}")
    return "\n".join(lines)

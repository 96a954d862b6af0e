"""What dispatch costs on this machine, without the tracer: the time of a hop, and the operators that take a run's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from benchkit import Quantity, numbers
from benchkit.timing.statistics import bootstrap_median_interval, quantile
from dispatcher_trace import dispatcher, profile
from dispatcher_trace.records import Call
from dispatcher_trace.trace import Trace

_BATCHES = (50, 100, 150, 200, 300, 400)
THRESHOLD = 0.05


@dataclass(frozen=True)
class OperatorCost:
    """The time of one operator over a run, and where most of it went.

    Attributes:
        operator: without overload, as the profiler names it.
        calls: how many there were.
        seconds: their own time, without the operators that they called: on the device where kernels ran, else on the
            host.
        share: of the time of all operators.
        shapes: of the tensors of the most expensive place; empty where the walk has no such call.
        stack: the user's lines that it was called from there, innermost first; in a backward, of the forward.
        node: the autograd node that was running there, without its number.
    """

    operator: str
    calls: int
    seconds: float
    share: float
    shapes: str
    stack: tuple[str, ...]
    node: str


_Place = tuple[str, tuple[str, ...], str]


def profile_of(function: Callable[[], Any]) -> profile.Profile:
    """Call a function once under the profiler, without shims."""
    with profile.profiled() as profiled:
        function()
    return profiled


def operator_costs(profiled: profile.Profile, walk: Trace) -> list[OperatorCost]:
    """Every operator's own time, most expensive first, with shapes and source lines from a walk of the same code.

    Args:
        profiled: of an untraced run, so that the tracer is in none of the figures.
        walk: of another run: operators are paired with its calls in order.
    """
    spans = profile.operator_spans(profiled.events)
    calls = profile.pair(walk.all_calls, [span.name for span in spans])
    total = sum(span.seconds for span in spans) or 1.0
    operators: dict[str, dict[_Place, list[float]]] = {}
    for index, span in enumerate(spans):
        operators.setdefault(span.name, {}).setdefault(_place(calls.get(index)), []).append(span.seconds)
    costs = []
    for operator, places in operators.items():
        times = [seconds for samples in places.values() for seconds in samples]
        dearest = max(places, key=lambda place: sum(places[place]))
        costs.append(OperatorCost(operator, len(times), sum(times), sum(times) / total, *dearest))
    return sorted(costs, key=lambda cost: -cost.seconds)


def _place(call: Call | None) -> _Place:
    if call is None:
        return "", (), ""
    first = call.hops[0]
    shapes = ", ".join(str(tensor).partition(": ")[2] for tensor in first.tensors)
    stack = (call.forward_source,) if call.forward_source else call.stack
    return shapes, stack, first.node.partition("#")[0]


def table(costs: Sequence[OperatorCost]) -> str:
    """The operators over :data:`THRESHOLD`, a line each."""
    lines = [f"Operators over {numbers.percent(THRESHOLD, 0)} of the operators' own time, untraced:"]
    for cost in costs:
        if cost.share >= THRESHOLD:
            times = "1 call" if cost.calls == 1 else f"{cost.calls} calls"
            node = f" in {cost.node}" if cost.node else ""
            head = f"{numbers.percent(cost.share)}  {numbers.with_unit(cost.seconds, 's')}  {cost.operator}, {times}"
            place = f"most in ({cost.shapes}){node}, {' < '.join(cost.stack) or 'no line of yours on the stack'}"
            lines.append(f"{head}; {place}")
    return "\n".join(lines)


def hop_costs(rounds: int = 15) -> dict[str, Quantity]:
    """Seconds that single hops add to a call on four elements, without shims.

    A call is entered at a chosen key set (``OpOverload.redispatch``), once with a key on top and once without it; the
    difference is what the dispatcher's hop and the kernel at that key take. Each figure is a slope: the time of n calls
    over n, by Theil and Sen's median of the slopes between all pairs of batches (Sen 1968), so that neither a fixed
    cost nor a disturbed batch is in it. The differences are paired round by round.

    Returns:
        By description: the median over the rounds, with the bootstrap's 95 % interval.
    """
    variants = _variants()
    shuffle, order = random.Random(0).shuffle, list(variants)
    slopes: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            slopes[name].append(theil_sen({count: _batch(variants[name], count) for count in _BATCHES}))
    costs = {}
    for description, (over, under) in _DIFFERENCES.items():
        differences = [a - b for a, b in zip(slopes[over], slopes[under], strict=True)]
        low, high = bootstrap_median_interval(differences)
        costs[description] = Quantity(quantile(differences, 0.5), "s", low, high, rounds, "bootstrap 95%")
    return costs


def theil_sen(points: Mapping[int, float]) -> float:
    """The median of the slopes between all pairs of points."""
    slopes = [(points[b] - points[a]) / (b - a) for a, b in combinations(sorted(points), 2)]
    return quantile(slopes, 0.5)


_DIFFERENCES = {
    "AutogradCPU above `add`, no gradient asked for": ("add, Autograd", "add, CPU"),
    "AutogradCPU above `add`, a node is made": ("add, node", "add, CPU"),
    "ADInplaceOrView above `alias`": ("alias, view", "alias, CPU"),
    "AutogradCPU above `alias`": ("alias, Autograd", "alias, view"),
    "BackendSelect above `empty`": ("empty, BackendSelect", "empty, CPU"),
}


def _variants() -> dict[str, Callable[[], Any]]:
    x, y = torch.ones(4), torch.ones(4)
    leaf = torch.ones(4, requires_grad=True)
    add, alias = torch.ops.aten.add.Tensor, torch.ops.aten.alias.default
    empty = torch.ops.aten.empty.memory_format
    keys = dispatcher.key_set
    cpu = keys(dispatcher.bits_of("CPU"))
    view = keys(dispatcher.bits_of("CPU", "ADInplaceOrView"))
    autograd = keys(dispatcher.bits_of("CPU", "ADInplaceOrView", "AutogradCPU"))
    # A key at which the operator falls through must not be in the set: the mask comes off before, at a call.
    autograd_of_add = keys(dispatcher.bits_of("CPU", "AutogradCPU"))
    select = keys(dispatcher.bits_of("CPU", "BackendSelect"))
    return {
        "add, CPU": lambda: add.redispatch(cpu, x, y),
        "add, Autograd": lambda: add.redispatch(autograd_of_add, x, y),
        "add, node": lambda: add.redispatch(autograd_of_add, leaf, y),
        "alias, CPU": lambda: alias.redispatch(cpu, x),
        "alias, view": lambda: alias.redispatch(view, x),
        "alias, Autograd": lambda: alias.redispatch(autograd, x),
        "empty, CPU": lambda: empty.redispatch(cpu, [4]),
        "empty, BackendSelect": lambda: empty.redispatch(select, [4]),
    }


def _batch(function: Callable[[], Any], count: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        function()
    return (time.perf_counter_ns() - start) * 1e-9

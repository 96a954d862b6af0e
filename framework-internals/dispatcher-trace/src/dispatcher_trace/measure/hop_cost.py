"""What a hop costs without the tracer, and what the tracer adds to it."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import torch

from benchkit import Quantity, compare
from benchkit.run import Run
from benchkit.timing.statistics import bootstrap_median_interval, quantile
from dispatcher_trace.capture import key_sets
from dispatcher_trace.capture.recorder import Recorder
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.recording import record

SIZE = 4  # elements of the operands: so few that dispatch is all that takes time
_BATCHES = (50, 100, 150, 200, 300, 400)

# Description of a hop: the variant with the hop and the variant without it.
_DIFFERENCES = {
    "AutogradCPU above `add`, no gradient asked for": ("add, Autograd", "add, CPU"),
    "AutogradCPU above `add`, a node is made": ("add, node", "add, CPU"),
    "ADInplaceOrView above `alias`": ("alias, view", "alias, CPU"),
    "AutogradCPU above `alias`": ("alias, Autograd", "alias, view"),
    "BackendSelect above `empty`": ("empty, BackendSelect", "empty, CPU"),
}


def hop_costs(rounds: int = 15) -> dict[str, Quantity]:
    """Seconds that single hops add to a call on four elements, without shims.

    ``OpOverload.redispatch`` enters a call at a chosen key set, once with a key on top and once without it. The
    difference is the time of the dispatcher's hop and of the kernel at that key. The time of one call is the slope of
    the batch time over the batch size, by the estimator of Theil and Sen (Sen 1968), so that neither a fixed cost nor a
    single disturbed batch changes it. The differences are paired round by round.

    Args:
        rounds: Number of paired measurements.

    Returns:
        By description of the hop: the median over the rounds, with a 95 % bootstrap interval.
    """
    variants = _variants()
    shuffle, order = random.Random(0).shuffle, list(variants)
    slopes: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            slopes[name].append(theil_sen({count: _batch_seconds(variants[name], count) for count in _BATCHES}))
    costs = {}
    for description, (over, under) in _DIFFERENCES.items():
        differences = [a - b for a, b in zip(slopes[over], slopes[under], strict=True)]
        low, high = bootstrap_median_interval(differences)
        costs[description] = Quantity(quantile(differences, 0.5), "s", low, high, rounds, "bootstrap 95%")
    return costs


def record_hop_costs(run: Run) -> None:
    """Record the time of single hops."""
    for description, seconds in hop_costs(run.configuration["rounds"]).items():
        run.record("hop_cost", {"what": description}, {"seconds": seconds})


def theil_sen(points: Mapping[int, float]) -> float:
    """The median of the slopes between all pairs of points."""
    slopes = [(points[b] - points[a]) / (b - a) for a, b in combinations(sorted(points), 2)]
    return quantile(slopes, 0.5)


def _variants() -> dict[str, Callable[[], Any]]:
    x, y = torch.ones(SIZE), torch.ones(SIZE)
    leaf = torch.ones(SIZE, requires_grad=True)
    add, alias = torch.ops.aten.add.Tensor, torch.ops.aten.alias.default
    empty = torch.ops.aten.empty.memory_format

    def keys(*names: str) -> Any:
        return key_sets.key_set(key_sets.bits_of(*names))

    cpu, view, select = keys("CPU"), keys("CPU", "ADInplaceOrView"), keys("CPU", "BackendSelect")
    autograd = keys("CPU", "ADInplaceOrView", "AutogradCPU")
    # add falls through at ADInplaceOrView. Redispatch does not drop such keys, so the set must not have it.
    autograd_of_add = keys("CPU", "AutogradCPU")
    return {
        "add, CPU": lambda: add.redispatch(cpu, x, y),
        "add, Autograd": lambda: add.redispatch(autograd_of_add, x, y),
        "add, node": lambda: add.redispatch(autograd_of_add, leaf, y),
        "alias, CPU": lambda: alias.redispatch(cpu, x),
        "alias, view": lambda: alias.redispatch(view, x),
        "alias, Autograd": lambda: alias.redispatch(autograd, x),
        "empty, CPU": lambda: empty.redispatch(cpu, [SIZE]),
        "empty, BackendSelect": lambda: empty.redispatch(select, [SIZE]),
    }


def _batch_seconds(function: Callable[[], Any], count: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        function()
    return (time.perf_counter_ns() - start) * 1e-9


def record_overhead(run: Run, shims: Shims, operands: list[torch.Tensor], stock: Quantity) -> None:
    """Record the time of ``torch.add`` with shims that record, count and do neither, and the memory of a kept hop.

    Args:
        run: Where the record goes.
        shims: Installed.
        operands: The two operands.
        stock: The time before the shims were installed.
    """
    recorder = Recorder()
    counting = Recorder(max_hops=1)

    def off() -> None:
        torch.add(*operands)

    def on() -> None:
        shims.recorder = recorder
        torch.add(*operands)
        shims.recorder = None
        recorder.top.clear()

    def counted() -> None:
        shims.recorder = counting
        torch.add(*operands)
        shims.recorder = None

    with record(shims, kernels=False) as trace:
        off()
    variants = {"off": off, "on": on, "counted": counted}
    timed = compare(variants, seconds=run.configuration["seconds"], clock="wall-clock")
    run.record(
        "overhead",
        values={
            "hops": Quantity(len(trace.hops), ""),
            "untraced": stock,
            "off": timed["off"].quantity(),
            "on": timed["on"].quantity(),
            "counted": timed["counted"].quantity(),
            "kept": Quantity(_kept_bytes(shims, operands), "B"),
        },
    )


def _kept_bytes(shims: Shims, operands: list[torch.Tensor], calls: int = 1000) -> float:
    """Memory that a recorder keeps for each hop of a loop of additions, in Python's allocator."""
    recorder = Recorder()
    tracemalloc.start()
    try:
        shims.recorder = recorder
        for _ in range(calls):
            torch.add(*operands)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        shims.recorder = None
        tracemalloc.stop()
    return kept / recorder.hop_count()

"""What one step does, by the profiler: how much of it is compiled, how many kernels it launches, what it allocates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined] # there, but not listed
from torch.profiler import ProfilerActivity, profile, record_function

from benchkit.device import Device
from compile_bench.capture.collector import allocations
from compile_bench.measure.records import KernelTime, StepProfile, kernel_name
from compile_bench.targets.target import Step

STEPS = 3
_STEP = "compile_bench step"
_GUARDS = "TorchDynamo Cache Lookup"
# What PyTorch records around compiled code: the forward pass, a generated graph, the backward pass.
_REGIONS = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunctionBackward")
# How many of the costliest kernels are recorded.
_COSTLIEST = 5
# Prefix of the operators that torch.nn.functional.scaled_dot_product_attention chooses from; the last is not fused.
_ATTENTION_OPERATOR = "aten::_scaled_dot_product_"
_PLAIN_ATTENTION = "aten::_scaled_dot_product_attention_math"
# Kernels of memory-efficient attention, Flash Attention and cuDNN. A replayed CUDA graph calls no operators.
_ATTENTION_KERNEL = re.compile(r"fmha|flash|sdpa")
_GRAPH_CALL = re.compile(r"## Call CompiledFxGraph (\w+) ##")
_GRAPH_LAUNCH = "cudaGraphLaunch"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", _GRAPH_LAUNCH)

Interval = tuple[float, float]


def record_steps(step: Step, device: Device) -> profile:
    """Record a few steps with the profiler; :func:`read_profile`, which takes longer, summarises them.

    No other process may use the GPU meanwhile, since that would slow the kernels.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(STEPS):
            with record_function(_STEP):
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
    return profiled


def read_profile(recorded: profile, device: Device) -> StepProfile:
    """Summarise what :func:`record_steps` recorded on ``device``."""
    return summarise(list(recorded.events()), device, steps=STEPS)


def summarise(events: Sequence[Any], device: Device, *, steps: int) -> StepProfile:
    """Summarise the profiler's events.

    Each of the ``steps`` is inside one named span.
    """
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    regions: dict[int, list[Interval]] = defaultdict(list)
    for event in calls:
        if event.name.startswith(_REGIONS):
            regions[event.thread].append(_span(event))
    regions = {thread: _union(spans) for thread, spans in regions.items()}
    outside = [event for event in calls if _is_called_operator(event) and not _inside(event, regions)]
    guards = sum(event.time_range.elapsed_us() for event in calls if event.name == _GUARDS)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and _is_kernel(event)]
    launches = [event for event in events if event.name.startswith(_LAUNCHES)]
    on_gpu = device == "cuda"
    is_fused_attention = _is_fused_attention_kernel if on_gpu else _is_fused_attention_operator
    return StepProfile(
        covered=_covered_kernels(calls, regions) if on_gpu else _covered_time(calls, regions),
        operators=len(outside) / steps,
        kernels=len(kernels) / steps if on_gpu else None,
        launches=len(launches) / steps if on_gpu else None,
        guard_seconds=guards * 1e-6 / steps,
        busy_seconds=_busy(events) / steps if on_gpu else None,
        costliest=_costliest(kernels, steps),
        fused_attention=sum(is_fused_attention(event.name) for event in (kernels if on_gpu else calls)) / steps,
    )


def launches_by_graph(events: Sequence[Any], *, steps: int) -> dict[str, tuple[float, float]]:
    """CUDA graphs replayed and kernels launched one by one in a step, for every graph of Inductor by its cache key."""
    calls = [event for event in events if event.device_type == DeviceType.CPU]
    launches = [event for event in calls if event.name.startswith(_LAUNCHES)]
    by_graph: dict[str, tuple[float, float]] = {}
    for call in calls:
        if match := _GRAPH_CALL.fullmatch(call.name):
            # By time alone: the profiler may not know the thread of a launch, and one graph runs at a time.
            begin, end = _span(call)
            inside = [launch.name for launch in launches if begin <= launch.time_range.start < end]
            replays = sum(name.startswith(_GRAPH_LAUNCH) for name in inside)
            before = by_graph.get(match[1], (0.0, 0.0))
            by_graph[match[1]] = (before[0] + replays / steps, before[1] + (len(inside) - replays) / steps)
    return by_graph


def peak_rise(step: Step) -> int:
    """The largest rise, in bytes, of the CPU's allocations within a step. Weights are not included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        step()
    return largest_rise(allocations(profiled))


def largest_rise(changes: Iterable[int]) -> int:
    """The largest rise of the running sum of ``changes`` over an earlier point.

    A training step first releases the gradients of the step before, so the rise counts from the lowest point.
    """
    lowest = rise = 0
    for level in accumulate(changes):
        lowest = min(lowest, level)
        rise = max(rise, level - lowest)
    return rise


def _span(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _union(spans: list[Interval]) -> list[Interval]:
    """The intervals in order, overlapping ones merged."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _inside(event: Any, regions: dict[int, list[Interval]]) -> bool:
    start, end = _span(event)
    return any(begin <= start and end <= finish for begin, finish in regions.get(event.thread, ()))


def _is_called_operator(event: Any) -> bool:
    """Whether it is an ATen operator that no other operator called."""
    return event.name.startswith("aten::") and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))


def _is_kernel(event: Any) -> bool:
    # The profiler repeats the spans of record_function on the GPU's track.
    return not event.is_user_annotation and not event.name.startswith(("Memcpy", "Memset"))


def _busy(events: Sequence[Any]) -> float:
    """Seconds in which the GPU was busy: kernels that overlap are counted once."""
    own = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    return sum(end - start for start, end in _union([_span(event) for event in own])) * 1e-6


def _costliest(kernels: Sequence[Any], steps: int) -> tuple[KernelTime, ...]:
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        spent[kernel_name(kernel.name)].append(kernel.time_range.elapsed_us())
    by_name = [KernelTime(name, len(seconds) / steps, sum(seconds) * 1e-6 / steps) for name, seconds in spent.items()]
    return tuple(sorted(by_name, key=lambda kernel: kernel.seconds, reverse=True)[:_COSTLIEST])


def _is_fused_attention_operator(name: str) -> bool:
    return name.startswith(_ATTENTION_OPERATOR) and not name.startswith(_PLAIN_ATTENTION)


def _is_fused_attention_kernel(name: str) -> bool:
    if name.startswith("triton_"):  # the name lists all that Inductor fused, such as preparing attention's operands
        return "flex_attention" in name
    return _ATTENTION_KERNEL.search(name) is not None


def _covered_time(calls: Sequence[Any], regions: dict[int, list[Interval]]) -> float:
    whole = sum(event.time_range.elapsed_us() for event in calls if event.name == _STEP)
    merged = _union([span for spans in regions.values() for span in spans])
    return sum(end - start for start, end in merged) / whole if whole else 0.0


def _covered_kernels(calls: Sequence[Any], regions: dict[int, list[Interval]]) -> float | None:
    seconds = {True: 0.0, False: 0.0}
    for event in calls:
        for kernel in event.kernels:
            seconds[_inside(event, regions)] += kernel.duration
    whole = seconds[True] + seconds[False]
    return seconds[True] / whole if whole else None

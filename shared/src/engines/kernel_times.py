"""Device time of each kernel, from a profiler."""

from __future__ import annotations

import collections
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchkit.device import Device
from benchkit.timing.profiling import quiet_profiler

# Categories of a Chrome trace that occupy a GPU, and how NCCL names its kernels.
_ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_NCCL = "nccl"


class KernelTime(NamedTuple):
    """All calls of one kernel.

    Attributes:
        name: Name in the profile.
        calls: Calls per step.
        seconds: Seconds per step.
    """

    name: str
    calls: float
    seconds: float


class GpuTime(NamedTuple):
    """What a GPU does in a step, in seconds that add up to the step.

    Attributes:
        computing: At least one kernel or copy runs that is not NCCL's.
        communicating: Kernels of NCCL alone run: they exchange data, or wait for those of another GPU.
        idle: Nothing runs.
    """

    computing: float
    communicating: float
    idle: float


def torch_gpu_time(run: Callable[[], None], steps: int) -> GpuTime:
    """Return what the GPU does in a step, from its first kernel to its last one.

    Args:
        run: Function that takes ``steps`` steps and waits for the GPU.
        steps: Number of steps of ``run``.
    """
    from torch.profiler import ProfilerActivity, profile

    with tempfile.TemporaryDirectory() as folder, quiet_profiler():
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return gpu_time(json.loads(trace.read_text())["traceEvents"], steps)


def gpu_time(events: Iterable[Mapping[str, Any]], steps: int) -> GpuTime:
    """Return what a GPU does in one of several steps.

    Args:
        events: Events of a Chrome trace of these steps.
        steps: Number of steps.
    """
    spans = [
        (event["ts"], event["ts"] + event["dur"], event["name"].startswith(_NCCL))
        for event in events
        if event.get("cat") in _ON_GPU
    ]
    if not spans:
        return GpuTime(0.0, 0.0, 0.0)
    busy = covered((start, stop) for start, stop, _ in spans)
    computing = covered((start, stop) for start, stop, nccl in spans if not nccl)
    whole = max(stop for _, stop, _ in spans) - min(start for start, _, _ in spans)
    return GpuTime(*(microseconds * 1e-6 / steps for microseconds in (computing, busy - computing, whole - busy)))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def torch_kernel_times(run: Callable[[], None], steps: int, device: Device) -> list[KernelTime]:
    """Return the time of every kernel that a run launches. On a CPU, it is the self time of every operator.

    Args:
        run: Function that takes ``steps`` steps and waits for the device.
        steps: Number of steps of ``run``.
        device: Device of the kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        run()
    times = [
        (event.key, event.count, event.self_device_time_total if device == "cuda" else event.self_cpu_time_total)
        for event in profiler.key_averages()
        if event.device_type.name.lower() == device
    ]
    return by_time((name, count / steps, microseconds / 1e6 / steps) for name, count, microseconds in times)


def merge_similar(kernels: Iterable[KernelTime]) -> list[KernelTime]:
    """Add up kernels whose names differ only in the number of the block or in a number after a dot or underscore."""
    groups: dict[str, list[KernelTime]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[re.sub(r"(?<=\.|_)\d+(?= |$)|(?<=block)\d+", "*", kernel.name)].append(kernel)
    return by_time((name, sum(k.calls for k in group), sum(k.seconds for k in group)) for name, group in groups.items())


def by_time(rows: Iterable[tuple[str, float, float]]) -> list[KernelTime]:
    """Return kernels from names, calls and seconds, the longest first."""
    return sorted((KernelTime(*row) for row in rows if row[2] > 0), key=lambda row: -row.seconds)

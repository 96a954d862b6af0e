"""Device time of each kernel, from a profiler."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchkit.device import Device


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


def torch_kernel_times(run: Callable[[], None], steps: int, device: Device) -> list[KernelTime]:
    """Return the time of every kernel that a run launches. On a CPU, it is the self time of every operator.

    Args:
        run: Function that takes ``steps`` steps and waits for the device.
        steps: Number of steps of ``run``.
        device: Device of the kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
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

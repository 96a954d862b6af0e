"""Device time of each kernel, from the profiler of either framework."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchkit import UserError
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
    found = [
        (event.key, event.count, event.self_device_time_total if device == "cuda" else event.self_cpu_time_total)
        for event in profiler.key_averages()
        if event.device_type.name.lower() == device
    ]
    return _by_time((name, count / steps, microseconds / 1e6 / steps) for name, count, microseconds in found)


def jax_kernel_times(run: Callable[[], None], steps: int, text: str) -> list[KernelTime]:
    """Return the time of every HLO instruction that runs.

    Args:
        run: Function that takes ``steps`` steps and waits for the device.
        steps: Number of steps of ``run``.
        text: Optimised HLO of the program.

    Returns:
        Times; each name is the name of the instruction, the type of its result and its ``op_name``.

    Raises:
        UserError: If the profile is empty, as when the process may not read the GPU's counters.
    """
    from jax_baseline.hlo.profile import kernel_events

    times: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.Counter()
    for operation, seconds in kernel_events(run):
        times[operation] += seconds / steps
        calls[operation] += 1
    if not times:
        raise UserError("JAX's profiler recorded no kernel; it needs permission to read the GPU's activity (CUPTI)")
    made = _results(text)
    return _by_time((f"{name} {made.get(name, '')}", calls[name] / steps, seconds) for name, seconds in times.items())


def merge_similar(kernels: Iterable[KernelTime]) -> list[KernelTime]:
    """Add up kernels whose names differ only in the number of the block or in a number after a dot or underscore."""
    groups: dict[str, list[KernelTime]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[re.sub(r"(?<=\.|_)\d+(?= |$)|(?<=block)\d+", "*", kernel.name)].append(kernel)
    return _by_time(
        (name, sum(k.calls for k in group), sum(k.seconds for k in group)) for name, group in groups.items()
    )


def _results(text: str) -> dict[str, str]:
    """Return the type of the result and the ``op_name`` of each instruction by name."""
    found = re.finditer(r'^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) .*?(?:op_name="([^"]*)"|$)', text, re.MULTILINE)
    return {match[1]: f"{re.sub(r'{[^}]*}', '', match[2])} {(match[3] or '').split('/', 1)[-1]}" for match in found}


def _by_time(found: Iterable[tuple[str, float, float]]) -> list[KernelTime]:
    return sorted((KernelTime(*row) for row in found if row[2] > 0), key=lambda row: -row.seconds)

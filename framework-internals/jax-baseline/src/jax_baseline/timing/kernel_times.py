"""Device time by kernel, from either framework's profiler."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchkit import UserError
from benchkit.device import Device


class KernelTime(NamedTuple):
    """One kernel, all its calls together.

    Attributes:
        name: as the profiler has it.
        calls: a step.
        seconds: a step.
    """

    name: str
    calls: float
    seconds: float


def torch_kernel_times(run: Callable[[], None], steps: int, device: Device) -> list[KernelTime]:
    """Return the time of every kernel that a run launches, by name; on a CPU, of every operator, without its callees.

    Args:
        run: takes ``steps`` steps and waits for the device.
        steps: to divide by.
        device: of the kernels.
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
    """Return the time of every instruction of the compiled program that runs.

    Args:
        run: takes ``steps`` steps and waits for the device.
        steps: to divide by.
        text: the optimised HLO, for what an instruction makes and where in the model it came from.

    Returns:
        By the name in the HLO, followed by the type of the result and the operation of the program it was made for.

    Raises:
        UserError: if the profiler kept nothing, as it does where it may not read the GPU's counters.
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


def alike(kernels: Iterable[KernelTime]) -> list[KernelTime]:
    """Return kernels with those added up that differ in a number behind a dot or in the block of the model alone."""
    groups: dict[str, list[KernelTime]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[re.sub(r"(?<=\.|_)\d+(?= |$)|(?<=block)\d+", "*", kernel.name)].append(kernel)
    return _by_time(
        (name, sum(k.calls for k in group), sum(k.seconds for k in group)) for name, group in groups.items()
    )


def _results(text: str) -> dict[str, str]:
    """Instruction to the type of its result and its ``op_name``."""
    found = re.finditer(r'^\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) .*?(?:op_name="([^"]*)"|$)', text, re.MULTILINE)
    return {match[1]: f"{re.sub(r'{[^}]*}', '', match[2])} {(match[3] or '').split('/', 1)[-1]}" for match in found}


def _by_time(found: Iterable[tuple[str, float, float]]) -> list[KernelTime]:
    return sorted((KernelTime(*row) for row in found if row[2] > 0), key=lambda row: -row.seconds)

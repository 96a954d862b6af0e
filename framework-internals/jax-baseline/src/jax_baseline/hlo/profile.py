"""Times the kernels of a compiled JAX function with JAX's profiler."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax


class ProfileEvent(NamedTuple):
    """One event of a profile."""

    plane: str  # a device (``/device:GPU:0``) or the host
    line: str  # a stream or a thread of the plane
    instruction: str  # name of the instruction in the optimised HLO
    seconds: float


def kernel_seconds(run: Callable[[], Any], names: Collection[str], *, repeats: int) -> dict[str, float]:
    """Profile a compiled function and return the mean time of each kernel in one run.

    Compile the function with the options of :func:`jax_baseline.gpt.compilation.profiled`. An instruction that did not
    run is missing.
    """

    def runs() -> None:
        for _ in range(repeats):
            jax.block_until_ready(run())

    wanted, seconds_by_name = frozenset(names), defaultdict[str, float](float)
    for name, seconds in kernel_events(runs):
        if name in wanted:
            seconds_by_name[name] += seconds / repeats
    return dict(seconds_by_name)


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call until its results are there."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def kernel_events(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Profile a call and return the HLO instruction and the seconds of every event.

    XLA adds the name of the instruction (``hlo_op``) to each event on a device's timeline. An instruction has several
    events if it is several launches or runs in a loop. On a CPU the events are tasks of the thread pool.

    On a GPU, call it in a separate process (:class:`benchkit.processes.RemoteObject`) in which torch has profiled
    nothing. NVIDIA's profiling library supports one framework in a process and may abort the other.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls are not instructions
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        ran = [event for path in Path(folder).rglob("*.xplane.pb") for event in _read_instructions(path)]
    on_gpu = [event for event in ran if event.plane.startswith("/device:GPU")]
    if on_gpu:
        # Streams only. XLA's lines ("XLA Ops") repeat the same kernels, and the host's lines are launches.
        ran = [event for event in on_gpu if event.line.startswith("Stream")]
    return [(event.instruction, event.seconds) for event in ran]


def _read_instructions(path: Path) -> list[ProfileEvent]:
    """Return the events of a profile that have the name of an HLO instruction."""
    events = []
    with warnings.catch_warnings():
        # The reader's types have no __module__, of which Python 3.12 and later warn. As an error, the warning would be
        # an exception in C++ code that may not raise: the process would abort.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    instruction = next((value for name, value in event.stats if name == "hlo_op"), None)
                    if instruction is not None:
                        events.append(ProfileEvent(plane.name, line.name, str(instruction), event.duration_ns * 1e-9))
    return events

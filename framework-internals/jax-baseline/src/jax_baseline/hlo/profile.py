"""Times the kernels of a compiled JAX function with JAX's profiler."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from jax_baseline.hlo.xplane import read_instructions


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
        ran = [event for path in Path(folder).rglob("*.xplane.pb") for event in read_instructions(path.read_bytes())]
    on_gpu = [event for event in ran if event.plane.startswith("/device:GPU")]
    if on_gpu:
        # Streams only. XLA's lines ("XLA Ops") repeat the same kernels, and the host's lines are launches.
        ran = [event for event in on_gpu if event.line.startswith("Stream")]
    return [(event.instruction, event.seconds) for event in ran]

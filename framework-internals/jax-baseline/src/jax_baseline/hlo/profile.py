"""How long each kernel of a compiled JAX function runs, from the profiler that comes with JAX."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from jax_baseline.hlo.xplane import read_instructions


def kernel_seconds(run: Callable[[], Any], names: Collection[str], *, repeats: int) -> dict[str, float]:
    """Profile a compiled function and return the time of its kernels in one run, on average.

    Compile with the options of :func:`jax_baseline.gpt.compilation.profiled`.

    Args:
        run: runs the function once; what it returns is waited for.
        names: of the instructions to look for.
        repeats: runs under the profiler.

    Returns:
        Seconds by name; a name that was never seen is missing.
    """

    def runs() -> None:
        for _ in range(repeats):
            jax.block_until_ready(run())

    wanted, found = frozenset(names), defaultdict[str, float](float)
    for name, seconds in kernel_events(runs):
        if name in wanted:
            found[name] += seconds / repeats
    return dict(found)


def kernel_events(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Profile a call and return what ran: the HLO instruction and the seconds, once for every event.

    XLA gives each event of a device's timeline the name of the instruction behind it (``hlo_op``); an instruction that
    is several launches, or that runs in a loop, has several events. On a CPU they are those of the thread pool's tasks.

    On a GPU, call it in a process that nothing else depends on (:class:`benchkit.processes.RemoteObject`) and in which
    torch has profiled nothing: NVIDIA's profiling library serves one of them, and the other may abort.

    Args:
        run: runs compiled functions, and waits for them.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call as an event: none of them is an instruction
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        ran = [event for path in Path(folder).rglob("*.xplane.pb") for event in read_instructions(path.read_bytes())]
    if jax.default_backend() != "cpu":
        # The GPU's streams alone: XLA's own lines ("XLA Ops") show the same kernels again, the host's their launches.
        ran = [event for event in ran if event.plane.startswith("/device:GPU") and event.line.startswith("Stream")]
    return [(event.instruction, event.seconds) for event in ran]

"""How long each kernel of a compiled JAX function runs, from the profiler that comes with JAX."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax


def kernel_seconds(run: Callable[[], Any], names: Collection[str], *, repeats: int) -> dict[str, float]:
    """Profile a compiled function and return the time of its kernels in one run, on average.

    What XLA runs as a CUDA graph has no events of its own: compile with
    ``compiler_options={"xla_gpu_enable_command_buffer": ""}``.

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

    Args:
        run: runs compiled functions, and waits for them.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        return [
            event
            for path in Path(folder).rglob("*.xplane.pb")
            for event in _named_events(jax.profiler.ProfileData.from_file(str(path)))
        ]


def _named_events(profile: Any) -> Iterator[tuple[str, float]]:
    """The events with an instruction: of the planes of a GPU if there are any, else of the host's."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # XLA's own lines ("XLA Ops") show the same kernels again
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    yield str(name), event.duration_ns * 1e-9

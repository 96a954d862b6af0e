"""How long each kernel of a compiled JAX function runs, from the profiler that comes with JAX."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax


def kernel_seconds(run: Callable[[], Any], names: Collection[str], *, repeats: int) -> dict[str, float]:
    """Profile a compiled function and return the time of its kernels in one run, on average.

    XLA gives each event of a device's timeline the name of the HLO instruction behind it (``hlo_op``); an instruction
    that is several launches, or that runs in a loop, has several events, which are added up. On a CPU the events are
    those of the thread pool's tasks. What XLA runs as a CUDA graph has no events of its own: compile with
    ``compiler_options={"xla_gpu_enable_command_buffer": ""}``.

    Args:
        run: runs the function once; what it returns is waited for.
        names: of the instructions to look for.
        repeats: runs under the profiler.

    Returns:
        Seconds by name; a name that was never seen is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        found = _sum_events(profile, frozenset(names))
    return {name: seconds / repeats for name, seconds in found.items()}


def _sum_events(profile: Any, names: frozenset[str]) -> dict[str, float]:
    """Seconds by instruction; of the planes of a GPU if there are any, else of the host's."""
    planes = list(profile.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found: dict[str, float] = defaultdict(float)
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue  # XLA's own lines ("XLA Ops") show the same kernels again
            for event in line.events:
                name = dict(event.stats).get("hlo_op", event.name)
                if name in names:
                    found[name] += event.duration_ns * 1e-9
    return dict(found)

"""The lens: what to measure on which machine, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from benchkit.device import Device
from benchkit.limits import memory_limits
from benchkit.results import Json
from benchkit.run import Lens, Run
from custom_ops import measure
from custom_ops.builds import build_info, extension
from custom_ops.checks import DTYPES
from custom_ops.report import REPORT
from native_build import BuildError


def build_lens(root: Path) -> Lens:
    """Make the lens whose folder is ``root``."""
    return Lens("custom-ops", root, configure, collect, REPORT)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Sizes up to 512 MiB an operand on a GPU and 64 MiB on a CPU: from what a cache holds to what none does."""
    powers = [10, 15, 20] if quick else [*range(10, 26, 2), 27] if device == "cuda" else list(range(10, 25, 2))
    return {
        "builds": not quick,
        "call_counts": [1, 1024] if quick else [1, 4, 16, 64, 256, 1024],
        "bandwidth_counts": [2**power for power in powers],
        "bandwidth_dtypes": ["float32", "bfloat16"],
        "large_count": 2**20 if quick else 2 ** (26 if device == "cuda" else 22),
        "correctness_count": 100_003 if quick else 500_003,
        "seconds": 0.1 if quick else 0.5,
    }


def collect(run: Run) -> None:
    """Measure everything that the report shows."""
    device, configuration = run.device, run.configuration
    seconds = configuration["seconds"]
    large = configuration["large_count"]

    extension()
    info = build_info()
    run.record("serving", {"road": str(info.road), "cuda": info.cuda}, data=dict(info.not_served))
    if not configuration["builds"]:
        run.absent("What each road's build costs", "a quick run does not build anew")
    else:
        for road, build in (
            ("just-in-time", measure.build_just_in_time),
            ("ahead-of-time", measure.build_ahead_of_time),
        ):
            with run.working(f"building {road}, from nothing"):
                try:
                    run.add(build())
                except BuildError as error:  # one road closed on this machine; everything else can be measured
                    run.absent(f"The cost of the {road} build", str(error))

    with run.working("correctness"):
        for record in measure.correctness(device, configuration["correctness_count"], DTYPES):
            run.add(record)
    with run.working("the limit of memory"):
        for record in memory_limits(device, seconds=min(seconds, 0.5)):
            run.add(record)
    with run.working("calls"):
        for record in measure.capabilities(device):
            run.add(record)
        for record in measure.call_times(device, configuration["call_counts"], seconds=seconds):
            run.add(record)
    with run.working("sizes"):
        dtypes = [getattr(torch, name) for name in configuration["bandwidth_dtypes"]]
        for record in measure.bandwidths(device, configuration["bandwidth_counts"], dtypes, seconds=seconds):
            run.add(record)
    with run.working("fusion and layouts"):
        for record in measure.fusion(device, large, torch.float32, seconds=seconds):
            run.add(record)
        for record in measure.layouts(device, int(large**0.5), torch.float32, seconds=seconds):
            run.add(record)
    if device == "cpu":
        run.absent("The CUDA kernels", "this run was on a CPU")

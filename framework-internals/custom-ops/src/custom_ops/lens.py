"""The lens: what to measure on which machine, in which order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from benchkit.device import Device
from benchkit.limits import memory_limits
from benchkit.results import Json
from benchkit.run import Lens, Run
from custom_ops import measure, speed, training
from custom_ops.builds import architectures_here, load
from custom_ops.checks import DTYPES
from custom_ops.contestants import contests
from custom_ops.report import REPORT
from native_build import BuildError


def build_lens(root: Path) -> Lens:
    """Make the lens whose folder is ``root``."""
    return Lens("custom-ops", root, configure, collect, REPORT)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Sizes up to 512 MiB an operand on a GPU and 64 MiB on a CPU: from what a cache holds to what none does."""
    gpu = device == "cuda"
    powers = [12, 18] if quick else [*range(12, 26, 2), 27] if gpu else [12, 16, 20, 24]
    return {
        "builds": not quick,
        "call_counts": [1, 1024] if quick else [1, 16, 1024],
        "counts": [2**power for power in powers],
        "columns": 4096 if gpu else 1024,
        "dtypes": ["float32", "bfloat16"],
        "large_count": 2**18 if quick else 2 ** (27 if gpu else 22),
        "correctness_count": 100_003 if quick else 500_003,
        "preset": None if quick else "gpt2-124m" if gpu else "tiny",
        "seconds": 0.05 if quick else 0.4 if gpu else 0.2,
    }


def collect(run: Run) -> None:
    """Measure everything that the report shows."""
    info = load()
    run.record(
        "serving",
        {"road": str(info.road), "cuda": str(info.cuda), "sha256": str(info.sha256)},
        data=dict(info.not_served),
    )
    _collect_builds(run)
    _collect_correctness(run)
    with run.working("the limit of memory"):
        for record in memory_limits(run.device, seconds=run.configuration["seconds"]):
            run.add(record)
    _collect_calls(run)
    _collect_speed(run)
    _collect_training(run)
    if run.device == "cpu":
        run.absent("The CUDA kernels", "this run was on a CPU")
        run.absent("Peak memory", "torch keeps no count of a CPU's")


def _collect_training(run: Run) -> None:
    preset = run.configuration["preset"]
    if preset is None:
        run.absent("The operators in a training step", "a quick run does not train")
        return
    with run.working("the operators in a training step"):
        for record in training.training_steps(run.device, preset, seconds=5 * run.configuration["seconds"]):
            run.add(record)


def _collect_builds(run: Run) -> None:
    if not run.configuration["builds"]:
        run.absent("What each road's build costs", "a quick run does not build anew")
        return
    for build in (
        measure.build_just_in_time,
        measure.build_ahead_of_time,
        measure.build_torch_library,
        lambda: measure.build_stable_library(architectures_here()),
        measure.build_at_run_time,
    ):
        with run.working("building, from nothing"):
            try:
                run.add(build())
            except BuildError as error:  # one road closed on this machine; everything else can be measured
                run.absent("The cost of a build", str(error))


def _collect_correctness(run: Run) -> None:
    with run.working("correctness"):
        for record in measure.correctness(run.device, run.configuration["correctness_count"], DTYPES):
            run.add(record)
        rows = max(run.configuration["correctness_count"] // 1024, 1)
        for record in measure.accuracy(run.device, DTYPES, rows=rows, columns=1024):
            run.add(record)


def _collect_calls(run: Run) -> None:
    with run.working("calls"):
        for record in measure.capabilities(run.device):
            run.add(record)
        counts, seconds = run.configuration["call_counts"], run.configuration["seconds"]
        for record in measure.call_times(run.device, counts, seconds=4 * seconds):
            run.add(record)


def _collect_speed(run: Run) -> None:
    device, configuration = run.device, run.configuration
    seconds, large, columns = configuration["seconds"], configuration["large_count"], configuration["columns"]
    dtypes = [getattr(torch, name) for name in configuration["dtypes"]]
    compiled = configuration["builds"] and device == "cuda"
    with run.working("sizes"):
        for record in speed.operators(
            device,
            list(contests()),
            configuration["counts"],
            dtypes,
            columns=columns,
            compiled=compiled,
            seconds=seconds,
        ):
            run.add(record)
    with run.working("fusion, layouts and choices"):
        for record in speed.fusions(device, large, torch.float32, columns=columns, seconds=seconds):
            run.add(record)
        for record in measure.layouts(device, int(large**0.5), torch.float32, seconds=seconds):
            run.add(record)
        side = 56 if configuration["builds"] else 14
        for record in measure.convolutions(device, batch=64 if device == "cuda" else 2, side=side, seconds=seconds):
            run.add(record)
        if device == "cuda":
            for record in speed.accesses(device, large, dtypes, columns=columns, seconds=seconds):
                run.add(record)
            for record in speed.plans(device, large, dtypes, columns=columns, seconds=seconds):
                run.add(record)
            for dtype in dtypes:
                for record in speed.peak_memory(device, large, dtype, columns=columns):
                    run.add(record)

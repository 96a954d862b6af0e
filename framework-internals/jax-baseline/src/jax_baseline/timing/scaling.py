"""The long part of the main job: the step on several GPUs, the batch of each held fixed, beside one of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchkit import Quantity, UserError
from benchkit.device import Device
from benchkit.environment import capture
from benchkit.results import Json
from benchkit.run import Run
from jax_baseline.timing.engines import EngineSpec, bench_config

Mesh = tuple[int, int]  # devices with a copy of the weights, devices that share one


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what is timed on each mesh; how many devices there are is found out when it is."""
    size = {"preset": "gpt2-124m", "batch_size": 32, "dtype": "bfloat16", "attention": "cudnn"}
    if device == "cpu":
        size = {"preset": "tiny", "batch_size": 2, "dtype": "float32", "attention": "xla"}
    return {**size, "rounds": 6 if quick else 8, "steps": 8}


def meshes(devices: int) -> list[Mesh]:
    """The meshes that are timed: two devices, and all; once with copies of the weights, once sharing them."""
    return [mesh for number in sorted({2, devices}) for mesh in ((number, 1), (1, number))]


def sweep(run: Run, root: Path, seconds: float | None) -> None:
    """Time each mesh that is missing, and keep it at once.

    Args:
        run: whose records say what is missing.
        root: a folder inside the repository.
        seconds: after which no further mesh is begun; None for no limit.

    Raises:
        UserError: where there are no two GPUs.
    """
    import torch

    devices = torch.cuda.device_count() if run.device == "cuda" else 0
    if devices < 2:
        raise UserError(f"--sweep times the step on several GPUs; expected two or more, found {devices}")
    measure(run, root, meshes(devices), seconds)


def measure(run: Run, root: Path, wanted: list[Mesh], seconds: float | None, *, options: str = "") -> None:
    """Time each of the meshes of which the run has no record; one that fails leaves a record that says why.

    Args:
        run: its configuration says what is timed.
        root: a folder inside the repository.
        wanted: the meshes.
        seconds: after which no further mesh is begun; None for no limit.
        options: ``XLA_FLAGS`` of the processes.
    """
    source = capture(run.device, root=root).source
    begin = time.monotonic()
    for data, fsdp in wanted:
        labels = {"data": data, "fsdp": fsdp}
        if run.recorder.results.select("scaling", **labels):
            continue
        if seconds is not None and time.monotonic() - begin > seconds:
            return
        with run.working(f"a mesh of {data} × {fsdp}"):
            values, found = _beside_one(run, EngineSpec("jax", data=data, fsdp=fsdp, options=options))
        run.record("scaling", labels, values, {**source, **found})


def _beside_one(run: Run, mesh: EngineSpec) -> tuple[Mapping[str, Quantity], Mapping[str, Json]]:
    """Figures and collectives of the step on a mesh, or no figures and why it failed."""
    from jax_baseline.timing.bench import measure_engines

    asked = run.configuration["sweep"]
    model, training = bench_config(asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"])
    spread = replace(mesh, attention=asked["attention"])
    engines = {"one": replace(spread, data=1, fsdp=1), "mesh": spread}
    found = measure_engines(engines, model, training, device=run.device, rounds=asked["rounds"], steps=asked["steps"])
    alone, together = found["one"], found["mesh"]
    assert not isinstance(alone, str)  # a reference that fails is an error
    if isinstance(together, str):
        return {}, {"failed": together.rstrip(".")}
    for what, why in together.missing.items():
        run.absent(f"The {what} on a mesh of {mesh.data} × {mesh.fsdp}", f"asking for it failed: {why.rstrip('.:')}")
    tokens = training.batch_size * model.block_size
    figures = together.figures(tokens * spread.devices, asked["steps"], None)
    values = {name: figure for name, figure in figures.items() if name in ("rate", "step", "peak memory")}
    values |= {"efficiency": together.speedup, "step of one": alone.figures(tokens, asked["steps"], None)["step"]}
    return values, {"collectives": together.preparation.collectives}

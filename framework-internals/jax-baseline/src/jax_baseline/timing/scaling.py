"""Weak scaling (``run.py --sweep``): the step on several GPUs against one, with the same batch size per GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchkit import UserError
from benchkit.device import Device
from benchkit.environment import capture
from benchkit.processes import budget
from benchkit.results import Json
from benchkit.run import Run
from engines.spec import EngineSpec, bench_config
from jax_baseline.timing.records import ScalingFigures, ScalingRecord, Source

Mesh = tuple[int, int]  # replicas of the weights, devices that share one replica


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return the settings of this part. The meshes depend on the number of devices, which is read at run time."""
    size = {"preset": "gpt2-124m", "batch_size": 32, "dtype": "bfloat16", "attention": "cudnn"}
    if device == "cpu":
        size = {"preset": "tiny", "batch_size": 2, "dtype": "float32", "attention": "xla"}
    return {**size, "rounds": 6 if quick else 8, "steps": 8}


def meshes(devices: int) -> list[Mesh]:
    """Return the meshes to time: two devices and all devices, each with replicated and with sharded weights."""
    return [mesh for number in sorted({2, devices}) for mesh in ((number, 1), (1, number))]


def sweep(run: Run, root: Path) -> None:
    """Time each mesh that has no record yet, and save its record at once.

    Raises:
        UserError: If there are fewer than two GPUs.
    """
    import torch

    devices = torch.cuda.device_count() if run.device == "cuda" else 0
    if devices < 2:
        raise UserError(f"--sweep times the step on several GPUs; expected two or more, found {devices}")
    measure(run, root, meshes(devices))


def measure(run: Run, root: Path, wanted: list[Mesh], *, options: str = "") -> None:
    """Time each mesh that has no record yet, until the budget is spent. If a mesh fails, its record has the reason.

    ``options`` are the ``XLA_FLAGS`` of the processes.
    """
    environment = capture(run.device, root=root)
    source = Source(environment.date, environment.command, environment.commit, environment.dirty)
    for data, fsdp in wanted:
        if run.recorder.results.select(ScalingRecord.record_name, data=data, fsdp=fsdp):
            continue
        if budget.left() <= 0:
            return
        with run.working(f"a mesh of {data} × {fsdp}"):
            record = _against_one_device(run, EngineSpec("jax", data=data, fsdp=fsdp, options=options), source)
        run.add(record.record())


def _against_one_device(run: Run, mesh: EngineSpec, source: Source) -> ScalingRecord:
    """Time the step on a mesh and on one device, and return the record of the mesh."""
    from engines.measure import measure_engines
    from jax_baseline.timing.jax_engine import make_engine

    settings = run.configuration["sweep"]
    model, training = bench_config(settings["preset"], batch_size=settings["batch_size"], dtype=settings["dtype"])
    spread = replace(mesh, attention=settings["attention"])
    engines = {"one": replace(spread, data=1, fsdp=1), "mesh": spread}
    measured = measure_engines(
        engines, model, training, device=run.device, rounds=settings["rounds"], steps=settings["steps"],
        factory=make_engine,
    )  # fmt: skip
    alone, together = measured["one"], measured["mesh"]
    if isinstance(together, str):
        return ScalingRecord(mesh.data, mesh.fsdp, source, failed=together.rstrip("."))
    if isinstance(alone, str) or together.speedup is None:
        return ScalingRecord(mesh.data, mesh.fsdp, source, failed=together.missing["speedup"].rstrip("."))
    for what, why in together.missing.items():
        run.absent(f"The {what} on a mesh of {mesh.data} × {mesh.fsdp}", f"asking for it failed: {why.rstrip('.:')}")
    tokens = training.batch_size * model.block_size
    figures = together.figures(tokens * spread.devices, settings["steps"], None)
    step_of_one = alone.figures(tokens, settings["steps"], None).step
    return ScalingRecord(
        mesh.data,
        mesh.fsdp,
        source,
        ScalingFigures(figures.rate, figures.step, step_of_one, together.speedup, figures.peak_memory),
        together.preparation.collectives,
    )

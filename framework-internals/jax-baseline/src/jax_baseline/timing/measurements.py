"""The timing part of the lens: tokens per second of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Run
from engines.fit import fit_settings
from engines.spec import EngineSpec, bench_config
from jax_baseline.gpt.devices import TAKEN_BY_PARITY
from jax_baseline.timing.engines import named_engines
from jax_baseline.timing.records import EngineRecord


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return the settings of this part."""
    settings: dict[str, Json]
    if device == "cuda":
        names = ["torch-compile", "cudnn"]
        if not quick:
            names += ["torch-eager", "torch-compile-bf16-residual", "cudnn-no-triton-gemm", "cudnn-bf16-residual"]
            names += ["cudnn-4-steps", "cudnn-scan", "jit-donated"]
        settings = {"preset": "gpt2-124m", "batch_size": 8 if quick else 32, "dtype": "bfloat16", "steps": 8}
        settings |= {"rounds": 5 if quick else 8}
    else:
        names = ["torch-eager", "jit-donated"]
        if not quick:
            names = ["torch-eager", "jit", "jit-donated", "torch-compile", "jit-scan"]
        settings = {"preset": "tiny", "batch_size": 2, "dtype": "float32", "rounds": 6}
        settings |= {"steps": 4}
    # Compiling takes most of a quick run, and its time grows with the number of blocks.
    settings["layers"] = 1 if quick else None
    engines: Json = {name: asdict(spec) for name, spec in named_engines(names).items()}
    return {"bench": {**settings, "engines": engines, "reference": names[0]}}


def fit(settings: Mapping[str, Json], device: Device, available: int) -> dict[str, Json]:
    """Return what is different in the settings of this part where only so many bytes are free."""
    engines = {name: EngineSpec(**spec) for name, spec in settings["engines"].items()}
    return fit_settings(settings, engines, device=device, available=available, kept=TAKEN_BY_PARITY[device])


def record_engines(run: Run) -> None:
    """Time the engines of the configuration and record each, or why it failed."""
    from engines.measure import measure_engines, mfu_per_token
    from jax_baseline.timing.jax_engine import make_engine

    settings = run.configuration["bench"]
    model, training = bench_config(
        settings["preset"], batch_size=settings["batch_size"], dtype=settings["dtype"], layers=settings["layers"],
        block_size=settings.get("block_size"),
    )  # fmt: skip
    engines = {name: EngineSpec(**spec) for name, spec in settings["engines"].items()}
    with run.working("tokens per second"):
        measured = measure_engines(
            engines,
            model,
            training,
            device=run.device,
            rounds=settings["rounds"],
            steps=settings["steps"],
            factory=make_engine,
        )
    tokens = training.batch_size * model.block_size
    for name, engine in measured.items():
        if isinstance(engine, str):
            run.absent(f"The engine `{name}`", engine.rstrip("."))
            continue
        devices = engines[name].devices
        mfu = mfu_per_token(model, training, run.device, devices)
        figures = engine.figures(tokens * devices, settings["steps"], mfu)
        run.add(EngineRecord(name, engines[name].framework, engines[name], figures).record())
        for what, why in engine.missing.items():
            run.absent(f"The {what} of `{name}`", f"asking for it failed: {why.rstrip('.:')}")
    if run.device == "cpu":
        run.absent("Model FLOPs utilisation", "no datasheet peak is kept for CPUs")
        run.absent("cuDNN's attention", "it needs a CUDA GPU")

"""Half of the main job: parity per dtype, and throughput side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchkit import Quantity, limits
from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Run
from jax_baseline.engines import EngineSpec, bench_config
from torch_baseline.config import GPTConfig, TrainConfig


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what this half does on a device."""
    if device == "cuda":
        dtypes = {
            dtype: {"steps": 10 if quick else 50, "batch_size": 16} for dtype in ("float64", "float32", "bfloat16")
        }
    elif quick:
        dtypes = {dtype: {"steps": 8, "batch_size": 4} for dtype in ("float64", "float32")}
    else:
        # On a CPU a step in float64 or bfloat16 costs several in float32: they get fewer and smaller ones.
        short = {"steps": 20, "batch_size": 4}
        dtypes = {"float64": short, "float32": {"steps": 50, "batch_size": 8}, "bfloat16": short}
    parity = {"preset": "tiny", "seed": 0, "lr": 1e-3, "dtypes": dtypes}
    eager = EngineSpec("torch", compiled=False)
    if device == "cuda":
        engines = {
            "torch eager": eager,
            "torch.compile": EngineSpec("torch"),
            "jax, cuDNN attention": EngineSpec("jax", attention="cudnn"),
            "jax, XLA attention": EngineSpec("jax"),
        }
        bench = {"preset": "gpt2-124m", "batch_size": 16, "dtype": "bfloat16", "rounds": 5 if quick else 10, "steps": 8}
    else:
        engines = {"torch eager": eager, "jax": EngineSpec("jax")}
        if not quick:
            engines |= {"torch.compile": EngineSpec("torch"), "jax, not donated": EngineSpec("jax", donate=False)}
        bench = {"preset": "tiny", "batch_size": 16, "dtype": "float32", "rounds": 8 if quick else 10, "steps": 1}
    named = {name: asdict(spec) for name, spec in engines.items()}
    return {"parity": parity, "bench": {**bench, "engines": named, "reference": "torch eager"}}


def collect(run: Run) -> None:
    """Measure and keep this half."""
    _collect_parity(run)
    _collect_bench(run)
    if run.device == "cpu":
        run.absent("Model FLOPs utilisation", "no datasheet peak is kept for CPUs")
        run.absent("cuDNN's attention", "it needs a CUDA GPU")


def _collect_parity(run: Run) -> None:
    # Here and below: imported when measuring, so that rendering a report loads neither framework.
    from jax_baseline import parity, sides

    asked = run.configuration["parity"]
    for dtype, size in asked["dtypes"].items():
        with run.working(f"parity in {dtype}"):
            setup = sides.Setup.preset(
                asked["preset"], seed=asked["seed"], dtype=dtype, device=run.device, lr=asked["lr"], **size
            )
            found = sides.run(setup)
        divergence = found.divergence()
        run.record(
            "parity",
            {"dtype": dtype, **size},
            {
                f"{quantity}, {of}": Quantity(value, "nats" if quantity == "loss" else "")
                for quantity in parity.QUANTITIES
                for of, value in (
                    ("jax", found.largest(quantity)),
                    ("control", found.control_largest(quantity)),
                    ("bound", found.bounds(quantity)[-1]),
                )
            }
            | {"times control": Quantity(parity.TIMES_CONTROL[dtype], "")},
            {
                "torch": list(found.reference),
                "jax": list(found.candidate),
                "controls": [list(losses) for losses in found.controls],
                "bounds": found.bounds("loss"),
                "divergence": None if divergence is None else str(divergence),
            },
        )


def _collect_bench(run: Run) -> None:
    from jax_baseline.bench import measure_engines
    from torch_baseline.model import flops_per_token

    asked = run.configuration["bench"]
    model, training = bench_config(asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"])
    engines = {name: EngineSpec(**spec) for name, spec in asked["engines"].items()}
    with run.working("tokens per second"):
        measured = measure_engines(
            engines, model, training, device=run.device, rounds=asked["rounds"], steps=asked["steps"]
        )
    tokens = training.batch_size * model.block_size
    peak = _peak(run.device, training)
    for name, preparation in measured.preparations.items():
        sample = measured.comparison[name].quantity()
        rate = sample.per(tokens * asked["steps"], "tokens/s")
        values = {
            "rate": rate,
            "step": Quantity(tokens / rate.value, "s"),
            "first step": Quantity(preparation.first_step_seconds, "s"),
            "loss": Quantity(preparation.loss, "nats"),
            "speedup": measured.comparison.speedup(name, over=asked["reference"]),
        }
        values |= {f"{stage} time": Quantity(seconds, "s") for stage, seconds in preparation.compile_seconds.items()}
        optional: dict[str, tuple[float | None, str]] = {
            "peak memory": (measured.peak_memory[name], "B"),
            "temporaries": (preparation.temporaries, "B"),
            "XLA FLOPs": (preparation.flops, "FLOP"),
            "MFU": (None if peak is None else rate.value * flops_per_token(model) / peak, "share"),
        }
        values |= {key: Quantity(value, unit) for key, (value, unit) in optional.items() if value is not None}
        run.record("engine", {"engine": name, **asked["engines"][name]}, values, preparation.hlo)
    run.record(
        "model", values={"FLOPs": Quantity(flops_per_token(model) * tokens, "FLOP")}, data=_plain(model, training)
    )


def _peak(device: Device, training: TrainConfig) -> float | None:
    """The datasheet's rate for the dtype, FLOP/s; None for a CPU or a GPU that is not listed."""
    if device == "cpu":
        return None
    import torch

    sheet = limits.datasheet(torch.cuda.get_device_name())
    return None if sheet is None else sheet.flops.get(training.dtype)


def _plain(model: GPTConfig, training: TrainConfig) -> dict[str, Any]:
    return {"model": asdict(model), "training": training.as_plain()}

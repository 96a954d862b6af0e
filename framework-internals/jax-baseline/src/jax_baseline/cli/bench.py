"""``bench``: tokens per second of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from benchkit import numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DeviceOption, Dtype, Preset, refuse, user_errors
from torch_baseline.config import Precision

if TYPE_CHECKING:
    from engines.measure import MeasuredEngine
    from engines.spec import EngineSpec


def bench(
    context: typer.Context,
    preset: Preset = "tiny",
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per step and device")] = 16,
    dtype: Dtype = "float32",
    engines: Annotated[
        str, typer.Option(help="names, separated by commas; `list` prints all of them")
    ] = "torch-eager,jit-donated",
    rounds: Annotated[int, typer.Option(min=1, help="samples per engine")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="steps per sample")] = 1,
    sweep: Annotated[bool, typer.Option("--sweep", help="time the engines in groups: quicker, less exact")] = False,
    together: Annotated[int, typer.Option(min=1, help="with --sweep: engines per group")] = 4,
    kernels: Annotated[int, typer.Option(min=0, help="with --sweep: number of kernels to list per engine")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Measure tokens per second of the training step, with torch and JAX in interleaved rounds."""
    from engines import measure
    from engines.spec import bench_config
    from jax_baseline.timing.engines import ENGINES, named_engines
    from jax_baseline.timing.jax_engine import make_engine

    if not sweep:
        refuse(context, ("together", "kernels"), "they need --sweep")
    if engines == "list":
        print("\n".join(f"{name:28} {spec.summary}" for name, spec in ENGINES.items()))
        return
    with user_errors():
        model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype))
        chosen = named_engines(engines.split(","))
    where, tokens = resolve_device(device), batch_size * model.block_size
    if sweep:
        trials = measure.sweep(
            chosen, model, training, device=where, rounds=rounds, steps=steps, together=together, kernels=kernels > 0,
            factory=make_engine,
        )  # fmt: skip
        for name, trial in trials:
            devices = chosen[name].devices
            mfu = measure.mfu_per_token(model, training, where, devices)
            _print_trial(name, trial, tokens * devices, mfu, kernels)
        return
    with user_errors():
        measured = measure.measure_engines(
            chosen, model, training, device=where, rounds=rounds, steps=steps, factory=make_engine
        )
    _print_engines(measured, chosen, tokens, steps)


def _print_engines(
    measured: Mapping[str, MeasuredEngine | str], specs: Mapping[str, EngineSpec], tokens: int, steps: int
) -> None:
    """Print a line for each engine that failed, and a table of the others."""
    rows = []
    for name, engine in measured.items():
        if isinstance(engine, str):
            print(f"{name} failed: {engine}")
            continue
        rate = tokens * steps / engine.timing.median
        collectives = engine.preparation.collectives
        rows.append(
            (
                name,
                numbers.count(rate * specs[name].devices),
                numbers.count(rate),
                numbers.with_unit(engine.timing.median / steps, "s"),
                numbers.quantity(engine.speedup) if engine.speedup else "–",
                numbers.with_unit(engine.preparation.first_step_seconds, "s"),
                ", ".join(f"{count} {kind}" for kind, count in sorted(collectives.items())) or "–",
            )
        )
    speedup = f"speedup over {next(iter(specs))}, per device"
    header = ["engine", "tokens/s", "per device", "step", speedup, "first step", "collectives"]
    print(markdown_table(header, rows))


def _print_trial(name: str, trial: MeasuredEngine | str, tokens: int, mfu: float | None, kernels: int) -> None:
    """Print one line for an engine of a sweep, and its longest kernels below."""
    from engines.kernel_times import merge_similar

    if isinstance(trial, str):
        print(f"{name:28} failed: {trial}", flush=True)
        return
    rate = tokens / trial.timing.median
    memory = "" if trial.peak_memory is None else f"  {numbers.with_unit(trial.peak_memory, 'B')}"
    share = "" if mfu is None else f"  MFU {numbers.percent(rate * mfu)}"
    spread = (trial.timing.p80 - trial.timing.p20) / trial.timing.median
    print(
        f"{name:28} {numbers.count(rate):>9} tokens/s  {numbers.with_unit(trial.timing.median, 's')} "
        f"(spread {numbers.percent(spread)}){share}{memory}  first step "
        f"{numbers.with_unit(trial.preparation.first_step_seconds, 's')}, loss {trial.preparation.loss:.6f}",
        flush=True,
    )
    for what, why in trial.missing.items():
        print(f"    no {what}: {why}")
    if trial.kernels:
        print(f"    all {len(trial.kernels)} kernels: {numbers.with_unit(sum(k.seconds for k in trial.kernels), 's')}")
    for kernel in merge_similar(trial.kernels)[:kernels]:
        print(f"    {numbers.with_unit(kernel.seconds, 's'):>8} {kernel.calls:>5.0f} × {kernel.name[:125]}", flush=True)

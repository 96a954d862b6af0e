"""``train``, ``parity``, ``bench`` and ``converge``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from benchkit import numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, DeviceOption, Preset, Seed, user_errors
from torch_baseline.config import GPTConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.timing.bench import Trial


def train(
    preset: Preset = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps")] = None,
    data: Annotated[Path | None, typer.Option(help="text to train on [default: the one CPython carries]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for checkpoints and metrics [default: none]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the last checkpoint in --out")] = False,
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help=DTYPES)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences a step, over all devices")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="micro-batches a step")] = None,
    lr: Annotated[float | None, typer.Option(help="highest learning rate")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="of weights and batches")] = None,
    patience: Annotated[int | None, typer.Option(help="validations without improvement before stopping")] = None,
    low_precision_residual: Annotated[
        bool, typer.Option("--low-precision-residual", help="keep the residual stream in --dtype")
    ] = False,
    attention: Annotated[str, typer.Option(help="xla or cudnn")] = "xla",
    scan: Annotated[bool, typer.Option("--scan", help="scan over layers: compiled once for any depth")] = False,
    remat: Annotated[bool, typer.Option("--remat", help="compute each block again in the backward")] = False,
    steps_per_dispatch: Annotated[int, typer.Option(min=1, help="steps that one call does")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="devices with a copy of the weights")] = 1,
    fsdp: Annotated[int, typer.Option(min=1, help="devices that share a copy")] = 1,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, for several processes")] = None,
    processes: Annotated[int, typer.Option(min=1, help="of the run, with --coordinator")] = 1,
    process: Annotated[int, typer.Option(min=0, help="this one's number, with --coordinator")] = 0,
) -> None:
    """Train; prints the loss as it falls, and validation beside the unigram entropy of the text."""
    import jax

    from jax_baseline.gpt.loop import Execution
    from jax_baseline.gpt.loop import train as run
    from torch_baseline.cli import RunLog
    from torch_baseline.train import NonFiniteError

    given: dict[str, Any] = {
        "steps": steps,
        "data": data,
        "out": out,
        "dtype": dtype,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "lr": lr,
        "seed": seed,
        "patience": patience,
    }
    if coordinator is not None:
        jax.distributed.initialize(coordinator, processes, process)
    with user_errors():
        model = replace(GPTConfig.preset(preset), low_precision_residual=low_precision_residual)
        config = replace(
            TrainConfig.preset(preset),
            **{name: value for name, value in given.items() if value is not None},
            compile=False,
        )
        execution = Execution(attention, scan, remat, steps_per_dispatch, data_parallel, fsdp)
        log = RunLog(Console(highlight=False, quiet=process > 0), config.steps)
        try:
            outcome = run(model, config, device=resolve_device(device), resume=resume, execution=execution, report=log)
        except NonFiniteError as error:
            print(f"jax-baseline: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    log.summary(outcome.summary)


def parity(
    preset: Preset = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="to compare")] = 50,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "float32",
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences a step [default: the preset's]")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Compare JAX with torch step by step; exit status 1 if it leaves the bounds that torch's own rounding sets."""
    from jax_baseline.parity.adapters import Setup, run
    from jax_baseline.parity.comparison import QUANTITIES

    with user_errors():
        setup = Setup.preset(
            preset,
            steps=steps,
            seed=seed,
            dtype=cast(Precision, dtype),
            device=resolve_device(device),
            lr=lr,
            batch_size=batch_size,
        )
        found = run(setup)
    rows = [
        (
            quantity,
            *map(
                numbers.error_size,
                (found.largest(quantity), found.control_largest(quantity), found.bounds(quantity)[-1]),
            ),
        )
        for quantity in QUANTITIES
    ]
    print(markdown_table(["largest deviation of", "JAX", "torch in other bases", "bound"], rows))
    divergence = found.divergence()
    what = f"{preset}, {steps} steps, seed {seed}, {dtype}"
    if divergence is None:
        print(
            f"PARITY {what}: all within bounds; losses at most {numbers.error_size(found.largest('loss'))} nats apart"
        )
        return
    print(f"NO PARITY {what}: {divergence}")
    raise typer.Exit(1)


def bench(
    preset: Preset = "tiny",
    batch_size: Annotated[int, typer.Option(min=1, help="sequences a step and device")] = 16,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "float32",
    engines: Annotated[
        str, typer.Option(help="names separated by commas; `list` prints them")
    ] = "torch-eager,jit-donated",
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    steps: Annotated[int, typer.Option(min=1, help="that a sample holds")] = 1,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="prepare in groups, at the same time: quicker, rougher")
    ] = False,
    together: Annotated[int, typer.Option(min=1, help="engines of a group of --sweep")] = 4,
    kernels: Annotated[int, typer.Option(min=0, help="with --sweep: kernels to list of each engine")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Tokens per second of one training step, torch and JAX interleaved round by round."""
    from jax_baseline.timing import bench as benchmark
    from jax_baseline.timing.engines import ENGINES, bench_config, named_engines

    if engines == "list":
        print("\n".join(f"{name:28} {spec.summary}" for name, spec in ENGINES.items()))
        return
    with user_errors():
        model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype))
        chosen = named_engines(engines.split(","))
    where, tokens = resolve_device(device), batch_size * model.block_size
    if sweep:
        trials = benchmark.sweep(
            chosen, model, training, device=where, rounds=rounds, steps=steps, together=together, kernels=kernels > 0
        )
        for name, trial in trials:
            devices = chosen[name].devices
            mfu = benchmark.mfu_per_token(model, training, where, devices)
            _print_trial(name, trial, tokens * devices, mfu, kernels)
        return
    with user_errors():
        measured = benchmark.measure_engines(chosen, model, training, device=where, rounds=rounds, steps=steps)
    first = next(iter(chosen))
    rows = []
    for name, engine in measured.items():
        if isinstance(engine, str):
            print(f"{name} failed: {engine}")
            continue
        each = tokens * steps / engine.timing.median
        collectives = engine.preparation.collectives
        rows.append(
            (
                name,
                numbers.count(each * chosen[name].devices),
                numbers.count(each),
                numbers.with_unit(engine.timing.median / steps, "s"),
                numbers.quantity(engine.speedup),
                numbers.with_unit(engine.preparation.first_step_seconds, "s"),
                ", ".join(f"{count} {kind}" for kind, count in sorted(collectives.items())) or "–",
            )
        )
    header = ["engine", "tokens/s", "a device", "step", f"speed over {first}, a device", "first step", "collectives"]
    print(markdown_table(header, rows))


def _print_trial(name: str, trial: Trial | str, tokens: int, mfu: float | None, kernels: int) -> None:
    """One engine of a sweep: a line, and its largest kernels below."""
    from jax_baseline.timing.kernel_times import alike

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
    if trial.memory_unknown:
        print(f"    no peak memory: {trial.memory_unknown}")
    if trial.unprofiled:
        print(f"    no kernels: {trial.unprofiled}")
    if trial.kernels:
        print(f"    all {len(trial.kernels)} kernels: {numbers.with_unit(sum(k.seconds for k in trial.kernels), 's')}")
    for kernel in alike(trial.kernels)[:kernels]:
        print(f"    {numbers.with_unit(kernel.seconds, 's'):>8} {kernel.calls:>5.0f} × {kernel.name[:125]}", flush=True)


def converge(
    preset: Preset = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 1000,
    seeds: Annotated[int, typer.Option(min=2, help="how many")] = 3,
    device: DeviceOption = "auto",
) -> None:
    """Train both frameworks to the end from several seeds; exit status 1 if they do not arrive at the same loss."""
    from jax_baseline.parity.convergence import run

    with user_errors():
        model, config = GPTConfig.preset(preset), replace(TrainConfig.preset(preset), steps=steps)
        found = run(model, config, seeds=range(seeds), device=resolve_device(device))
    rows = [
        (seed, f"{theirs:.4f}", f"{ours:.4f}")
        for seed, theirs, ours in zip(found.seeds, found.torch, found.jax, strict=True)
    ]
    print(markdown_table(["seed", "torch, bits per held-out byte", "JAX"], rows))
    verdict = "ALIKE" if found.alike else "NOT ALIKE"
    print(
        f"{verdict} {preset}, {steps} steps: JAX less torch {found.difference:+.4f} bits, "
        f"seed noise {found.seed_noise:.4f}, unigram entropy {found.unigram_bits:.3f}"
    )
    if not found.alike:
        raise typer.Exit(1)


COMMANDS = (train, parity, bench, converge)

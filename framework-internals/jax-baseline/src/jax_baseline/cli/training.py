"""``train``, ``parity`` and ``converge``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from benchkit import numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, DeviceOption, Dtype, Preset, user_errors
from torch_baseline.config import GPTConfig, Precision, TrainConfig


def train(
    preset: Preset = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="number of optimizer steps")] = None,
    data: Annotated[Path | None, typer.Option(help="text to train on [default: a text that CPython contains]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for checkpoints and metrics [default: none]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume from the last checkpoint in --out")] = False,
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help=DTYPES)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per step, over all devices")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="micro-batches per step")] = None,
    lr: Annotated[float | None, typer.Option(help="highest learning rate")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="seed of weights and batches")] = None,
    patience: Annotated[int | None, typer.Option(help="validations without improvement until training stops")] = None,
    low_precision_residual: Annotated[
        bool, typer.Option("--low-precision-residual", help="keep the residual stream in --dtype")
    ] = False,
    attention: Annotated[str, typer.Option(help="xla or cudnn")] = "xla",
    scan: Annotated[bool, typer.Option("--scan", help="scan over the blocks, so that only one is compiled")] = False,
    remat: Annotated[bool, typer.Option("--remat", help="recompute each block in the backward pass")] = False,
    steps_per_dispatch: Annotated[int, typer.Option(min=1, help="steps per call of the compiled function")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="replicas of the weights")] = 1,
    fsdp: Annotated[int, typer.Option(min=1, help="devices that share one replica")] = 1,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, for several processes")] = None,
    processes: Annotated[int, typer.Option(min=1, help="number of processes, with --coordinator")] = 1,
    process: Annotated[int, typer.Option(min=0, help="index of this process, with --coordinator")] = 0,
) -> None:
    """Train, and print losses and validation. The unigram entropy of the text is printed for comparison."""
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
    steps: Annotated[int, typer.Option(min=1, help="number of steps to compare")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="seed of weights and batches")] = 0,
    dtype: Dtype = "float32",
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
    batch_size: Annotated[int | None, typer.Option(min=1, help="sequences per step [default: the preset's]")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Compare JAX with torch step by step. Exit status 1 if a deviation exceeds its bound.

    The bounds come from permuted references: torch with renumbered units, which differs from torch by rounding alone.
    """
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
        compared = run(setup)
    deviations = {
        quantity: (compared.largest(quantity), compared.control_largest(quantity), compared.bounds(quantity)[-1])
        for quantity in QUANTITIES
    }
    rows = [(quantity, *map(numbers.error_size, sizes)) for quantity, sizes in deviations.items()]
    print(markdown_table(["largest deviation of", "JAX", "permuted torch", "bound"], rows))
    divergence = compared.divergence()
    subject = f"{preset}, {steps} steps, seed {seed}, {dtype}"
    if divergence is None:
        largest = numbers.error_size(compared.largest("loss"))
        print(f"PARITY {subject}: all within bounds; losses at most {largest} nats apart")
        return
    print(f"NO PARITY {subject}: {divergence}")
    raise typer.Exit(1)


def converge(
    preset: Preset = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="number of optimizer steps")] = 1000,
    seeds: Annotated[int, typer.Option(min=2, help="number of seeds")] = 3,
    device: DeviceOption = "auto",
) -> None:
    """Train with both frameworks from several seeds. Exit status 1 if they do not reach the same validation loss."""
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
        f"{verdict} {preset}, {steps} steps: JAX minus torch {found.difference:+.4f} bits, "
        f"seed noise {found.seed_noise:.4f}, unigram entropy {found.unigram_bits:.3f}"
    )
    if not found.alike:
        raise typer.Exit(1)


COMMANDS = (train, parity, converge)

"""``train``, ``parity`` and ``bench``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer

from benchkit import numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, DeviceOption, Preset, Seed, user_errors
from torch_baseline.config import GPTConfig, Precision, TrainConfig


def train(
    preset: Preset = "tiny",
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps [default: the preset's]")] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPES)] = None,
    seed: Seed = 0,
    accumulation: Annotated[int, typer.Option(min=1, help="micro-batches a step")] = 1,
    data: Annotated[Path | None, typer.Option(help="text to train on [default: the one CPython carries]")] = None,
    device: DeviceOption = "auto",
) -> None:
    """Train, without averaging weights; prints the loss, and the validation beside the unigram entropy of the text."""
    from jax_baseline.loop import NonFiniteError, StepLog, run

    with user_errors():
        model, config = GPTConfig.preset(preset), TrainConfig.preset(preset)
        config = replace(
            config,
            steps=steps or config.steps,
            dtype=cast(Precision, dtype or config.dtype),
            seed=seed,
            accumulation=accumulation,
            data=data,
            compile=False,
            ema_decay=0.0,  # the presets of torch's loop average the weights; this loop does not yet
        )
    every = max(config.steps // 20, 1)

    def log(event: StepLog) -> None:
        if event.step % every == 0 or event.step == 1:
            print(
                f"step {event.step:>{len(str(config.steps))}}  loss {event.loss:.4f}  "
                f"grad norm {event.gradient_norm:.3f}  {numbers.count(event.tokens_per_second)} tokens/s",
                flush=True,
            )

    with user_errors():
        try:
            summary = run(model, config, device=resolve_device(device), report=log)
        except NonFiniteError as error:
            print(f"jax-baseline: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    print(
        f"{summary.steps} steps: {summary.bits:.3f} bits per held-out byte; "
        f"unigram entropy {summary.unigram_bits:.3f}; "
        f"first step {numbers.with_unit(summary.first_step_seconds, 's')}"
    )


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
    from jax_baseline.parity import QUANTITIES, Setup, run

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
            *map(numbers.error_size, (found.largest(quantity), found.control_largest(quantity), found.bound(quantity))),
        )
        for quantity in QUANTITIES
    ]
    print(markdown_table(["largest deviation of", "JAX", "torch, other attention", "bound"], rows))
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
    batch_size: Annotated[int, typer.Option(min=1, help="sequences a step")] = 16,
    dtype: Annotated[str, typer.Option(help=DTYPES)] = "float32",
    attention: Annotated[str, typer.Option(help="of JAX: xla or cudnn")] = "xla",
    compile: Annotated[bool, typer.Option(help="time torch.compile as well")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    device: DeviceOption = "auto",
) -> None:
    """Tokens per second of one training step, torch and JAX interleaved round by round."""
    from jax_baseline.bench import measure_engines
    from jax_baseline.engines import EngineSpec, bench_config

    with user_errors():
        model, training = bench_config(preset, batch_size=batch_size, dtype=cast(Precision, dtype))
        engines = {"torch eager": EngineSpec("torch", compiled=False), "jax": EngineSpec("jax", attention=attention)}
        if compile:
            engines["torch.compile"] = EngineSpec("torch")
        measured = measure_engines(engines, model, training, device=resolve_device(device), rounds=rounds)
    tokens = batch_size * model.block_size
    rows = [
        (
            name,
            numbers.count(tokens / timing.median),
            numbers.quantity(timing.quantity()),
            numbers.quantity(measured.comparison.speedup(name, over="torch eager")),
            numbers.with_unit(measured.preparations[name].first_step_seconds, "s"),
        )
        for name, timing in measured.comparison.timings.items()
    ]
    print(markdown_table(["engine", "tokens/s", "step", "speed over torch eager", "first step"], rows))


COMMANDS = (train, parity, bench)

"""``train``, ``parity`` and ``bench``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from benchkit import numbers
from benchkit.device import Device, resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, DeviceOption, Preset, Seed, user_errors
from torch_baseline.config import GPTConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.bench import Trial


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
    from jax_baseline import bench as benchmark
    from jax_baseline.engines import ENGINES, bench_config, named_engines

    if engines == "list":
        print("\n".join(f"{name:28} {spec}" for name, spec in ENGINES.items()))
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
            _print_trial(name, trial, tokens, _peak_share(model, where, training.dtype), kernels)
        return
    with user_errors():
        measured = benchmark.measure_engines(chosen, model, training, device=where, rounds=rounds, steps=steps)
    first = next(iter(chosen))
    rows = [
        (
            name,
            numbers.count(tokens * steps / timing.median),
            numbers.with_unit(timing.median / steps, "s"),
            numbers.quantity(measured.comparison.speedup(name, over=first)),
            numbers.with_unit(measured.preparations[name].first_step_seconds, "s"),
        )
        for name, timing in measured.comparison.timings.items()
    ]
    print(markdown_table(["engine", "tokens/s", "step", f"speed over {first}", "first step"], rows))


def _peak_share(model: GPTConfig, device: Device, dtype: Precision) -> float | None:
    """The share of the datasheet's peak that one token a second is; None where no peak is known."""
    import torch

    from torch_baseline.model import flops_per_token
    from torch_baseline.throughput import peak_flops

    peak = peak_flops(torch.device(device), dtype)
    return None if peak is None else flops_per_token(model) / peak


def _print_trial(name: str, trial: Trial | str, tokens: int, flops_share: float | None, kernels: int) -> None:
    """One engine of a sweep: a line, and its largest kernels below."""
    if isinstance(trial, str):
        print(f"{name:28} failed: {trial.splitlines()[-1]}", flush=True)
        return
    rate = tokens / trial.timing.median
    memory = "" if trial.peak_memory is None else f"  {numbers.with_unit(trial.peak_memory, 'B')}"
    share = "" if flops_share is None else f"  MFU {numbers.percent(rate * flops_share)}"
    spread = (trial.timing.p80 - trial.timing.p20) / trial.timing.median
    print(
        f"{name:28} {numbers.count(rate):>9} tokens/s  {numbers.with_unit(trial.timing.median, 's')} "
        f"(spread {numbers.percent(spread)}){share}{memory}  first step "
        f"{numbers.with_unit(trial.preparation.first_step_seconds, 's')}, loss {trial.preparation.loss:.6f}",
        flush=True,
    )
    if trial.kernels:
        print(f"    all {len(trial.kernels)} kernels: {numbers.with_unit(sum(k.seconds for k in trial.kernels), 's')}")
    for kernel in trial.kernels[:kernels]:
        print(f"    {numbers.with_unit(kernel.seconds, 's'):>8} {kernel.calls:>5.0f} × {kernel.name[:110]}", flush=True)


COMMANDS = (train, parity, bench)

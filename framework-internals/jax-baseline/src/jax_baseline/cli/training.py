"""``train``, ``parity`` and ``converge``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from benchkit import UserError, numbers
from benchkit.device import resolve_device
from benchkit.report import markdown_table
from jax_baseline.cli.options import DTYPES, DeviceOption, Dtype, Preset, refuse, user_errors
from torch_baseline.config import GPTConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.parity.comparison import Comparison


# Options of parity that choose the baseline's GPT and its run.
_OF_THE_GPT = (
    *("preset", "steps", "seed", "dtype", "lr", "batch", "length"),
    *("layers", "heads", "width", "probe", "device"),
)


def train(
    context: typer.Context,
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
    checkpoint_interval: Annotated[
        int | None, typer.Option(min=0, help="steps between checkpoints; 0 saves after the last step only")
    ] = None,
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
    from torch_baseline.cli import RunLog, one_line_ends, settings

    given: dict[str, Any] = {
        "steps": steps,
        "data": data,
        "out": out,
        "dtype": dtype,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "lr": lr,
        "seed": seed,
        "checkpoint_interval": checkpoint_interval,
        "patience": patience,
        "compile": False,
    }
    if coordinator is None:
        refuse(context, ("processes", "process"), "they need --coordinator, and a command for each process")
    else:
        jax.distributed.initialize(coordinator, processes, process)
    model, config = settings(preset, given)
    model = replace(model, low_precision_residual=low_precision_residual)
    log = RunLog(Console(highlight=False, quiet=process > 0), config.steps)
    with user_errors(), one_line_ends("jax-baseline"):
        execution = Execution(attention, scan, remat, steps_per_dispatch, data_parallel, fsdp)
        outcome = run(model, config, device=resolve_device(device), resume=resume, execution=execution, report=log)
    log.summary(outcome.summary)


def parity(
    context: typer.Context,
    torch_side: Annotated[
        str | None, typer.Argument(help="file.py:function → (module, loss) [default: torch_baseline's GPT]")
    ] = None,
    jax_side: Annotated[
        str | None, typer.Argument(help="file.py:function → (parameters, loss[, optimizer[, state]])")
    ] = None,
    preset: Preset = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="number of steps to compare")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="seed of weights and batches")] = 0,
    dtype: Dtype = "float32",
    lr: Annotated[float, typer.Option(help="highest learning rate")] = 1e-3,
    batch: Annotated[
        int | None, typer.Option("--batch", "--batch-size", min=1, help="sequences per step [default: the preset's]")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens per sequence [default: the preset's]")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="number of blocks [default: the preset's]")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="attention heads [default: the preset's]")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="width of the model [default: the preset's]")] = None,
    probe: Annotated[bool, typer.Option(help="also take two steps with scaled weights and no warm-up")] = True,
    device: DeviceOption = "auto",
) -> None:
    """Compare JAX with torch step by step. Exit status 1 if a deviation exceeds its bound, 3 if no verdict is possible.

    The bounds come from controls: torch with renumbered units and rounding noise, which differs from torch by rounding
    alone. The probe repeats the comparison where mistakes are larger than rounding: with scaled weights, without
    warm-up, and in float64 where the model is small.
    """
    from jax_baseline.parity.gpt.adapters import Setup, run

    if (torch_side is None) != (jax_side is None):
        raise UserError("parity takes two functions (torch's, then JAX's) or none (the baseline's GPT), got one")
    if torch_side and jax_side:
        refuse(context, _OF_THE_GPT, "a pair takes one step for each of its inputs(), in float64 and in float32")
        _parity_of_pair(torch_side, jax_side)
        return
    with user_errors():
        setup = Setup.preset(
            preset,
            steps=steps,
            seed=seed,
            dtype=cast(Precision, dtype),
            device=resolve_device(device),
            lr=lr,
            batch_size=batch,
            block_size=length,
            n_layer=layers,
            n_head=heads,
            n_embd=width,
        )
        compared = run(setup)
    _print_deviations(compared)
    subject = f"{preset}, {steps} steps, seed {seed}, {dtype}"
    divergence = compared.divergence()
    if divergence is None and probe:
        subject, compared = f"{subject}; probe in {setup.probe().training.dtype}", run(setup.probe())
        print("\nprobe: scaled weights, no warm-up\n")
        _print_deviations(compared)
        divergence = compared.divergence()
    reasons = {
        "NO PARITY": str(divergence),
        "CAN'T BE JUDGED": f"rounding alone moves {compared.too_vague}; take fewer steps, or a lower --lr",
        "PARITY": f"all within bounds; losses at most {numbers.error_size(compared.largest('loss'))} nats apart",
    }
    verdict = compared.verdict
    print(f"{verdict} {subject}: {reasons[verdict]}")
    print(_power(compared))
    _exit_unless_parity(verdict)


def _parity_of_pair(torch_side: str, jax_side: str) -> None:
    """Compare a pair of models in float64, which shows what they compute, and in float32: how they round."""
    from jax_baseline.cli.pair_file import load_pair
    from jax_baseline.parity.pairs.run import run

    pair = load_pair(torch_side, jax_side)
    subject = f"{torch_side} and {jax_side}, {len(pair.batches)} steps"
    narrowest = "float32"
    for dtype in ("float64", "float32"):
        print(f"{dtype}:\n")
        outcome = run(pair, dtype, narrowest=narrowest)
        narrowest = outcome.narrowest
        _print_deviations(outcome.comparison)
        if outcome.widened:
            print(outcome.widened)
        print(f"{outcome.verdict} {subject}, {dtype}: {outcome}")
        if outcome.where:
            print(outcome.where)
        print(_power(outcome.comparison))
        _exit_unless_parity(outcome.verdict)


def _exit_unless_parity(verdict: str) -> None:
    """End with status 1 if the sides differ, and 3 if they can't be judged."""
    if verdict != "PARITY":
        raise typer.Exit(1 if verdict == "NO PARITY" else 3)


def _print_deviations(compared: Comparison) -> None:
    """Print the largest deviations, those of the controls, and the bounds of the last step."""
    from jax_baseline.parity.comparison import QUANTITIES

    rows = [
        (
            quantity,
            *map(
                numbers.error_size,
                (compared.largest(quantity), compared.control_largest(quantity), compared.bounds(quantity)[-1]),
            ),
        )
        for quantity in QUANTITIES
        if compared.deviations[0][quantity].of_array
    ]
    print(markdown_table(["largest deviation of", "JAX", "torch with other rounding", "bound"], rows))


def _power(compared: Comparison) -> str:
    """Say which differences a verdict cannot see, and how often it is wrong about a correct port."""
    from jax_baseline.parity.comparer import FALSE_ALARMS
    from jax_baseline.parity.comparison import QUANTITIES

    seen = [
        f"{numbers.error_size(compared.bounds(name)[-1])} {'nats in' if name == 'loss' else 'of'} the {name}"
        for name in QUANTITIES
        if compared.deviations[0][name].of_array
    ]
    return (
        f"Differences below {', '.join(seen)} would not be seen, nor what begins after the compared steps, as a "
        f"schedule may. The bound is {compared.margin:.1f} times the controls' largest "
        f"deviation: of {1 / FALSE_ALARMS:,.0f} correct ports at most 1 is called wrong "
        f"({compared.comparisons:,} comparisons by step and array, {FALSE_ALARMS / compared.comparisons:.0e} each, "
        f"{compared.dtype})."
    )


def converge(
    preset: Preset = "tiny",
    steps: Annotated[int, typer.Option(min=1, help="number of optimizer steps")] = 1000,
    seeds: Annotated[int, typer.Option(min=2, help="number of seeds")] = 3,
    device: DeviceOption = "auto",
) -> None:
    """Train with both frameworks from several seeds. Exit status 1 if they do not reach the same validation loss."""
    from jax_baseline.parity.gpt.convergence import run
    from torch_baseline.cli import one_line_ends

    with user_errors(), one_line_ends("jax-baseline"):
        model, config = GPTConfig.preset(preset), replace(TrainConfig.preset(preset), steps=steps)
        runs, summary = run(model, config, seeds=range(seeds), device=resolve_device(device))
    rows = [(record.seed, f"{record.torch.value:.4f}", f"{record.jax.value:.4f}") for record in runs]
    print(markdown_table(["seed", "torch, bits per held-out byte", "JAX"], rows))
    print(
        f"{'ALIKE' if summary.alike else 'NOT ALIKE'} {preset}, {steps} steps: JAX minus torch "
        f"{summary.difference.value:+.4f} bits, seed noise {summary.seed_noise.value:.4f}, unigram entropy "
        f"{summary.unigram.value:.3f}"
    )
    if not summary.alike:
        raise typer.Exit(1)


COMMANDS = (train, parity, converge)

"""``python -m torch_baseline train`` and ``sample``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from benchkit import UserError, numbers
from benchkit.command import one_line_errors
from benchkit.command.finite import finite_option
from benchkit.device import resolve_device
from torch_baseline import checkpoint as checkpoints
from torch_baseline.config import LARGEST_SEED, GPTConfig, TrainConfig
from torch_baseline.loop import BEST, LAST, NonFiniteError, Terminated
from torch_baseline.parallel import RankFailed, is_first_process, launch, require_equal_shares, started_by_torchrun
from torch_baseline.records import Event, Start, StepLog, Summary, ValidationLog
from torch_baseline.sample import model_from_checkpoint, sample_bytes
from torch_baseline.train import train

app = typer.Typer(
    help="One small GPT and its training loop.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# Number of step lines that a run prints, whatever its length.
_LOG_LINES = 20


def main() -> None:
    """Run the command line. An error that the user can fix is one line on standard error and exit status 2."""
    with one_line_errors("torch_baseline"):
        app()


@contextmanager
def one_line_ends(command: str) -> Iterator[None]:
    """Exit with one line and status 1 after a number that is not finite, and 143 after SIGTERM.

    Of several processes, which all end so, the first prints it.
    """
    try:
        yield
    except (NonFiniteError, Terminated) as error:
        if is_first_process():
            print(f"{command}: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, NonFiniteError) else 128 + signal.SIGTERM) from None


def settings(preset: str, given: Mapping[str, Any]) -> tuple[GPTConfig, TrainConfig]:
    """Return the shape and the settings of a preset, with the options that were given.

    Args:
        preset: Name of the preset.
        given: Fields of :class:`TrainConfig` by name; None for the preset's value. The lowest learning rate keeps its
            ratio to the highest.

    Raises:
        UserError: For an unknown preset, or an impossible value.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        model, config = GPTConfig.preset(preset), TrainConfig.preset(preset)
        if "lr" in chosen:
            chosen.setdefault("min_lr", config.min_lr * (chosen["lr"] / config.lr))
        return model, replace(config, **chosen)
    except ValueError as error:
        raise UserError(str(error)) from error


@app.command("train")
def train_command(
    preset: Annotated[str, typer.Option(help="tiny (CPU) or gpt2-124m (GPU)")] = "tiny",
    steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    data: Annotated[Path | None, typer.Option(help="text to train on [default: documentation in CPython]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for checkpoints and metrics [default: none]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint in --out")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float64, float32, bfloat16 or float16")] = None,
    batch_size: Annotated[int | None, typer.Option(help="sequences per step, over all processes")] = None,
    accumulation: Annotated[int | None, typer.Option(help="micro-batches per step")] = None,
    lr: Annotated[float | None, typer.Option(help="highest learning rate; the lowest is a tenth of it")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of weights and batches")] = None,
    patience: Annotated[int | None, typer.Option(help="validations without improvement before stopping")] = None,
    parallel: Annotated[str | None, typer.Option(help="ddp or fsdp, in several processes")] = None,
    processes: Annotated[int, typer.Option(min=1, help="start so many, by torchrun, one for each GPU")] = 1,
    compile: Annotated[bool | None, typer.Option(help="pass the model through torch.compile")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="use deterministic algorithms")] = False,
) -> None:
    """Train, and print the loss, and the validation loss beside the unigram entropy of the text."""
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
        "parallel": parallel,
        "compile": compile,
        "deterministic": deterministic,
    }
    model_config, config = settings(preset, given)
    if processes > 1 and not started_by_torchrun():
        _launch(processes, config)
        return
    # Of several processes every one reports the same, and one prints it.
    log = RunLog(Console(highlight=False, quiet=not is_first_process()), config.steps)
    with one_line_ends("torch_baseline"):
        log.summary(train(model_config, config, device=resolve_device(device), resume=resume, report=log))


def _launch(processes: int, config: TrainConfig) -> None:
    """Run this command in several processes. If one fails, say what the run keeps, and exit with its status.

    Raises:
        UserError: If the batch cannot be divided among them.
    """
    if config.parallel == "none":
        raise UserError(
            f"--processes {processes} needs --parallel: ddp, a model in each, or fsdp, a part of it in each"
        )
    require_equal_shares(config, processes)
    before = _written(config)
    try:
        launch(processes, ["-m", "torch_baseline", *sys.argv[1:]])
    except RankFailed as error:
        kept = "nothing is kept without a checkpoint in --out"
        if (written := _written(config)) is not None:
            kept = f"{config.out} has a checkpoint; continue with --resume, with any number of processes"
            if written == before:  # the processes may have refused to continue it
                kept = f"the checkpoint in {config.out} is as it was"
        print(f"torch_baseline: {error}; {kept}", file=sys.stderr)
        raise typer.Exit(error.status) from None  # as of a run in one process that ends so


def _written(config: TrainConfig) -> int | None:
    """When the last checkpoint was written, in nanoseconds; None if there is none."""
    last = None if config.out is None else config.out / LAST
    return last.stat().st_mtime_ns if last is not None and last.exists() else None


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="folder of a training run, or a checkpoint")],
    prompt: Annotated[str, typer.Option(help="beginning of the text")] = "The ",
    count: Annotated[int, typer.Option("--bytes", min=1, help="number of bytes to generate")] = 300,
    temperature: Annotated[float, finite_option(help="0 takes the most likely byte")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="seed of the sampling")] = 0,
) -> None:
    """Generate text with the best model of a run."""
    if not prompt:
        raise UserError("--prompt must have at least one byte, got an empty text")
    model = model_from_checkpoint(checkpoints.load(run / BEST if run.is_dir() else run))
    start = os.fsencode(prompt)  # the bytes that were typed, whatever their encoding
    written = bytes(sample_bytes(model, start, count, temperature=temperature, seed=seed))
    print((start + written).decode(errors="replace"))


class RunLog:
    """Prints a run's events as aligned lines.

    Args:
        console: Where to print.
        steps: Number of steps of the whole run; it determines which steps are printed.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.unigram_bits = 0.0
        self.every = max(steps // _LOG_LINES, 1)

    def __call__(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, Start):
            self._start(event)
        elif isinstance(event, StepLog):
            if event.step % self.every == 0 or event.step == 1:
                self._step(event)
        else:
            self._validation(event)

    def summary(self, summary: Summary) -> None:
        """Print the outcome of the run."""
        speed = ""
        if summary.tokens_per_second is not None:
            speed = f"; {numbers.count(summary.tokens_per_second)} tokens/s"
            speed += "" if summary.mfu is None else f", MFU {numbers.percent(summary.mfu)}"
        stopped = ", stopped early" if summary.stopped_early else ""
        averaged = "" if summary.ema_bits is None else f" ({summary.ema_bits:.3f} with averaged weights)"
        self._line(
            f"[bold]{summary.steps} steps{stopped}: {summary.bits:.3f} bits per held-out byte[/]{averaged}, "
            f"best {summary.best_bits:.3f}; unigram entropy {summary.unigram_bits:.3f}{speed}"
        )

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _start(self, event: Start) -> None:
        self.unigram_bits = event.unigram_bits
        self._line(f"text    {escape(event.corpus)}, SHA-256 {event.sha256[:16]}…")
        if event.note:
            self._line(f"note    {escape(event.note)}")
        resumed = f", continuing after step {event.step}" if event.step else ""
        self._line(f"model   {numbers.count(event.parameters)} parameters on {event.device}{resumed}")

    def _step(self, event: StepLog) -> None:
        mfu = "" if event.mfu is None else f"  MFU {numbers.percent(event.mfu)}"
        self._line(
            f"step {event.step:>{len(str(self.steps))}}  loss {event.loss:.4f}  lr {event.lr:.2e}  "
            f"grad norm {event.gradient_norm:.3f}  {numbers.count(event.tokens_per_second)} tokens/s{mfu}"
        )

    def _validation(self, event: ValidationLog) -> None:
        averaged = "" if event.ema_bits is None else f", averaged weights {event.ema_bits:.3f}"
        best = "  (best)" if event.best else ""
        self._line(
            f"[bold]validation {event.bits:.3f} bits/byte[/]{averaged}; unigram entropy {self.unigram_bits:.3f}{best}"
        )

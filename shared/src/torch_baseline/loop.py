"""The training loop, readable top to bottom: step, log, validate, save.

It belongs to no framework: a :class:`Trainer` takes the steps. :mod:`torch_baseline.train` has torch's, and
``jax_baseline.gpt.loop`` JAX's. Batches, learning rates, events, files and checkpoints are therefore the same, and a
run of one framework goes on in the other. Nothing is printed here; ``report`` receives the events as they happen.
"""

from __future__ import annotations

import math
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError, environment
from benchkit.device import Device
from benchkit.results import only_writer
from torch_baseline import checkpoint as checkpoints
from torch_baseline.checkpoint import Checkpoint
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Corpus, Tokens, batch, load_corpus, require_length, unigram_entropy_bits
from torch_baseline.model import parameter_count
from torch_baseline.optim import learning_rate
from torch_baseline.records import METRICS, Report, RunFiles, Start, StepLog, Summary, ValidationLog
from torch_baseline.throughput import Throughput

LAST, BEST = "last.pt", "best.pt"

BITS_PER_NAT = 1 / math.log(2)


class NonFiniteError(RuntimeError):
    """A loss or gradient is infinite or NaN. The message names the step and says which weights remain."""


class Terminated(Exception):
    """The process received SIGTERM; the message says where the run continues."""


class Trainer(Protocol):
    """The state of a run in one framework, and what the loop does with it; those of the frameworks inherit from it.

    Attributes:
        best_loss: Lowest validation loss so far, nats per byte.
        stale: Number of validations since the lowest one.
    """

    best_loss: float
    stale: int

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""

    @property
    def place(self) -> Place:
        """Where the run takes place."""

    @property
    def averages(self) -> bool:
        """Whether the run keeps a moving average of the weights."""

    def take_steps(self, batches: Sequence[tuple[Tokens, Tokens]]) -> Iterable[tuple[float, float]]:
        """Take one step for each batch, and yield the loss and the gradient norm of each.

        Raises:
            NonFiniteError: At the first step whose numbers are not finite.
        """

    def validation_loss(self, *, averaged: bool) -> float:
        """Return the mean loss of the held-out bytes, with the weights or with their average."""

    def first_non_finite(self, *, averaged: bool) -> str:
        """Say in words where the first number that is not finite is."""

    def note_validation(self, loss: float) -> bool:
        """Record a validation loss and return whether it is finite and the lowest so far."""
        best = math.isfinite(loss) and loss < self.best_loss
        if best:
            self.best_loss = loss
        self.stale = 0 if best else self.stale + 1
        return best

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the whole state; all processes must call it."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over the state of a checkpoint."""


@dataclass(frozen=True)
class Place:
    """Where a run takes place, and how its steps are called.

    Attributes:
        device: Kind of device.
        shown: The device or devices, for logs.
        processes: Number of processes.
        is_main: Whether this process writes files.
        peak: Peak FLOP/s of all devices; None if it is unknown.
        steps_per_call: Steps of one call of :meth:`Trainer.take_steps`, unless something is due sooner.
        ends_itself: Whether SIGTERM lets the step finish and saves it. Otherwise it ends the process at once.
        about: Further metadata.
        agreed_end: Of several processes, which get SIGTERM at different steps: called after each call of
            :meth:`Trainer.take_steps` with whether this one got it, whether all of them end here. None where a process
            decides alone.
        gather: Of several processes: returns the same row of numbers of all processes, one below the other.
    """

    device: Device
    shown: str
    processes: int
    is_main: bool
    peak: float | None
    steps_per_call: int
    ends_itself: bool
    about: Mapping[str, Any]
    agreed_end: Callable[[bool], bool] | None = None
    gather: Callable[[NDArray[np.uint32]], NDArray[np.uint32]] | None = None


def load_text(model: GPTConfig, config: TrainConfig) -> Corpus:
    """Return the text of a run.

    Raises:
        UserError: If the file cannot be read, or the text is too short.
        ValueError: If the vocabulary is smaller than 256.
    """
    if model.vocab_size < 256:
        raise ValueError(f"bytes need a vocab_size of at least 256, got {model.vocab_size}")
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    return corpus


def train(
    trainer: Trainer, model: GPTConfig, config: TrainConfig, corpus: Corpus, *, resume: bool, report: Report
) -> Summary:
    """Train to the last step, or until patience runs out.

    Args:
        trainer: The state before the first step.
        model: Shape of the model.
        config: Settings; checkpoints, ``metrics.jsonl`` and ``run.json`` are written to ``config.out``.
        corpus: The text, from :func:`load_text`.
        resume: Whether to continue from ``last.pt`` in ``config.out``.
        report: Called in every process with each event.

    Raises:
        UserError: If the output folder contains another run or cannot be written, the checkpoint does not fit, or
            processes have different settings.
        NonFiniteError: If a loss or gradient is not finite; the message names the step and the parameter or gradient.
        Terminated: After a SIGTERM, when the step is finished and its checkpoint written.
    """
    _require_same_settings(trainer.place, model, config, corpus, resume=resume)
    folder = config.out if trainer.place.is_main else None
    missing = resume and folder is not None and not folder.exists()  # which locking would create
    with nullcontext() if folder is None or missing else only_writer(folder):
        _start_or_resume(trainer, model, config, corpus, resume=resume)
        if folder is not None and not resume:
            _require_empty(folder)
        return _train(trainer, model, config, corpus, RunFiles(folder), report)


def _train(
    trainer: Trainer, model: GPTConfig, config: TrainConfig, corpus: Corpus, files: RunFiles, report: Report
) -> Summary:
    place = trainer.place
    files.forget_after(trainer.step)
    start = Start(
        corpus=corpus.name,
        note=corpus.note,
        sha256=corpus.sha256,
        unigram_bits=unigram_entropy_bits(corpus.validation),
        parameters=parameter_count(model),
        device=place.shown,
        step=trainer.step,
    )
    metadata = {
        **place.about,
        "model": asdict(model),
        "training": config.as_plain(),
        "start": asdict(start),
        "processes": place.processes,
        "environment": asdict(environment.capture(place.device, root=Path(__file__).parent)),
    }
    files.describe(metadata)
    report(start)

    throughput = Throughput(model, config, place.peak)
    with _terminated(place.ends_itself, several=place.processes > 1) as terminated:
        agreed = place.agreed_end or bool
        last = _loop(
            _Run(trainer, model, config, corpus, files, report), throughput, lambda: agreed(terminated.is_set())
        )
    rate = throughput.total_rate()
    summary = Summary(
        steps=last.step,
        stopped_early=last.step < config.steps,
        bits=last.bits,
        ema_bits=last.ema_bits,
        best_bits=trainer.best_loss * BITS_PER_NAT,
        unigram_bits=start.unigram_bits,
        tokens_per_second=rate,
        mfu=throughput.mfu(rate),
    )
    files.describe({**metadata, "summary": asdict(summary)})
    return summary


@dataclass(frozen=True)
class _Run:
    """What the loop works with, see :func:`train`."""

    trainer: Trainer
    model: GPTConfig
    config: TrainConfig
    corpus: Corpus
    files: RunFiles
    report: Report

    def record(self, event: StepLog | ValidationLog) -> None:
        self.files.append(event)
        self.report(event)

    def save(self, name: str) -> None:
        saved = self.trainer.checkpoint(self.config, self.corpus.sha256)  # all processes gather, and one writes
        if self.files.folder is not None:
            checkpoints.save(self.files.folder / name, saved)


def _loop(run: _Run, throughput: Throughput, ends: Callable[[], bool]) -> ValidationLog:
    """Take steps until the last one, or until patience runs out, and return the validation after it.

    ``ends`` says whether a signal has asked for the end.
    """
    trainer, config = run.trainer, run.config
    most = trainer.place.steps_per_call
    step, validation, stop = trainer.step, None, False
    while not stop:
        # Step. Batches and learning rates are pure functions of the step, so neither has to be saved.
        count = most if _steps_until_due(step, config) >= most else 1
        tokens = [
            batch(run.corpus.train, config.seed, step + i, config.batch_size, run.model.block_size)
            for i in range(count)
        ]
        numbers = trainer.take_steps(tokens)

        # Log.
        seconds = throughput.lap(count) / count
        rate = throughput.rate(seconds)
        for loss, norm in numbers:
            step += 1
            lr = learning_rate(step - 1, config)
            run.record(StepLog(step, loss, lr, norm, seconds, rate, throughput.mfu(rate)))

        # Validate, and save the best.
        stop = step == config.steps
        if stop or _due(step, config.eval_interval):
            validation = _validate(trainer)
            run.record(validation)
            if validation.best and config.out is not None:
                run.save(BEST)
            stop = stop or _out_of_patience(trainer, config)
            throughput.start()

        # Save.
        ended = ends() and not stop
        if config.out is not None and (stop or ended or _due(step, config.checkpoint_interval)):
            run.save(LAST)
            throughput.start()
        if ended:
            kept = "nothing is kept without --out"
            if config.out is not None:
                kept = f"{config.out} has a checkpoint; continue with --resume"
            raise Terminated(f"ended by SIGTERM after step {step}; {kept}")

    assert validation is not None, "the last step validates"
    return validation


def _validate(trainer: Trainer) -> ValidationLog:
    nats = _finite_validation(trainer, "weights", averaged=False)
    ema_bits = None
    if trainer.averages:
        ema_bits = _finite_validation(trainer, "averaged weights", averaged=True) * BITS_PER_NAT
    return ValidationLog(trainer.step, nats * BITS_PER_NAT, ema_bits, trainer.note_validation(nats))


def _finite_validation(trainer: Trainer, weights: str, *, averaged: bool) -> float:
    loss = trainer.validation_loss(averaged=averaged)
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {trainer.step}: the validation loss of the {weights} is {loss}; "
            f"{trainer.first_non_finite(averaged=averaged)}. The weights are those after this step"
        )
    return loss


def _steps_until_due(step: int, config: TrainConfig) -> int:
    """The number of steps until the end, a validation or a checkpoint."""
    intervals = [interval for interval in (config.eval_interval, config.checkpoint_interval) if interval]
    return min([config.steps - step, *(interval - step % interval for interval in intervals)])


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _out_of_patience(trainer: Trainer, config: TrainConfig) -> bool:
    return config.patience > 0 and trainer.stale >= config.patience


def _start_or_resume(trainer: Trainer, model: GPTConfig, config: TrainConfig, corpus: Corpus, *, resume: bool) -> None:
    """Restore the last checkpoint, or make sure that a new run does not overwrite one."""
    if not resume:
        if config.out is not None and (config.out / LAST).exists():
            raise UserError(f"{config.out} already contains a run; continue it with --resume, or name another folder")
        return
    if config.out is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    saved = checkpoints.load(config.out / LAST)
    checkpoints.require_same_run(saved, model, config, corpus.sha256)
    trainer.restore(saved)
    if trainer.step >= config.steps:
        raise UserError(f"the run in {config.out} is finished (step {trainer.step}); to train longer, start a new run")
    if _out_of_patience(trainer, config):
        raise UserError(
            f"the run in {config.out} has stopped early, after step {trainer.step}; with a patience above "
            f"{trainer.stale}, or 0 for none, it goes on"
        )


def _require_same_settings(
    place: Place, model: GPTConfig, config: TrainConfig, corpus: Corpus, *, resume: bool
) -> None:
    """Check that processes which a command each has started take the same steps: their weights would drift apart."""
    if place.gather is None:
        return
    settings = {**asdict(model), **config.as_plain(), **place.about, "data": corpus.sha256, "resume": resume}
    del settings["out"]  # each may have a folder of its own
    hashes = [zlib.crc32(repr(value).encode()) for value in settings.values()]
    of_all = place.gather(np.array(hashes, np.uint32))
    if different := [name for name, of_one in zip(settings, of_all.T, strict=True) if len(set(of_one)) > 1]:
        raise UserError(f"the processes differ in {', '.join(different)}; start all of them with the same options")


def _require_empty(folder: Path) -> None:
    """Make sure that a new run overwrites nothing of one that was killed before its first LAST."""
    if left := [name for name in (BEST, METRICS) if (folder / name).exists()]:
        raise UserError(
            f"{folder} has {' and '.join(left)} of another run, which cannot be resumed without {LAST}; remove them, "
            "or name another folder"
        )


@contextmanager
def _terminated(caught: bool, *, several: bool) -> Iterator[threading.Event]:
    """Set the event on SIGTERM, which cluster schedulers send before they end a process.

    Of several processes, one gets it, too, when another has failed. What fails in it then is the loss of that other.
    """
    event = threading.Event()
    if not caught or threading.current_thread() is not threading.main_thread():  # only that thread handles signals
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    lost = False
    try:
        yield event
    except Exception as error:
        lost = several and event.is_set() and not isinstance(error, Terminated)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if lost:
            signal.raise_signal(signal.SIGTERM)

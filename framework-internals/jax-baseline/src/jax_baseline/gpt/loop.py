"""The training loop, readable from top to bottom: step, log, validate, save. It is ``torch_baseline.train`` in JAX.

It reports the events of ``torch_baseline`` and writes the same files, so runs of the two frameworks can be compared.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchkit import UserError, environment
from benchkit.device import Device
from benchkit.timing import limits
from jax_baseline.gpt.checkpoints import BEST, LAST, Checkpoints, RunProgress
from jax_baseline.gpt.interchange import train_config
from jax_baseline.gpt.model import ATTENTIONS, Params, loss, unstack_blocks
from jax_baseline.gpt.optim import compute_dtype
from jax_baseline.gpt.sharding import make_mesh, require_divisible, spread, state_sharding, to_mesh
from jax_baseline.gpt.train import Step, TrainState, initial_state, make_gradient, make_train_step, require_jax_device
from jax_baseline.gpt.transfer import to_torch
from torch_baseline.checkpoint import require_same_run
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import (
    Corpus,
    Tokens,
    batch,
    load_corpus,
    require_length,
    unigram_entropy_bits,
    validation_batches,
)
from torch_baseline.model import flops_per_token, parameter_count
from torch_baseline.optim import learning_rate
from torch_baseline.records import METADATA, Report, RunFiles, Start, StepLog, Summary, ValidationLog
from torch_baseline.throughput import WARMUP_STEPS
from torch_baseline.train import BITS_PER_NAT, NonFiniteError


@dataclass(frozen=True)
class Execution:
    """How a training run is executed. No field changes the mathematics.

    Attributes:
        attention: Key of :data:`jax_baseline.gpt.model.ATTENTIONS`.
        scan: Scan over stacked blocks, see :func:`jax_baseline.gpt.model.stack_blocks`.
        remat: Recompute each block in the backward pass, see :func:`jax_baseline.gpt.model.forward`.
        steps_per_dispatch: Steps per call, see :func:`jax_baseline.gpt.train.make_train_step`. If a validation or a
            checkpoint is due sooner, the loop takes single steps.
        data: Number of replicas of the weights, see :mod:`jax_baseline.gpt.sharding`.
        fsdp: Number of devices that share one replica.
    """

    attention: str = "xla"
    scan: bool = False
    remat: bool = False
    steps_per_dispatch: int = 1
    data: int = 1
    fsdp: int = 1

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {self.attention!r}")
        for name in ("steps_per_dispatch", "data", "fsdp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class Terminated(Exception):
    """The process received SIGTERM; the message says where the run continues."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        summary: Summary in the form of ``torch_baseline``.
        state: State after the last step.
    """

    summary: Summary
    state: TrainState


def train(
    model: GPTConfig,
    config: TrainConfig,
    *,
    device: Device = "cpu",
    resume: bool = False,
    execution: Execution = Execution(),
    report: Report = lambda event: None,
) -> Outcome:
    """Train on the batches and with the schedule of ``torch_baseline``.

    Args:
        model: Shape of the model.
        config: Settings. ``config.out`` receives the checkpoints ``last`` and ``best``, ``metrics.jsonl`` and
            ``run.json``. ``compile`` and ``parallel`` are torch's: JAX always compiles, and ``execution`` has the mesh.
        device: Kind of device. Several processes that have called ``jax.distributed.initialize`` run as one.
        resume: Resume from ``last`` in ``config.out``. The result is bit for bit that of an uninterrupted run.
        execution: How the training is executed.
        report: Called in every process with each event.

    Raises:
        UserError: If the data or the device cannot be used, if the output folder has another run, or if the checkpoint
            does not fit.
        ValueError: For a setting that this loop does not support.
        Terminated: After a SIGTERM, when the step is finished and its checkpoint written.
        NonFiniteError: If a loss or a gradient is not finite; it names the step and the parameter or gradient.
    """
    _require_supported(model, config)
    require_jax_device(device)
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    mesh = make_mesh(execution.data, execution.fsdp, jax.devices(device))
    require_divisible(config.batch_size, config.accumulation, mesh)

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(config.dtype == "float64"))
        stack.enter_context(jax.default_device(jax.local_devices(backend=device)[0]))
        run = _set_up(model, config, execution, corpus, mesh)
        _start_or_resume(run, resume=resume)

        files = RunFiles(config.out if jax.process_index() == 0 else None)
        files.forget_after(int(run.state.step))
        start = _start(model, corpus, mesh, int(run.state.step))
        metadata = _metadata(model, config, execution, start, device)
        files.describe(metadata)
        report(start)

        clock = _Clock(model, config, mesh)
        terminated = stack.enter_context(_terminated())
        last = _loop(run, clock, files, report, terminated)
        if run.checkpoints is not None:
            run.checkpoints.close()
        if last is None:
            kept = "nothing is kept without --out"
            if config.out is not None:
                kept = f"{config.out} has a checkpoint; continue with --resume"
            raise Terminated(f"ended by SIGTERM after step {int(run.state.step)}; {kept}")

        rate = clock.total_rate()
        summary = Summary(
            steps=last.step,
            stopped_early=last.step < config.steps,
            bits=last.bits,
            ema_bits=last.ema_bits,
            best_bits=run.progress.best_loss * BITS_PER_NAT,
            unigram_bits=start.unigram_bits,
            tokens_per_second=rate,
            mfu=clock.mfu(rate),
        )
        files.describe({**metadata, "summary": asdict(summary)})
        return Outcome(summary, run.state)


@dataclass
class _Run:
    """What the loop works with.

    Attributes:
        model: Shape of the model.
        config: Settings.
        execution: How the training is executed.
        corpus: Training and validation bytes.
        mesh: The devices.
        take_steps: Updates the state.
        evaluate: Computes the loss of a batch.
        checkpoints: The checkpoints in the output folder, if there is one.
        state: State after the last step, spread over the mesh.
        progress: Validation losses so far.
    """

    model: GPTConfig
    config: TrainConfig
    execution: Execution
    corpus: Corpus
    mesh: Mesh
    take_steps: _Stepper
    evaluate: Evaluate
    checkpoints: Checkpoints | None
    state: TrainState
    progress: RunProgress


def _set_up(model: GPTConfig, config: TrainConfig, execution: Execution, corpus: Corpus, mesh: Mesh) -> _Run:
    state = initial_state(model, config, scan=execution.scan)
    shardings = state_sharding(state, mesh)
    return _Run(
        model,
        config,
        execution,
        corpus,
        mesh,
        take_steps=_Stepper(model, config, execution, mesh, shardings),
        evaluate=_make_evaluate(model, config, execution),
        checkpoints=None if config.out is None else Checkpoints(config.out),
        state=spread(state, shardings),
        progress=RunProgress(asdict(model), config.as_plain(), corpus.sha256),
    )


def _loop(
    run: _Run, clock: _Clock, files: RunFiles, report: Report, terminated: threading.Event
) -> ValidationLog | None:
    """Take steps until the last one, or until patience runs out, and return the validation after it.

    After a SIGTERM, finish the step, save it and return None.
    """
    config = run.config
    step = int(run.state.step)
    validation = None
    stop = False
    while not stop:
        # Take steps. Batches and learning rates are pure functions of the step, so checkpoints need neither.
        count = _steps_until_due(step, config, run.execution)
        tokens = [
            batch(run.corpus.train, config.seed, step + i, config.batch_size, run.model.block_size)
            for i in range(count)
        ]
        run.state, metrics = run.take_steps(run.state, tokens)

        # Log.
        seconds = clock.lap(count) / count
        rate = clock.rate(seconds)
        for (loss_, norm), used in zip(metrics, tokens, strict=True):
            step += 1
            _require_finite(run, step, loss_, norm, used)
            log = StepLog(step, loss_, learning_rate(step - 1, config), norm, seconds, rate, clock.mfu(rate))
            files.append(log)
            report(log)

        # Validate, and keep the best weights.
        stop = step == config.steps
        if stop or _due(step, config.eval_interval):
            validation = _validate(run)
            files.append(validation)
            report(validation)
            if validation.best and run.checkpoints is not None:
                run.checkpoints.save(BEST, run.state, run.progress)
            stop = stop or _out_of_patience(run.progress, config)
            clock.start()

        # Save.
        ended = terminated.is_set() and not stop
        if run.checkpoints is not None and (stop or ended or _due(step, config.checkpoint_interval)):
            run.checkpoints.save(LAST, run.state, run.progress)
            clock.start()
        if ended:
            return None

    assert validation is not None, "the last step validates"
    return validation


@contextmanager
def _terminated() -> Iterator[threading.Event]:
    """Set the event on SIGTERM, which cluster schedulers send before they end a process."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that thread can handle signals
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)


def load_best(folder: Path) -> tuple[GPTConfig, Params]:
    """Return the model's shape and the best weights of a run, in float32 on one device.

    If the run kept averaged weights, those are returned.

    Args:
        folder: ``config.out`` of the run.

    Raises:
        UserError: If the folder has no checkpoint, or if it is damaged.
    """
    checkpoints = Checkpoints(folder)
    progress = checkpoints.progress(BEST)
    model, config = GPTConfig(**progress.model_config), train_config(progress.train_config)
    with jax.enable_x64(config.dtype == "float64"):
        state, _ = checkpoints.restore(BEST, initial_state(model, config, scan=bool(_scanned(folder))))
    checkpoints.close()
    params = unstack_blocks(state.params if state.ema is None else state.ema)
    return model, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def _scanned(folder: Path) -> bool | None:
    """Whether the run in the folder stacks its blocks; None if ``run.json`` is missing.

    The checkpoints do not store this, because it does not change the numbers.
    """
    path = folder / METADATA
    return json.loads(path.read_text())["execution"]["scan"] if path.exists() else None


class _Stepper:
    """Takes one step or ``steps_per_dispatch`` steps with the function compiled for it, and waits for the result."""

    def __init__(
        self, model: GPTConfig, config: TrainConfig, execution: Execution, mesh: Mesh, shardings: TrainState
    ) -> None:
        self._mesh = mesh

        def make(steps: int) -> Step:
            return make_train_step(
                model,
                config,
                attention=ATTENTIONS[execution.attention],
                remat=execution.remat,
                steps_per_dispatch=steps,
                shardings=shardings,
            )

        self._one, self._several = make(1), make(execution.steps_per_dispatch)

    def __call__(
        self, state: TrainState, batches: list[tuple[Tokens, Tokens]]
    ) -> tuple[TrainState, list[tuple[float, float]]]:
        """Return the new state, and the loss and gradient norm of every step."""
        if len(batches) == 1:
            state, metrics = self._one(state, *to_mesh(batches[0], self._mesh))
        else:
            stacked = tuple(np.stack(part) for part in zip(*batches, strict=True))
            state, metrics = self._several(state, *to_mesh(stacked, self._mesh))
        losses, norms = (np.atleast_1d(np.asarray(part, np.float64)) for part in (metrics.loss, metrics.gradient_norm))
        return state, list(zip(losses.tolist(), norms.tolist(), strict=True))


def _require_finite(run: _Run, step: int, loss_: float, norm: float, tokens: tuple[Tokens, Tokens]) -> None:
    if not (math.isfinite(loss_) and math.isfinite(norm)):
        raise NonFiniteError(
            f"step {step}: the loss is {loss_}, the gradient norm {norm}; {_first_non_finite(run, tokens)}. "
            "The weights are those before this step"
        )


def _first_non_finite(run: _Run, tokens: tuple[Tokens, Tokens]) -> str:
    """Describe the first parameter or gradient that is not finite, by torch's name.

    Parameters are searched in the order of the forward pass. Gradients are searched in the reverse order, because the
    backward pass propagates NaN to everything that it computes later. The failed step left the state unchanged, so its
    gradients can be computed again.
    """
    if named := _non_finite_parameter(run.state.params, run.model):
        return named
    gradient = jax.jit(make_gradient(run.model, run.config, attention=ATTENTIONS[run.execution.attention]))
    _, gradients = gradient(run.state.params, *(jnp.asarray(part.astype(np.int32)) for part in tokens))
    for name, array in reversed(to_torch(gradients, run.model).items()):
        if not np.isfinite(array).all():
            return f"parameters are finite, the gradient of {name} is not"
    return "parameters and gradients are finite, the loss alone is not"


def _non_finite_parameter(params: Params, model: GPTConfig) -> str:
    """Describe the first parameter, in the order of the forward pass, that is not finite; empty if all are finite."""
    weights = to_torch(params, model).items()
    return next((f"parameter {name} is not finite" for name, weight in weights if not np.isfinite(weight).all()), "")


Evaluate = Callable[[Params, jax.Array, jax.Array], jax.Array]


def _make_evaluate(model: GPTConfig, config: TrainConfig, execution: Execution) -> Evaluate:
    dtype, attention = compute_dtype(config), ATTENTIONS[execution.attention]

    def evaluate(params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return loss(params, tokens_BT, targets_BT, model, dtype=dtype, attention=attention)

    return jax.jit(evaluate)


def _mean_loss(run: _Run, params: Params) -> float:
    # Micro-batches as in training, so that memory and compiled shapes are the same.
    data, config = run.corpus.validation, run.config
    losses = [
        run.evaluate(params, *to_mesh(part, run.mesh))
        for tokens in validation_batches(data, config.batch_size, run.model.block_size, config.eval_batches)
        for part in zip(*(np.split(half, config.accumulation) for half in tokens), strict=True)
    ]
    return float(np.mean([float(loss_) for loss_ in losses]))


def _validate(run: _Run) -> ValidationLog:
    state = run.state

    def mean_loss(params: Params, weights: str) -> float:
        nats = _mean_loss(run, params)
        if not math.isfinite(nats):
            raise NonFiniteError(
                f"step {int(state.step)}: the validation loss of the {weights} is {nats}; "
                f"{_non_finite_parameter(params, run.model) or 'they are finite, the loss alone is not'}. "
                "The weights are those after this step"
            )
        return nats

    nats = mean_loss(state.params, "weights")
    averaged = None if state.ema is None else mean_loss(state.ema, "averaged weights") * BITS_PER_NAT
    return ValidationLog(int(state.step), nats * BITS_PER_NAT, averaged, run.progress.note_validation(nats))


class _Clock:
    """Throughput of this process. The first steps and the first call of each compiled function are not counted."""

    def __init__(self, model: GPTConfig, config: TrainConfig, mesh: Mesh) -> None:
        self._tokens = config.batch_size * model.block_size
        self._flops = flops_per_token(model)
        sheet = limits.datasheet(mesh.devices.flat[0].device_kind)
        self._peak = None if sheet is None else sheet.flops[config.dtype] * mesh.devices.size
        self._steps = self._counted = 0
        self._seconds = 0.0
        self._called: set[int] = set()  # steps per call; each number has its own function, compiled at the first call
        self.start()

    def start(self) -> None:
        """Restart the clock after work that is not training."""
        self._mark = time.perf_counter()

    def lap(self, steps: int) -> float:
        """Record one call of this many steps and return its seconds."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if self._steps >= WARMUP_STEPS and steps in self._called:
            self._seconds += seconds
            self._counted += steps
        self._steps += steps
        self._called.add(steps)
        return seconds

    def rate(self, seconds: float) -> float:
        """Tokens per second, given the seconds of one step."""
        return self._tokens / seconds

    def total_rate(self) -> float | None:
        """Tokens per second of all counted steps."""
        return self._counted * self._tokens / self._seconds if self._counted else None

    def mfu(self, rate: float | None) -> float | None:
        """Model FLOPs utilisation: model FLOP/s over the datasheet's peak; None if either is unknown."""
        return None if rate is None or self._peak is None else rate * self._flops / self._peak


def _steps_until_due(step: int, config: TrainConfig, execution: Execution) -> int:
    """Return the number of steps of the next call: ``steps_per_dispatch``, or 1 if something is due sooner."""
    intervals = [interval for interval in (config.eval_interval, config.checkpoint_interval) if interval]
    ends = [config.steps, *(step - step % interval + interval for interval in intervals)]
    return execution.steps_per_dispatch if min(ends) - step >= execution.steps_per_dispatch else 1


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _out_of_patience(progress: RunProgress, config: TrainConfig) -> bool:
    return config.patience > 0 and progress.stale >= config.patience


def _start_or_resume(run: _Run, *, resume: bool) -> None:
    """Restore the last checkpoint, or make sure that a new run does not overwrite one."""
    config, scan = run.config, run.execution.scan
    if not resume:
        if run.checkpoints is not None and run.checkpoints.exists(LAST):
            raise UserError(f"{config.out} holds a run already; resume it (--resume), or name another folder")
        return
    if run.checkpoints is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    # Compare the settings before reading the arrays: arrays of other shapes would look like damage.
    require_same_run(run.checkpoints.progress(LAST), run.model, config, run.corpus.sha256)
    scanned = _scanned(run.checkpoints.folder)
    if scanned not in (None, scan):
        raise UserError(
            f"the checkpoint was made with scan={scanned} (execution), this run asks for scan={scan}; the "
            "numbers are the same, but scan=True stacks the weights of the blocks: resume with the same setting, or "
            "start a new run"
        )
    run.state, run.progress = run.checkpoints.restore(LAST, run.state)
    step = int(run.state.step)
    if step >= config.steps or _out_of_patience(run.progress, config):
        raise UserError(f"the run in {config.out} is finished (step {step}); to train longer, start a new run")


def _start(model: GPTConfig, corpus: Corpus, mesh: Mesh, step: int) -> Start:
    devices = list(mesh.devices.flat)
    return Start(
        corpus=corpus.name,
        note=corpus.note,
        sha256=corpus.sha256,
        unigram_bits=unigram_entropy_bits(corpus.validation),
        parameters=parameter_count(model),
        device=devices[0].platform if len(devices) == 1 else f"{len(devices)} × {devices[0].platform}",
        step=step,
    )


def _metadata(
    model: GPTConfig, config: TrainConfig, execution: Execution, start: Start, device: Device
) -> dict[str, Any]:
    return {
        "framework": f"jax {jax.__version__}",
        "model": asdict(model),
        "training": config.as_plain(),
        "execution": asdict(execution),
        "start": asdict(start),
        "processes": jax.process_count(),
        "environment": asdict(environment.capture(device, root=Path(__file__).parent)),
    }


def _require_supported(model: GPTConfig, config: TrainConfig) -> None:
    if model.vocab_size < 256:
        raise ValueError(f"a model of bytes needs a vocab_size of at least 256, got {model.vocab_size}")
    if config.parallel != "none":
        raise ValueError(f"parallel={config.parallel!r} is for torch; give JAX a mesh: Execution(data=…, fsdp=…)")
    if config.deterministic:
        raise ValueError(
            "deterministic=True is for torch; for JAX set XLA_FLAGS=--xla_gpu_deterministic_ops=true before it starts "
            "(on a CPU it is deterministic anyway)"
        )
    compute_dtype(config)

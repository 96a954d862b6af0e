"""The training loop, readable top to bottom: step, log, validate, save; ``torch_baseline.train`` in JAX.

What happens is told in that package's events, and its files are written: runs of the two frameworks can be laid side by
side.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchkit import UserError, environment, limits
from benchkit.device import Device
from jax_baseline.gpt.checkpoints import BEST, LAST, Checkpoints, Standing
from jax_baseline.gpt.interchange import train_config
from jax_baseline.gpt.model import ATTENTIONS, Params, loss, unstack_blocks
from jax_baseline.gpt.optim import compute_dtype
from jax_baseline.gpt.sharding import (
    make_mesh,
    require_divisible,
    spread,
    state_sharding,
    to_mesh,
)
from jax_baseline.gpt.train import (
    Step,
    TrainState,
    initial_state,
    make_gradient,
    make_train_step,
    require_jax_device,
)
from jax_baseline.gpt.transfer import to_torch
from torch_baseline.checkpoint import require_same_run
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import (
    Bytes,
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
    """How the same training is executed; none of it changes the mathematics.

    Attributes:
        attention: a key of :data:`jax_baseline.gpt.model.ATTENTIONS`.
        scan: over stacked layers, see :func:`jax_baseline.gpt.model.stack_blocks`.
        remat: see :func:`jax_baseline.gpt.model.forward`.
        steps_per_dispatch: see :func:`jax_baseline.gpt.train.make_train_step`; where a validation or a checkpoint is
            due sooner, steps are taken one by one.
        data: copies of the weights, see :mod:`jax_baseline.gpt.sharding`.
        fsdp: shares of each copy.
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


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        summary: as ``torch_baseline`` has it.
        state: after the last step.
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
    """Train on the batches, and with the schedule, that ``torch_baseline`` would.

    Args:
        model: the shape.
        config: how; ``config.out`` receives the checkpoints ``last`` and ``best``, ``metrics.jsonl`` and ``run.json``.
            ``compile`` and ``parallel`` are torch's: JAX always compiles, and ``execution`` has the mesh.
        device: where to run; several processes, each having called ``jax.distributed.initialize``, run as one.
        resume: go on from ``last`` in ``config.out``; the run is then bit for bit the one that was not interrupted.
        execution: how.
        report: called in every process with what happens, as it happens.

    Raises:
        UserError: for data or a device that cannot be used, an output folder that holds another run, or a checkpoint
            that does not fit.
        ValueError: for a setting that this loop does not have.
        NonFiniteError: naming the step and the parameter or gradient.
    """
    _require_supported(model, config)
    require_jax_device(device)
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    mesh = make_mesh(execution.data, execution.fsdp, jax.devices(device))
    require_divisible(config.batch_size, config.accumulation, mesh)

    with jax.enable_x64(config.dtype == "float64"), jax.default_device(jax.local_devices(backend=device)[0]):
        # The state, spread over the mesh, and the functions that change it and look at it.
        state = initial_state(model, config, scan=execution.scan)
        shardings = state_sharding(state, mesh)
        state = spread(state, shardings)
        take = _Stepper(model, config, execution, mesh, shardings)
        evaluate = _make_evaluate(model, config, execution)

        # What was done before, and what is left behind.
        standing = Standing(asdict(model), config.as_plain(), corpus.sha256)
        main = jax.process_index() == 0
        files = RunFiles(config.out if main else None)
        checkpoints = None if config.out is None else Checkpoints(config.out)
        if checkpoints is not None and not resume and checkpoints.exists(LAST):
            raise UserError(f"{config.out} holds a run already; go on with it (--resume), or name another folder")
        if resume:
            state, standing = _resume(checkpoints, state, model, config, execution, corpus)
        step = int(state.step)
        files.forget_after(step)
        start = _start(model, corpus, mesh, step)
        metadata = _metadata(model, config, execution, start, device)
        files.describe(metadata)
        report(start)

        clock = _Clock(model, config, mesh)
        validation = None
        stop = False
        while not stop:
            # Steps: batches and learning rates are pure functions of the step, so neither has to be saved.
            count = _steps_until_due(step, config, execution)
            tokens = [
                batch(corpus.train, config.seed, step + i, config.batch_size, model.block_size) for i in range(count)
            ]
            state, metrics = take(state, tokens)

            # Log.
            seconds = clock.lap(count) / count
            for (loss_, norm), used in zip(metrics, tokens, strict=True):
                step += 1
                if not (math.isfinite(loss_) and math.isfinite(norm)):
                    raise NonFiniteError(
                        f"step {step}: the loss is {loss_}, the gradient norm {norm}; "
                        f"{_first_non_finite(state.params, used, model, config, execution)}. "
                        "The weights are those before this step"
                    )
                rate = clock.rate(seconds)
                log = StepLog(step, loss_, learning_rate(step - 1, config), norm, seconds, rate, clock.mfu(rate))
                files.append(log)
                report(log)

            # Validate, and keep the best.
            stop = step == config.steps
            if stop or _due(step, config.eval_interval):
                validation = _validate(evaluate, state, standing, corpus.validation, model, config, mesh)
                files.append(validation)
                report(validation)
                if validation.best and checkpoints is not None:
                    checkpoints.save(BEST, state, standing)
                stop = stop or _out_of_patience(standing, config)
                clock.start()

            # Save.
            if checkpoints is not None and (stop or _due(step, config.checkpoint_interval)):
                checkpoints.save(LAST, state, standing)
                clock.start()

        assert validation is not None, "the last step validates"
        overall = clock.total_rate()
        summary = Summary(
            steps=step,
            stopped_early=step < config.steps,
            bits=validation.bits,
            ema_bits=validation.ema_bits,
            best_bits=standing.best_loss * BITS_PER_NAT,
            unigram_bits=start.unigram_bits,
            tokens_per_second=overall,
            mfu=clock.mfu(overall),
        )
        files.describe({**metadata, "summary": asdict(summary)})
        if checkpoints is not None:
            checkpoints.close()
        return Outcome(summary, state)


def load_best(folder: Path) -> tuple[GPTConfig, Params]:
    """Return the shape and the best weights of a run, the averaged ones where it kept them, in float32 on one device.

    Args:
        folder: ``config.out`` of the run.

    Raises:
        UserError: if it holds no checkpoint, or a damaged one.
    """
    checkpoints = Checkpoints(folder)
    standing = checkpoints.standing(BEST)
    model, config = GPTConfig(**standing.model_config), train_config(standing.train_config)
    with jax.enable_x64(config.dtype == "float64"):
        state, _ = checkpoints.restore(BEST, initial_state(model, config, scan=bool(_scanned(folder))))
    checkpoints.close()
    params = unstack_blocks(state.params if state.ema is None else state.ema)
    return model, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def _scanned(folder: Path) -> bool | None:
    """Whether the run in the folder stacks its blocks; None where its description is gone.

    That is no setting which decides the numbers, and so not in the checkpoints.
    """
    path = folder / METADATA
    return json.loads(path.read_text())["execution"]["scan"] if path.exists() else None


class _Stepper:
    """Takes one batch or several, whichever function is compiled for that; waits for the result."""

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
        """Return the new state, and loss and gradient norm of every step."""
        if len(batches) == 1:
            state, metrics = self._one(state, *to_mesh(batches[0], self._mesh))
        else:
            stacked = tuple(np.stack(part) for part in zip(*batches, strict=True))
            state, metrics = self._several(state, *to_mesh(stacked, self._mesh))
        losses, norms = (np.atleast_1d(np.asarray(part, np.float64)) for part in (metrics.loss, metrics.gradient_norm))
        return state, list(zip(losses.tolist(), norms.tolist(), strict=True))


def _first_non_finite(
    params: Params, tokens: tuple[Tokens, Tokens], model: GPTConfig, config: TrainConfig, execution: Execution
) -> str:
    """Name where a number that is not finite shows first, in words, by torch's names.

    Parameters are searched in the order of the forward pass, then gradients against it: the backward pass carries such
    a number on to everything it visits later. The step left its state as it was, so its gradients can be had again.
    """
    if named := _non_finite_parameter(params, model):
        return named
    gradient = jax.jit(make_gradient(model, config, attention=ATTENTIONS[execution.attention]))
    _, gradients = gradient(params, *(jnp.asarray(part.astype(np.int32)) for part in tokens))
    for name, found in reversed(to_torch(gradients, model).items()):
        if not np.isfinite(found).all():
            return f"parameters are finite, the gradient of {name} is not"
    return "parameters and gradients are finite, the loss alone is not"


def _non_finite_parameter(params: Params, model: GPTConfig) -> str:
    """The first in the order of the forward pass, in words; empty if all are finite."""
    weights = to_torch(params, model).items()
    return next((f"parameter {name} is not finite" for name, weight in weights if not np.isfinite(weight).all()), "")


def validate(
    params: Params, data: Bytes, model: GPTConfig, config: TrainConfig, *, execution: Execution = Execution()
) -> float:
    """Return the mean loss on held-out data, nats per byte.

    Args:
        params: the weights, on devices of one mesh.
        data: held-out bytes.
        model: the shape.
        config: ``batch_size``, ``accumulation``, ``eval_batches`` and ``dtype`` are used.
        execution: attention and mesh.
    """
    platform = next(iter(params.norm.devices())).platform
    mesh = make_mesh(execution.data, execution.fsdp, jax.devices(platform))
    return _mean_loss(_make_evaluate(model, config, execution), params, data, model, config, mesh)


Evaluate = Callable[[Params, jax.Array, jax.Array], jax.Array]


def _make_evaluate(model: GPTConfig, config: TrainConfig, execution: Execution) -> Evaluate:
    dtype, attention = compute_dtype(config), ATTENTIONS[execution.attention]

    def evaluate(params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return loss(params, tokens_BT, targets_BT, model, dtype=dtype, attention=attention)

    return jax.jit(evaluate)


def _mean_loss(
    evaluate: Evaluate, params: Params, data: Bytes, model: GPTConfig, config: TrainConfig, mesh: Mesh
) -> float:
    # Divided among micro-batches as in training: the same memory, the same compiled shapes.
    losses = [
        evaluate(params, *to_mesh(part, mesh))
        for tokens in validation_batches(data, config.batch_size, model.block_size, config.eval_batches)
        for part in zip(*(np.split(half, config.accumulation) for half in tokens), strict=True)
    ]
    return float(np.mean([float(found) for found in losses]))


def _validate(
    evaluate: Evaluate,
    state: TrainState,
    standing: Standing,
    data: Bytes,
    model: GPTConfig,
    config: TrainConfig,
    mesh: Mesh,
) -> ValidationLog:
    def mean_loss(params: Params, weights: str) -> float:
        found = _mean_loss(evaluate, params, data, model, config, mesh)
        if not math.isfinite(found):
            raise NonFiniteError(
                f"step {int(state.step)}: the validation loss of the {weights} is {found}; "
                f"{_non_finite_parameter(params, model) or 'they are finite, the loss alone is not'}. "
                "The weights are those after this step"
            )
        return found

    found = mean_loss(state.params, "weights")
    averaged = None if state.ema is None else mean_loss(state.ema, "averaged weights") * BITS_PER_NAT
    return ValidationLog(int(state.step), found * BITS_PER_NAT, averaged, standing.note_validation(found))


class _Clock:
    """Throughput over the steps of a process; the first few are left out, and each function's first call."""

    def __init__(self, model: GPTConfig, config: TrainConfig, mesh: Mesh) -> None:
        self._tokens = config.batch_size * model.block_size
        self._flops = flops_per_token(model)
        sheet = limits.datasheet(mesh.devices.flat[0].device_kind)
        self._peak = None if sheet is None else sheet.flops[config.dtype] * mesh.devices.size
        self._steps = self._counted = 0
        self._seconds = 0.0
        self._called: set[int] = set()  # by the steps they take: each is a function of its own, compiled when called
        self.start()

    def start(self) -> None:
        """Start again after something that is not training."""
        self._mark = time.perf_counter()

    def lap(self, steps: int) -> float:
        """Note the steps of one call and return their seconds."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if self._steps >= WARMUP_STEPS and steps in self._called:
            self._seconds += seconds
            self._counted += steps
        self._steps += steps
        self._called.add(steps)
        return seconds

    def rate(self, seconds: float) -> float:
        """Tokens per second of a step."""
        return self._tokens / seconds

    def total_rate(self) -> float | None:
        """Tokens per second of all counted steps."""
        return self._counted * self._tokens / self._seconds if self._counted else None

    def mfu(self, rate: float | None) -> float | None:
        """Model FLOPs over the datasheet's peak; None where either is not known."""
        return None if rate is None or self._peak is None else rate * self._flops / self._peak


def _steps_until_due(step: int, config: TrainConfig, execution: Execution) -> int:
    """Return how many steps to take at once."""
    intervals = [interval for interval in (config.eval_interval, config.checkpoint_interval) if interval]
    ends = [config.steps, *(step - step % interval + interval for interval in intervals)]
    return execution.steps_per_dispatch if min(ends) - step >= execution.steps_per_dispatch else 1


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _out_of_patience(standing: Standing, config: TrainConfig) -> bool:
    return config.patience > 0 and standing.stale >= config.patience


def _resume(
    checkpoints: Checkpoints | None,
    state: TrainState,
    model: GPTConfig,
    config: TrainConfig,
    execution: Execution,
    corpus: Corpus,
) -> tuple[TrainState, Standing]:
    if checkpoints is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    # Before the arrays are read: those of another run do not fit into this one's, which looks like damage.
    require_same_run(checkpoints.standing(LAST), model, config, corpus.sha256)
    scanned = _scanned(checkpoints.folder)
    if scanned not in (None, execution.scan):
        raise UserError(
            f"the checkpoint was made with scan={scanned} (execution), this run asks for scan={execution.scan}; the "
            "numbers are the same, but the blocks' weights are stacked only with it: resume with the same setting, or "
            "start a new run"
        )
    state, standing = checkpoints.restore(LAST, state)
    step = int(state.step)
    if step >= config.steps or _out_of_patience(standing, config):
        raise UserError(f"the run in {config.out} is finished (step {step}); nothing is left to do")
    return state, standing


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
        raise ValueError(f"bytes need a vocab_size of at least 256, got {model.vocab_size}")
    if config.parallel != "none":
        raise ValueError(f"parallel={config.parallel!r} is torch's; give JAX a mesh: Execution(data=…, fsdp=…)")
    if config.deterministic:
        raise ValueError(
            "JAX is told to be deterministic before it starts: XLA_FLAGS=--xla_gpu_deterministic_ops=true "
            "(on a CPU it is)"
        )
    compute_dtype(config)

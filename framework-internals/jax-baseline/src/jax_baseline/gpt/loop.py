"""A training run in JAX: :mod:`torch_baseline.loop` with the steps of this package.

Batches, schedule, events, files and checkpoints are therefore those of ``torch_baseline``, and a run of one framework
goes on in the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from benchkit import UserError
from benchkit.device import Device
from benchkit.timing import limits
from jax_baseline.gpt.devices import require_jax_device
from jax_baseline.gpt.interchange import checkpoint_of, state_of
from jax_baseline.gpt.model import Params, loss, with_attention
from jax_baseline.gpt.optim import compute_dtype
from jax_baseline.gpt.sharding import gathered, make_mesh, require_divisible, spread, state_sharding, to_mesh
from jax_baseline.gpt.train import Step, TrainState, initial_state, make_gradient, make_train_step
from jax_baseline.gpt.transfer import to_torch
from torch_baseline import loop
from torch_baseline.checkpoint import Checkpoint, require_shapes
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Bytes, Tokens, validation_batches
from torch_baseline.loop import NonFiniteError, Place, Trainer
from torch_baseline.model import parameter_shapes
from torch_baseline.records import Report, Summary


@dataclass(frozen=True)
class Execution:
    """How a training run is executed. No field changes the mathematics."""

    attention: str = "xla"  # name of an attention, see :func:`jax_baseline.gpt.model.with_attention`
    scan: bool = False  # scan over stacked blocks, see :func:`jax_baseline.gpt.model.stack_blocks`
    remat: bool = False  # recompute each block in the backward pass, see :func:`jax_baseline.gpt.model.forward`
    # Steps per call, see :func:`jax_baseline.gpt.train.make_train_step`. If a validation or a checkpoint is due sooner,
    # the loop takes single steps.
    steps_per_dispatch: int = 1
    data: int = 1  # number of replicas of the weights, see :mod:`jax_baseline.gpt.sharding`
    fsdp: int = 1  # number of devices that share one replica

    def __post_init__(self) -> None:
        with_attention(self.attention)
        for name in ("steps_per_dispatch", "data", "fsdp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Outcome:
    """Result of a run: its summary, and the state after the last step."""

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
        config: Settings, and the folder of the run, as for :func:`torch_baseline.train.train`. ``compile`` and
            ``parallel`` are torch's: JAX always compiles, and ``execution`` has the mesh.
        device: Kind of device. Several processes that have called ``jax.distributed.initialize`` run as one.
        resume: Resume from ``last.pt`` in ``config.out``, of either framework. If JAX wrote it, the result is bit for
            bit that of an uninterrupted run; the steps of the frameworks differ by rounding.
        execution: How the training is executed.
        report: Called in every process with each event.

    Raises:
        UserError: If the data or the device cannot be used, if the output folder has another run, or if the checkpoint
            does not fit.
        ValueError: For a setting that this loop does not support.
        Terminated: After a SIGTERM, when the step is finished and its checkpoint written.
        NonFiniteError: If a loss or a gradient is not finite; it names the step and the parameter or gradient.
    """
    _require_supported(config)
    require_jax_device(device)
    corpus = loop.load_text(model, config)
    mesh = make_mesh(execution.data, execution.fsdp, jax.devices(device))
    require_divisible(config.batch_size, config.accumulation, mesh)
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(config.dtype == "float64"))
        stack.enter_context(jax.default_device(jax.local_devices(backend=device)[0]))
        trainer = JaxTrainer(model, config, execution, corpus.validation, mesh, device)
        summary = loop.train(trainer, model, config, corpus, resume=resume, report=report)
        return Outcome(summary, trainer.state)


class JaxTrainer(Trainer):
    """A run in JAX on the devices of a mesh, as :mod:`torch_baseline.loop` drives it.

    Attributes:
        state: State after the last step, spread over the mesh.
    """

    def __init__(
        self, model: GPTConfig, config: TrainConfig, execution: Execution, held_out: Bytes, mesh: Mesh, device: Device
    ) -> None:
        self._model, self._config, self._execution = model, config, execution
        self._held_out, self._mesh, self._device = held_out, mesh, device
        self._parts = with_attention(execution.attention)
        state = initial_state(model, config, scan=execution.scan)
        self._shardings = state_sharding(state, mesh)
        self.state = spread(state, self._shardings)
        self.best_loss, self.stale = math.inf, 0
        self._generators: dict[str, Any] = {}  # of torch, if it began the run: JAX draws nothing
        self._calls = 0  # that took steps: the service counts by one
        self._take_one, self._take_several = self._make_step(1), self._make_step(execution.steps_per_dispatch)
        self._evaluate = jax.jit(self._loss)

    def _make_step(self, steps: int) -> Step:
        return make_train_step(
            self._model,
            self._config,
            parts=self._parts,
            remat=self._execution.remat,
            steps_per_dispatch=steps,
            shardings=self._shardings,
        )

    def _loss(self, params: Params, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
        dtype = compute_dtype(self._config)
        with jax.default_matmul_precision("highest"):
            return loss(params, tokens_BT, targets_BT, self._model, dtype=dtype, parts=self._parts)

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return int(self.state.step)

    @property
    def averages(self) -> bool:
        """Whether the run keeps a moving average of the weights."""
        return self.state.ema is not None

    @property
    def place(self) -> Place:
        """Where the run takes place."""
        devices, several = list(self._mesh.devices.flat), jax.process_count() > 1
        sheet = limits.datasheet(devices[0].device_kind)
        return Place(
            device=self._device,
            shown=devices[0].platform if len(devices) == 1 else f"{len(devices)} × {devices[0].platform}",
            processes=jax.process_count(),
            is_main=jax.process_index() == 0,
            peak=None if sheet is None else sheet.flops[self._config.dtype] * len(devices),
            steps_per_call=self._execution.steps_per_dispatch,
            ends_itself=not several,
            about={"framework": f"jax {jax.__version__}", "execution": asdict(self._execution)},
            agreed_end=self._agreed_end if several and jax.config.jax_enable_preemption_service else None,
            gather=multihost_utils.process_allgather if several else None,
        )

    def _agreed_end(self, _: bool) -> bool:
        """Whether one process got SIGTERM, so that all end here: the others would wait for its part of a step."""
        self._calls += 1
        return bool(multihost_utils.reached_preemption_sync_point(self._calls))

    def take_steps(self, batches: Sequence[tuple[Tokens, Tokens]]) -> Iterator[tuple[float, float]]:
        """Take one step for each batch and wait for them; the result yields loss and gradient norm of each."""
        before = self.step
        if len(batches) == 1:
            self.state, metrics = self._take_one(self.state, *to_mesh(batches[0], self._mesh))
        else:
            stacked = tuple(np.stack(part) for part in zip(*batches, strict=True))
            self.state, metrics = self._take_several(self.state, *to_mesh(stacked, self._mesh))
        losses, norms = (np.atleast_1d(np.asarray(part, np.float64)) for part in (metrics.loss, metrics.gradient_norm))
        return self._finite(before + 1, zip(batches, losses.tolist(), norms.tolist(), strict=True))

    def _finite(
        self, first: int, steps: Iterable[tuple[tuple[Tokens, Tokens], float, float]]
    ) -> Iterator[tuple[float, float]]:
        for step, (tokens, loss_, norm) in enumerate(steps, first):
            if not (math.isfinite(loss_) and math.isfinite(norm)):
                raise NonFiniteError(
                    f"step {step}: the loss is {loss_}, the gradient norm {norm}; {self._first_non_finite(tokens)}. "
                    "The weights are those before this step"
                )
            yield loss_, norm

    def _first_non_finite(self, tokens: tuple[Tokens, Tokens]) -> str:
        """Describe the first parameter, or else gradient in the order of the backward pass, that is not finite."""
        params = gathered(self.state.params)
        if named := self._non_finite_parameter(params):
            return named
        gradient = jax.jit(make_gradient(self._model, self._config, parts=self._parts))
        _, gradients = gradient(params, *(jnp.asarray(part.astype(np.int32)) for part in tokens))
        for name, array in reversed(to_torch(gradients, self._model).items()):
            if not np.isfinite(array).all():
                return f"parameters are finite, the gradient of {name} is not"
        return "parameters and gradients are finite, the loss alone is not"

    def _non_finite_parameter(self, params: Params) -> str:
        weights = to_torch(params, self._model).items()
        return next((f"parameter {name} is not finite" for name, array in weights if not np.isfinite(array).all()), "")

    def validation_loss(self, *, averaged: bool) -> float:
        """Return the mean loss of the held-out bytes, with the weights or with their average.

        Batches are divided into micro-batches as in training, for the same memory and compiled shapes.
        """
        config, params = self._config, self._weights(averaged)
        losses = [
            self._evaluate(params, *to_mesh(part, self._mesh))
            for tokens in validation_batches(
                self._held_out, config.batch_size, self._model.block_size, config.eval_batches
            )
            for part in zip(*(np.split(half, config.accumulation) for half in tokens), strict=True)
        ]
        return float(np.mean([float(loss_) for loss_ in losses]))

    def first_non_finite(self, *, averaged: bool) -> str:
        """Say in words where the first number that is not finite is."""
        return self._non_finite_parameter(gathered(self._weights(averaged))) or "they are finite, the loss alone is not"

    def _weights(self, averaged: bool) -> Params:
        return self.state.ema if averaged and self.state.ema is not None else self.state.params

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the whole state in torch's names and layouts; all processes must call it."""
        return checkpoint_of(
            self.state,
            self._model,
            config,
            data_sha256=data_sha256,
            best_loss=self.best_loss,
            stale=self.stale,
            generators=self._generators,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over the state of a checkpoint of either framework."""
        require_shapes(checkpoint, parameter_shapes(self._model))
        self.state = spread(state_of(checkpoint, scan=self._execution.scan), self._shardings)
        self.best_loss, self.stale, self._generators = checkpoint.best_loss, checkpoint.stale, checkpoint.rng


def _require_supported(config: TrainConfig) -> None:
    if config.parallel != "none":
        raise ValueError(f"parallel={config.parallel!r} is for torch; give JAX a mesh: Execution(data=…, fsdp=…)")
    if config.deterministic:
        raise ValueError(
            "deterministic=True is for torch; for JAX set XLA_FLAGS=--xla_gpu_deterministic_ops=true before it starts "
            "(on a CPU it is deterministic anyway)"
        )
    compute_dtype(config)
    if config.out is not None and (config.out / "last").is_dir():
        raise UserError(f"{config.out} holds a run of an earlier version, in orbax's format; name another folder")

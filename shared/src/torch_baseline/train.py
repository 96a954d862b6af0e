"""torch's optimizer step, which other packages time and compare too, and the training that takes it.

:func:`make_train_step` makes the step; :mod:`torch_baseline.loop` calls it through :class:`TorchTrainer`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchkit import UserError
from torch_baseline import loop
from torch_baseline.checkpoint import Checkpoint, require_shapes
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Bytes, Corpus, Tokens, validation_batches
from torch_baseline.loop import NonFiniteError, Place, Trainer
from torch_baseline.model import GPT
from torch_baseline.optim import EMA, ClippingOptimizer, learning_rate, make_optimizer, set_learning_rate
from torch_baseline.parallel import World, join_world, release_gathered, spread_like, synchronise_gradients, whole
from torch_baseline.records import Report, Summary
from torch_baseline.throughput import peak_flops

# The float16 scaler starts at 65536 and halves its factor at each overflow. Below this factor, the gradients are at
# fault.
_LEAST_SCALE = 1.0

# The first calls run as they are: torch.compile compiles in them, and libraries choose their algorithms.
_WARMUP = 3


class TrainStep:
    """One optimizer step: forward, backward, clipping, update. :func:`make_train_step` makes it.

    Attributes:
        gradient_norm: Gradient norm of the latest step before clipping; a scalar on the model's device.
        scaler: Scaler of float16 gradients; it does nothing in other dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        before_update: Callable[[TrainStep, Tensor], None] | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.before_update = before_update
        self.parameters = list(model.parameters())
        self.device_type = self.parameters[0].device.type
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=config.dtype == "float16")
        self.gradient_norm = torch.zeros(())

    def __call__(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Take one step with the optimizer's current learning rate.

        Args:
            x_BT: Inputs of this process, int64; B is a multiple of the configuration's ``accumulation``.
            y_BT: Targets of the same shape.

        Returns:
            The mean loss before the update in nats per token, as a detached scalar. The call does not wait for it.

        Raises:
            ValueError: If the sequences cannot be divided into micro-batches of one size.
        """
        parts = self.config.accumulation
        if len(x_BT) % parts:
            raise ValueError(f"the sequences of a step must be a multiple of accumulation={parts}, got {len(x_BT)}")
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(x_BT, y_BT)
        self.scaler.unscale_(self.optimizer)
        optimizer: Any = self.optimizer
        clips = isinstance(optimizer, ClippingOptimizer)
        self.gradient_norm = optimizer.gradient_norm() if clips else self._gradient_norm()
        if self.before_update is not None:
            self.before_update(self, loss)
        if clips and self.config.clip:
            self.scaler.step(self.optimizer, norm=self.gradient_norm, max_norm=self.config.clip)
        else:
            if self.config.clip:
                nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip, self.gradient_norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _gradient_norm(self) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return whole(nn.utils.get_total_norm(gradients))

    def _accumulate(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Run forward and backward over the micro-batches, so that gradients are those of the mean over all of them."""
        parts = self.config.accumulation
        losses = []
        for index, (x, y) in enumerate(zip(x_BT.chunk(parts), y_BT.chunk(parts), strict=True)):
            synchronise_gradients(self.model, index == parts - 1)
            with autocast(self.config.dtype, self.device_type):
                loss = self.model(x, y)
            self.scaler.scale(loss / parts).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    *,
    before_update: Callable[[TrainStep, Tensor], None] | None = None,
) -> TrainStep:
    """Make the step of the training loop, which can also be run, timed or compared by itself.

    The step does not wait for the device. :func:`torch_baseline.optim.set_learning_rate` sets its learning rate.

    Args:
        model: Returns the mean loss for ``model(x_BT, y_BT)``; it may be compiled or wrapped.
        optimizer: Optimizer of the model's parameters.
        config: ``dtype``, ``accumulation`` and ``clip`` are used.
        before_update: Called with the step and the loss after the backward pass, before clipping and the update.

    Returns:
        A callable ``step(x_BT, y_BT) -> loss``.
    """
    return TrainStep(model, optimizer, config, before_update)


class GraphedStep:
    """A :class:`TrainStep` that is captured once as a CUDA graph and then replayed.

    A replay launches forward, backward, clipping and update at once, so the GPU does not wait for Python between
    kernels. Every call is one step: the first three run normally, the fourth captures and replays.

    Use :func:`torch_baseline.optim.make_optimizer` with ``graph=True``; the learning rate can then change between
    calls. The step must not wait for the device, so it has no ``before_update`` and no float16 scaler.

    Args:
        step: The step on one GPU.

    Raises:
        UserError: If the step runs on a CPU.
        ValueError: If it waits for the device, or a parameter group's learning rate is not on the device.
    """

    def __init__(self, step: TrainStep) -> None:
        if step.device_type != "cuda":
            raise UserError("a CUDA graph needs an NVIDIA GPU; on a CPU take the step without one")
        if step.before_update is not None or step.scaler.is_enabled():
            raise ValueError("a step in a CUDA graph cannot wait for the device; got before_update or a float16 scaler")
        if not all(isinstance(group["lr"], Tensor) for group in step.optimizer.param_groups):
            raise ValueError("the learning rate of a step in a CUDA graph must be a tensor: make_optimizer(graph=True)")
        self.step = step
        self._stream = torch.cuda.Stream()
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._operands: tuple[Tensor, Tensor] | None = None
        self._loss = torch.zeros(())

    def __call__(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Take one step.

        Args:
            x_BT: Inputs on the GPU, int64, of the same shape in every call.
            y_BT: Targets of the same shape.

        Returns:
            The mean loss before the update, as from :class:`TrainStep`.

        Raises:
            ValueError: If the shape is not that of the captured step.
        """
        self._calls += 1
        if self._calls <= _WARMUP:
            return self._run_normally(x_BT, y_BT)
        if self._operands is None:
            self._operands = x_BT.clone(), y_BT.clone()
        for static, given in zip(self._operands, (x_BT, y_BT), strict=True):
            if given.shape != static.shape:
                raise ValueError(f"the captured step takes shape {list(static.shape)}, got {list(given.shape)}")
            static.copy_(given)
        if self._graph is None:
            self.step.optimizer.zero_grad(set_to_none=True)  # gradients of the graph live in the graph's memory
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._loss = self.step(*self._operands)
            self._graph = graph
        self._graph.replay()
        return self._loss.clone()

    def _run_normally(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        # On the stream of the capture: autograd remembers the stream of a parameter's first gradient.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self.step(x_BT, y_BT)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss


def train(
    model_config: GPTConfig,
    config: TrainConfig,
    *,
    device: str = "cpu",
    resume: bool = False,
    parts: Mapping[str, Any] | None = None,
    report: Report = lambda event: None,
) -> Summary:
    """Train a model.

    Args:
        model_config: Shape of the model.
        config: Settings; ``last.pt``, ``best.pt``, ``metrics.jsonl`` and ``run.json`` are written to ``config.out``.
        device: ``"cpu"`` or ``"cuda"``.
        resume: Whether to continue from ``last.pt`` in ``config.out``. The result is bit for bit that of a run without
            interruption.
        parts: Replacements that are passed to :class:`GPT`: ``norm``, ``activation``, ``attention``, ``loss``.
        report: Called in every process with each event.

    Returns:
        The outcome.

    Raises:
        UserError: If the data cannot be used, the output folder contains another run, or the checkpoint does not fit.
        NonFiniteError: If a loss or gradient is not finite; the message names the step and the parameter or gradient.
        Terminated: After a SIGTERM to this process or another of the run, when the step is finished and its checkpoint
            written.
        ValueError: If the vocabulary is smaller than 256.
    """
    corpus = loop.load_text(model_config, config)
    with join_world(config, device) as world, deterministic_algorithms(config.deterministic):
        trainer = _set_up(model_config, config, corpus, world, parts or {})
        return loop.train(trainer, model_config, config, corpus, resume=resume, report=report)


@dataclass
class Learner(Trainer):
    """The state of a run.

    Attributes:
        model: The model without DDP's wrapper; its parameters may be sharded.
        optimizer: The optimizer of its parameters.
        scaler: The scaler of float16 gradients.
        ema: The moving average of the weights, or None.
        step: Number of finished optimizer steps.
        best_loss: Lowest validation loss so far, nats per byte.
        stale: Number of validations since the lowest one.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: EMA | None
    step: int = 0
    best_loss: float = math.inf
    stale: int = 0

    def checkpoint(self, config: TrainConfig, data_sha256: str) -> Checkpoint:
        """Return the unsharded state on the CPU, from which any number of processes can resume.

        All processes must call it.
        """
        return Checkpoint(
            step=self.step,
            model={name: _on_cpu(parameter.detach()) for name, parameter in self._named()},
            optimizer={
                name: {key: _on_cpu(value) for key, value in self.optimizer.state[parameter].items()}
                for name, parameter in self._named()
            },
            ema={} if self.ema is None else self.ema.state_dict(),
            scaler=self.scaler.state_dict(),
            rng=_rng_state(),
            best_loss=self.best_loss,
            stale=self.stale,
            model_config=asdict(self.model.config),
            train_config=config.as_plain(),
            data_sha256=data_sha256,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state, sharded in the same way as the model."""
        require_shapes(checkpoint, {name: tuple(parameter.shape) for name, parameter in self._named()})
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(spread_like(checkpoint.model[name], parameter))
        self._restore_optimizer(checkpoint.optimizer)
        if self.ema is not None:
            self.ema.load_state_dict(checkpoint.ema)
        if checkpoint.scaler:
            self.scaler.load_state_dict(checkpoint.scaler)
        self.step, self.best_loss, self.stale = checkpoint.step, checkpoint.best_loss, checkpoint.stale
        _restore_rng(checkpoint.rng)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def _restore_optimizer(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        # load_state_dict puts the step counters where a fused or a plain AdamW expects them. It identifies parameters
        # by their position in the groups, a checkpoint by their names.
        names = {parameter: name for name, parameter in self._named()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {
            index: {
                key: spread_like(value, parameter) if value.ndim else value
                for key, value in saved[names[parameter]].items()
            }
            for index, parameter in enumerate(ordered)
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def _on_cpu(value: Tensor) -> Tensor:
    return whole(value).to("cpu", copy=True)


def _rng_state() -> dict[str, Any]:
    """States of torch's generators on the CPU and on every GPU."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _restore_rng(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(saved, index)


@dataclass(kw_only=True)
class TorchTrainer(Learner):
    """A run in torch, as :mod:`torch_baseline.loop` drives it.

    Attributes:
        config: Settings.
        held_out: Validation bytes.
        world: The processes that share the work.
        wrapped: The module that a step calls: the model, or DDP's wrapper of it.
        train_step: Takes one step.
        check: Reads the loss and the gradient norm of each step.
    """

    config: TrainConfig
    held_out: Bytes
    world: World
    wrapped: nn.Module
    train_step: TrainStep
    check: FiniteCheck

    @property
    def place(self) -> Place:
        """Where the run takes place."""
        world = self.world
        kind: Any = world.device.type
        return Place(
            device=kind,
            shown=str(world.device),
            processes=world.size,
            is_main=world.is_main,
            peak=peak_flops(world.device, self.config.dtype, world.size),
            steps_per_call=1,
            ends_itself=True,
            about={},
            agreed_end=world.anywhere if world.size > 1 else None,
            gather=world.gather if world.size > 1 else None,
        )

    @property
    def averages(self) -> bool:
        """Whether the run keeps a moving average of the weights."""
        return self.ema is not None

    def take_steps(self, batches: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, float]]:
        """Take one step for each batch, and return the loss and the gradient norm of each."""
        numbers = []
        for tokens in batches:
            set_learning_rate(self.optimizer, learning_rate(self.step, self.config))
            x_BT, y_BT = (self.world.shard(part) for part in _to_device(tokens, self.world.device))
            self.check.step = self.step + 1
            self.train_step(x_BT, y_BT)
            if self.ema is not None:
                self.ema.update(self.model)
            self.step += 1
            numbers.append((self.check.loss, self.check.gradient_norm))
        return numbers

    def validation_loss(self, *, averaged: bool) -> float:
        """Return the mean loss of the held-out bytes, with the weights or with their average."""
        with self._weights(averaged):
            return validate(self.wrapped, self.held_out, self.config, self.model.config.block_size, self.world)

    def first_non_finite(self, *, averaged: bool) -> str:
        """Say in words where the first number that is not finite is."""
        with self._weights(averaged):
            return first_non_finite(self.model)

    def _weights(self, averaged: bool) -> AbstractContextManager[None]:
        return self.ema.applied(self.model) if averaged and self.ema is not None else nullcontext()


def _set_up(
    model_config: GPTConfig, config: TrainConfig, corpus: Corpus, world: World, parts: Mapping[str, Any]
) -> TorchTrainer:
    torch.manual_seed(config.seed)
    model = GPT(model_config, seed=config.seed, **parts).to(world.device)
    if config.dtype == "float64":
        model.double()
    world.shard_weights(model)
    optimizer = make_optimizer(model, config)
    wrapped = world.wrap(model)
    if config.compile:
        world.compile(model)
    check = FiniteCheck(model, world)
    train_step = make_train_step(wrapped, optimizer, config, before_update=check)
    return TorchTrainer(
        model,
        optimizer,
        train_step.scaler,
        EMA(model, config.ema_decay) if config.ema_decay else None,
        config=config,
        held_out=corpus.validation,
        world=world,
        wrapped=wrapped,
        train_step=train_step,
        check=check,
    )


class FiniteCheck:
    """Stops a run at the first loss or gradient norm that is not finite, before the weights change.

    It reads both values, and therefore waits for the device once per step. The loop logs these values.

    Args:
        model: The model without wrapper; its parameters and gradients are searched.
        world: The processes, over which the loss is averaged so that all of them stop together.
    """

    def __init__(self, model: GPT, world: World) -> None:
        self.model = model
        self.world = world
        self.step = 0
        self.loss = math.nan
        self.gradient_norm = math.nan

    def __call__(self, train_step: TrainStep, loss: Tensor) -> None:
        """Read a step's loss and gradient norm.

        Raises:
            NonFiniteError: If one is not finite. The scaler handles float16 gradients that only overflowed.
        """
        values = torch.stack((self.world.mean(loss).double(), train_step.gradient_norm.double()))
        self.loss, self.gradient_norm = values.tolist()
        if math.isfinite(self.loss) and math.isfinite(self.gradient_norm):
            return
        scaler = train_step.scaler
        if math.isfinite(self.loss) and scaler.is_enabled() and scaler.get_scale() >= _LEAST_SCALE:
            return
        raise NonFiniteError(
            f"step {self.step}: the loss is {self.loss}, the gradient norm {self.gradient_norm}; "
            f"{first_non_finite(self.model)}. The weights are those before this step"
        )


def first_non_finite(model: nn.Module) -> str:
    """Say in words where the first number that is not finite is.

    Parameters are searched in the order of the forward pass and gradients in the opposite order, because the backward
    pass propagates such a number to everything that it computes later.
    """
    named = list(model.named_parameters())
    for name, parameter in named:
        if not bool(torch.isfinite(whole(parameter.detach())).all()):
            return f"parameter {name} is not finite"
    for name, parameter in reversed(named):
        if parameter.grad is not None and not bool(torch.isfinite(whole(parameter.grad)).all()):
            return f"parameters are finite, the gradient of {name} is not"
    return "parameters and gradients are finite, the loss alone is not"


@torch.no_grad()
def validate(model: nn.Module, data: Bytes, config: TrainConfig, block_size: int, world: World) -> float:
    """Return the mean loss on the validation data in nats per byte, without changing the state of the training.

    Batches are divided among processes and micro-batches as in training, for the same memory and compiled shapes.

    Args:
        model: The model, called as in training.
        data: The validation bytes.
        config: ``batch_size``, ``accumulation``, ``eval_batches`` and ``dtype`` are used.
        block_size: Tokens per sequence.
        world: The processes that share the work.
    """
    training = model.training
    model.eval()
    try:
        losses = []
        # A replaced part may draw random numbers here, which must not change those of the training.
        with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
            for tokens in validation_batches(data, config.batch_size, block_size, config.eval_batches):
                x_BT, y_BT = (world.shard(part) for part in _to_device(tokens, world.device))
                for x, y in zip(x_BT.chunk(config.accumulation), y_BT.chunk(config.accumulation), strict=True):
                    with autocast(config.dtype, world.device.type):
                        losses.append(model(x, y))
        return world.mean(torch.stack(losses).double().mean()).item()
    finally:
        model.train(training)
        release_gathered(model)


def autocast(dtype: Precision, device_type: str) -> torch.autocast:
    """Return the autocast context of a forward pass, which is disabled for float32 and float64."""
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    return torch.autocast(device_type, dtype=low, enabled=low is not None)


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Make torch refuse algorithms whose result varies from run to run inside the block; ``on=False`` does nothing."""
    if not on:
        yield
        return
    # cuBLAS reads this when it starts and then uses fixed workspaces.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _to_device(tokens: tuple[Tokens, Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    x_BT, y_BT = (torch.from_numpy(part) for part in tokens)
    if device.type == "cuda":  # a copy from pinned memory is asynchronous
        x_BT, y_BT = x_BT.pin_memory(), y_BT.pin_memory()
    return x_BT.to(device, non_blocking=True), y_BT.to(device, non_blocking=True)

"""What is timed: one optimizer step of either framework, ready to be run in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from benchkit import UserError
from benchkit.device import Device
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus, require_length

Framework = Literal["torch", "jax"]

# Steps rotate through this many batches that are on the device already: what is timed is the step, not the text.
_BATCHES = 8


@dataclass(frozen=True)
class EngineSpec:
    """Which variant of the step.

    Attributes:
        framework: ``torch`` or ``jax``.
        compiled: pass torch's model through torch.compile; JAX is always compiled.
        attention: of JAX: ``xla`` or ``cudnn``; torch chooses for itself.
        donate: let JAX's step overwrite its state.
    """

    framework: Framework
    compiled: bool = True
    attention: str = "xla"
    donate: bool = True

    def __post_init__(self) -> None:
        if self.framework not in get_args(Framework):
            raise ValueError(f"framework must be torch or jax, got {self.framework!r}")


@dataclass(frozen=True)
class Preparation:
    """What it took to take the first step.

    Attributes:
        first_step_seconds: from a ready model to the first result: tracing, compiling, running.
        loss: of the first step, so that engines can be held against each other before they are timed.
        compile_seconds: by stage, where the framework has stages one can time.
        flops: of a step by XLA's count.
        temporaries: bytes of scratch memory by XLA's count.
        hlo: numbers of :class:`jax_baseline.hlo.Summary`.
    """

    first_step_seconds: float
    loss: float
    compile_seconds: dict[str, float]
    flops: float | None = None
    temporaries: int | None = None
    hlo: dict[str, Any] | None = None


class Engine(Protocol):
    """One variant of the step, with its model and its data."""

    def prepare(self) -> dict[str, Any]:
        """Take the first step; returns the fields of a :class:`Preparation`."""
        ...

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        ...

    def peak_memory(self) -> int | None:
        """Most bytes of device memory in use so far; None on a CPU."""
        ...


def make_engine(
    spec: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any], device: Device
) -> Engine:
    """Make an engine from plain JSON: the factory that a worker calls.

    Args:
        spec: fields of :class:`EngineSpec`.
        model: fields of :class:`GPTConfig`.
        training: fields of :class:`TrainConfig` as plain values.
        device: where it runs.
    """
    made = EngineSpec(**spec)
    data = training["data"]
    config = TrainConfig(**{**training, "data": None if data is None else Path(data)})
    if made.framework == "torch":
        return TorchEngine(made, GPTConfig(**model), config, device)
    return JaxEngine(made, GPTConfig(**model), config, device)


class TorchEngine:
    """``torch_baseline``'s step, eager or compiled."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import torch

        from torch_baseline.model import GPT
        from torch_baseline.optim import make_optimizer
        from torch_baseline.train import make_train_step

        self._torch, self._device = torch, device
        gpt = GPT(model, seed=config.seed).to(device)
        if config.dtype == "float64":
            gpt.double()
        if spec.compiled:
            gpt.compile()
        self._step = make_train_step(gpt, make_optimizer(gpt, config), config)
        self._batches = [
            tuple(torch.from_numpy(part).to(device) for part in tokens) for tokens in _batches(model, config)
        ]
        self._done = 0

    def prepare(self) -> dict[str, Any]:
        """Take the first step."""
        self._wait()
        start = time.perf_counter()
        loss = self._next().item()
        self._wait()
        return asdict(Preparation(time.perf_counter() - start, loss, {}))

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        for _ in range(steps):
            self._next()
        self._wait()

    def peak_memory(self) -> int | None:
        """Most bytes that tensors have held."""
        return None if self._device == "cpu" else int(self._torch.cuda.max_memory_allocated())

    def _next(self) -> Any:
        loss = self._step(*self._batches[self._done % _BATCHES])
        self._done += 1
        return loss

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


class JaxEngine:
    """This package's step."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import jax
        import numpy as np

        from jax_baseline.model import ATTENTIONS
        from jax_baseline.train import initial_state, make_train_step, require_jax_device

        if spec.attention not in ATTENTIONS:
            raise UserError(f"attention must be one of {', '.join(ATTENTIONS)}, got {spec.attention!r}")
        require_jax_device(device)
        self._jax = jax
        if config.dtype == "float64":
            jax.config.update("jax_enable_x64", True)  # for the whole process, which is this engine's alone
        self._device = jax.devices(device)[0]
        self._state = jax.device_put(initial_state(model, config), self._device)
        self._step: Any = make_train_step(model, config, attention=ATTENTIONS[spec.attention], donate=spec.donate)
        self._batches = [
            jax.device_put(tuple(part.astype(np.int32) for part in tokens), self._device)
            for tokens in _batches(model, config)
        ]
        self._done = 0

    def prepare(self) -> dict[str, Any]:
        """Compile, stage by stage, and take the first step."""
        from jax_baseline.compilation import compile_step
        from jax_baseline.hlo import summarise

        self._jax.block_until_ready(self._state)
        start = time.perf_counter()
        compiled = compile_step(self._step, self._state, *self._batches[0])
        self._step = compiled.step
        loss = float(self._next())
        seconds = time.perf_counter() - start
        stages = {
            "trace": compiled.trace_seconds,
            "lower": compiled.lower_seconds,
            "compile": compiled.compile_seconds,
        }
        summary = summarise(compiled.text).as_plain()
        return asdict(Preparation(seconds, loss, stages, compiled.flops, compiled.temporaries, summary))

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        for _ in range(steps):
            self._next()
        self._jax.block_until_ready(self._state)

    def peak_memory(self) -> int | None:
        """Most bytes that XLA's allocator has handed out."""
        statistics = self._device.memory_stats()
        return None if not statistics else statistics.get("peak_bytes_in_use")

    def _next(self) -> Any:
        self._state, metrics = self._step(self._state, *self._batches[self._done % _BATCHES])
        self._done += 1
        return metrics.loss


def bench_config(preset: str, *, batch_size: int, dtype: Precision) -> tuple[GPTConfig, TrainConfig]:
    """Return the shapes and settings that are timed; the learning rate is small, for its schedule is not at work."""
    training = TrainConfig.preset(preset)
    return GPTConfig.preset(preset), replace(
        training, batch_size=batch_size, dtype=dtype, compile=False, lr=1e-4, min_lr=1e-4, warmup=0
    )


def _batches(model: GPTConfig, config: TrainConfig) -> list[tuple[Tokens, Tokens]]:
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    return [batch(corpus.train, config.seed, step, config.batch_size, model.block_size) for step in range(_BATCHES)]

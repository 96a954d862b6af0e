"""The step of ``torch_baseline`` as an engine, made from plain values in the process that runs it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from benchkit import UserError
from benchkit.device import Device
from engines.kernel_times import KernelTime, torch_kernel_times
from engines.spec import BATCHES, Engine, EngineSpec, Preparation, batches
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, TrainConfig

if TYPE_CHECKING:
    from torch_baseline.train import TrainStep


def make_engine(
    spec: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any], device: Device
) -> Engine:
    """Make an engine of PyTorch from plain values. The process of the engine calls this function.

    Args:
        spec: Fields of :class:`EngineSpec`.
        model: Fields of :class:`GPTConfig`.
        training: Fields of :class:`TrainConfig` as plain values.
        device: Device of the engine.

    Raises:
        UserError: If the engine is one of JAX.
    """
    if spec["framework"] != "torch":
        raise UserError(
            f"this process makes engines of torch, got one of {spec['framework']}; "
            "expected the factory jax_baseline.timing.jax_engine.make_engine"
        )
    return TorchEngine(*from_plain(spec, model, training), device)


def from_plain(
    spec: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any]
) -> tuple[EngineSpec, GPTConfig, TrainConfig]:
    """Return the arguments of an engine from their plain values, with the changes of the variant in the model."""
    variant = EngineSpec(**spec)
    return variant, variant.model(GPTConfig(**model)), TrainConfig.from_plain(training)


class TorchEngine:
    """The step of ``torch_baseline``, eager or compiled."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import torch

        from torch_baseline.model import GPT, causal_attention, causal_attention_by
        from torch_baseline.train import GraphedStep

        self._torch, self._device = torch, device
        attention = causal_attention if spec.attention == "auto" else causal_attention_by(spec.attention)
        parts = _named(spec.parts)() if spec.parts else {}
        if spec.network:
            torch.manual_seed(config.seed)
            gpt: Any = _named(spec.network)(model).to(device)
        else:
            gpt = GPT(model, seed=config.seed, **{"attention": attention, **parts}).to(device)
        if config.dtype == "float64":
            gpt.double()
        if spec.compiled:
            if (reason := missing_inductor(device)) is not None:
                raise UserError(reason)
            gpt.compile(options=dict.fromkeys(spec.options.split(","), True) if spec.options else None)
        self._spec, self._gpt, self._config = spec, gpt, config
        step = self._new_step()
        self._step: Any = GraphedStep(step) if spec.graph else step
        self._batches = [
            tuple(torch.from_numpy(part).to(device) for part in tokens) for tokens in batches(model, config)
        ]
        self._done = 0

    def _new_step(self) -> TrainStep:
        from torch_baseline.optim import make_optimizer
        from torch_baseline.train import make_train_step

        spec, config = self._spec, self._config
        kind = _named(spec.optimizer) if spec.optimizer else None
        linear_dtype = getattr(self._torch, config.dtype) if spec.low_precision_weights else None
        optimizer = make_optimizer(self._gpt, config, kind=kind, graph=spec.graph, linear_dtype=linear_dtype)
        return make_train_step(self._gpt, optimizer, config)

    def restart(self, seed: int) -> None:
        """Begin again with the first batch and other initial weights, without compiling.

        Raises:
            UserError: If the step is in a CUDA graph, has low-precision weights, or is of another network.
        """
        from torch_baseline.model import init_numpy

        spec = self._spec
        if spec.graph or spec.network or spec.low_precision_weights:
            raise UserError(f"an engine that begins again is a plain step of the GPT, got {spec.summary}")
        self._gpt.load_numpy(init_numpy(self._gpt.config, seed))
        self._step, self._done = self._new_step(), 0

    def prepare(self) -> Preparation:
        """Take the first step."""
        self._wait()
        start = time.perf_counter()
        loss = self.next_loss()
        self._wait()
        return Preparation(time.perf_counter() - start, loss, {})

    def run(self, steps: int) -> None:
        """Take this many steps and wait for the device."""
        for _ in range(steps):
            self._next()
        self._wait()

    def next_loss(self) -> float:
        """Take one step and return its loss."""
        return float(self._next().item())

    def peak_memory(self) -> int | None:
        """Peak memory of torch's tensors, in bytes."""
        return None if self._device == "cpu" else int(self._torch.cuda.max_memory_allocated())

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take this many steps under torch's profiler and return the time of each kernel."""
        return torch_kernel_times(lambda: self.run(steps), steps, self._device)

    def _next(self) -> Any:
        loss = self._step(*self._batches[self._done % BATCHES])
        self._done += 1
        return loss

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


def _named(name: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)

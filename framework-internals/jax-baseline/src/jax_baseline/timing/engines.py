"""Engines: variants of the optimizer step of either framework, each timed in a separate process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError
from benchkit.device import Device
from jax_baseline.timing.kernel_times import KernelTime, jax_kernel_times, torch_kernel_times
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus, require_length

if TYPE_CHECKING:
    from torch_baseline.train import TrainStep

Framework = Literal["torch", "jax"]

# Steps rotate through this many batches, which are on the device already, so that no data loading is timed.
_BATCHES = 8


@dataclass(frozen=True)
class EngineSpec:
    """One variant of the step. Only ``low_precision_residual``, ``parts`` and ``network`` change the numbers.

    Attributes:
        framework: ``torch`` or ``jax``.
        compiled: Compile torch's model with torch.compile. JAX is always compiled.
        attention: For JAX a key of ``model.ATTENTIONS``; for torch ``auto`` or a key of
            ``torch_baseline.model.ATTENTION_KERNELS``.
        donate: JAX only: donate the state to the step.
        scan: JAX only: scan over stacked blocks.
        remat: JAX only: recompute each block in the backward pass.
        steps_per_dispatch: JAX only: number of steps per call of the compiled function.
        low_precision_residual: Keep the residual stream in the compute dtype.
        low_precision_weights: torch only: keep the weights of linear layers, and their gradients, in the compute dtype.
            ``optimizer`` keeps float32 masters.
        data: JAX only: number of replicas of the weights, see :mod:`jax_baseline.gpt.sharding`. The batch size of the
            configuration is that of each device.
        fsdp: JAX only: number of devices that share one replica.
        parts: torch only: ``module:function`` without arguments that returns keyword arguments of
            :class:`torch_baseline.model.GPT`: norm, activation, attention or loss.
        network: torch only: ``module:function`` that makes another model from a :class:`GPTConfig`. It is called like
            :class:`torch_baseline.model.GPT` with targets. Its losses are its own.
        optimizer: torch only: ``module:class`` with the arguments of ``torch.optim.AdamW``, see
            :func:`torch_baseline.optim.make_optimizer`.
        graph: torch on a GPU only: the whole step is one CUDA graph, see :class:`torch_baseline.train.GraphedStep`.
        options: Compiler options. For torch, names of ``torch.compile`` options to switch on, separated by commas; for
            JAX, ``XLA_FLAGS``.
    """

    framework: Framework
    compiled: bool = True
    attention: str = ""
    donate: bool = True
    scan: bool = False
    remat: bool = False
    steps_per_dispatch: int = 1
    low_precision_residual: bool = False
    low_precision_weights: bool = False
    data: int = 1
    fsdp: int = 1
    parts: str = ""
    network: str = ""
    optimizer: str = ""
    graph: bool = False
    options: str = ""

    def __post_init__(self) -> None:
        if self.framework not in get_args(Framework):
            raise ValueError(f"framework must be torch or jax, got {self.framework!r}")
        if not self.attention:
            object.__setattr__(self, "attention", "auto" if self.framework == "torch" else "xla")

    @property
    def summary(self) -> str:
        """The framework, and the fields that differ from their defaults: ``jax, attention=cudnn, scan=True``."""
        default = EngineSpec(self.framework)
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(default, each.name)]
        return ", ".join([self.framework, *(f"{name}={getattr(self, name)}" for name in names)])

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.data * self.fsdp

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process."""
        return {"XLA_FLAGS": self.options} if self.framework == "jax" and self.options else {}

    def model(self, model: GPTConfig) -> GPTConfig:
        """Return the shape of the model with the changes of this variant."""
        return replace(model, low_precision_residual=self.low_precision_residual)


_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"

# The engines that ``bench`` offers by name. Reports compare the first ones; the others try compiler settings.
ENGINES: Mapping[str, EngineSpec] = {
    "torch-eager": EngineSpec("torch", compiled=False),
    "torch-compile": EngineSpec("torch"),
    "jit": EngineSpec("jax", donate=False),
    "jit-donated": EngineSpec("jax"),
    "jit-scan": EngineSpec("jax", scan=True),
    "jit-scan-remat": EngineSpec("jax", scan=True, remat=True),
    "jit-4-steps": EngineSpec("jax", steps_per_dispatch=4),
    "cudnn": EngineSpec("jax", attention="cudnn"),
    # Without Triton's matrix products, XLA compiles in half the time and is 1 % faster on an H200 (NOTES.md).
    "cudnn-no-triton-gemm": EngineSpec("jax", attention="cudnn", options=_NO_TRITON_GEMM),
    "cudnn-scan": EngineSpec("jax", attention="cudnn", scan=True),
    "cudnn-4-steps": EngineSpec("jax", attention="cudnn", steps_per_dispatch=4),
    "cudnn-data-2": EngineSpec("jax", attention="cudnn", data=2),
    "cudnn-fsdp-2": EngineSpec("jax", attention="cudnn", fsdp=2),
    "jit-data-2": EngineSpec("jax", data=2),
    "jit-fsdp-2": EngineSpec("jax", fsdp=2),
    "torch-compile-bf16-residual": EngineSpec("torch", low_precision_residual=True),
    "cudnn-bf16-residual": EngineSpec("jax", attention="cudnn", low_precision_residual=True),
    "cudnn-bf16-residual-4-steps": EngineSpec(
        "jax", attention="cudnn", low_precision_residual=True, steps_per_dispatch=4
    ),
    # Not measured yet: torch's compiled forward and backward as CUDA graphs.
    "torch-compile-graphs": EngineSpec("torch", options="triton.cudagraphs"),
    # These settings gained little or nothing on an H200; NOTES.md has the figures.
    "torch-compile-flash": EngineSpec("torch", attention="flash"),
    "torch-compile-tuned": EngineSpec("torch", options="coordinate_descent_tuning"),
    "torch-compile-max": EngineSpec("torch", options="max_autotune_gemm,coordinate_descent_tuning"),
    "cudnn-no-triton-gemm-4-steps": EngineSpec("jax", attention="cudnn", steps_per_dispatch=4, options=_NO_TRITON_GEMM),
    "cudnn-triton-fusion": EngineSpec(
        "jax",
        attention="cudnn",
        options=f"{_NO_TRITON_GEMM} --xla_gpu_experimental_enable_triton_heroless_priority_fusion=true",
    ),
    "cudnn-no-graphs": EngineSpec("jax", attention="cudnn", options="--xla_gpu_enable_command_buffer="),
    "cudnn-bf16-residual-no-graphs": EngineSpec(
        "jax",
        attention="cudnn",
        low_precision_residual=True,
        options=f"{_NO_TRITON_GEMM} --xla_gpu_enable_command_buffer=",
    ),
    "cudnn-fusion-autotuner": EngineSpec(
        "jax", attention="cudnn", options="--xla_gpu_experimental_enable_fusion_autotuner=true"
    ),
    "cudnn-gemm-fusion": EngineSpec("jax", attention="cudnn", options="--xla_gpu_cudnn_gemm_fusion_level=2"),
    "cudnn-latency-hiding": EngineSpec(
        "jax", attention="cudnn", options="--xla_gpu_enable_latency_hiding_scheduler=true"
    ),
}


def named_engines(names: Sequence[str]) -> dict[str, EngineSpec]:
    """Return the engines with these names.

    Raises:
        ValueError: For an unknown name.
    """
    if unknown := [name for name in names if name not in ENGINES]:
        raise ValueError(f"there is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    return {name: ENGINES[name] for name in names}


@dataclass(frozen=True)
class Preparation:
    """Cost and result of an engine's first step.

    Attributes:
        first_step_seconds: Time of the first step: tracing, compiling and running.
        loss: Loss of the first step. Engines must agree on it before they are timed.
        compile_seconds: Compile time by stage; empty for torch.
        flops: FLOPs of a step by XLA's count.
        temporaries: Bytes of scratch memory by XLA's count.
        collectives: Number of collective instructions of the compiled step by kind.
    """

    first_step_seconds: float
    loss: float
    compile_seconds: dict[str, float]
    flops: float | None = None
    temporaries: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """An engine with its model and its data."""

    def prepare(self) -> Preparation:
        """Take the first step."""
        ...

    def run(self, steps: int) -> None:
        """Take this many steps and wait for the device."""
        ...

    def next_loss(self) -> float:
        """Call the step once and return the loss of the first step in the call, before its update."""
        ...

    def peak_memory(self) -> int | None:
        """Peak device memory so far, in bytes; None on a CPU."""
        ...

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take this many steps under a profiler and return seconds per step by kernel, the largest first."""
        ...


def make_engine(
    spec: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any], device: Device
) -> Engine:
    """Make an engine from plain values. The process of the engine calls this function.

    Args:
        spec: Fields of :class:`EngineSpec`.
        model: Fields of :class:`GPTConfig`.
        training: Fields of :class:`TrainConfig` as plain values.
        device: Device of the engine.
    """
    made = EngineSpec(**spec)
    data = training["data"]
    config = TrainConfig(**{**training, "data": None if data is None else Path(data)})
    engine = TorchEngine if made.framework == "torch" else JaxEngine
    return engine(made, made.model(GPTConfig(**model)), config, device)


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
            tuple(torch.from_numpy(part).to(device) for part in tokens) for tokens in _batches(model, config)
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

        Args:
            seed: Seed of the weights.

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
        loss = self._step(*self._batches[self._done % _BATCHES])
        self._done += 1
        return loss

    def _wait(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


class JaxEngine:
    """The step of this package, on one device or on a mesh."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import jax

        from jax_baseline.gpt.model import ATTENTIONS
        from jax_baseline.gpt.sharding import make_mesh, spread, state_sharding, to_mesh
        from jax_baseline.gpt.train import initial_state, make_train_step, require_jax_device

        if spec.attention not in ATTENTIONS:
            raise UserError(f"attention must be one of {', '.join(ATTENTIONS)}, got {spec.attention!r}")
        require_jax_device(device)
        self._jax = jax
        if config.dtype == "float64":
            jax.config.update("jax_enable_x64", True)  # for the whole process, which runs this engine only
        config = replace(config, batch_size=config.batch_size * spec.devices)
        mesh = make_mesh(spec.data, spec.fsdp, jax.devices(device))
        self._device = mesh.devices.flat[0]
        state = initial_state(model, config, scan=spec.scan)
        shardings = state_sharding(state, mesh)
        self._state = spread(state, shardings)
        self._step: Any = None  # compiled in prepare()
        self._jitted = make_train_step(
            model,
            config,
            attention=ATTENTIONS[spec.attention],
            remat=spec.remat,
            donate=spec.donate,
            steps_per_dispatch=spec.steps_per_dispatch,
            shardings=shardings,
        )
        self._per_call = spec.steps_per_dispatch
        self._batches = [to_mesh(tokens, mesh) for tokens in _stacked(_batches(model, config), self._per_call)]
        self._done = 0

    def prepare(self) -> Preparation:
        """Compile with a time for each stage, and take the first step."""
        from jax_baseline.gpt.compilation import compile_step
        from jax_baseline.gpt.sharding import count_collectives

        self._jax.block_until_ready(self._state)
        start = time.perf_counter()
        compiled = compile_step(self._jitted, self._state, *self._batches[0])
        self._step = compiled.step
        loss = self.next_loss()
        seconds = time.perf_counter() - start
        collectives = count_collectives(compiled.text)
        return Preparation(seconds, loss, compiled.stages, compiled.flops, compiled.temporaries, collectives)

    def run(self, steps: int) -> None:
        """Take this many steps and wait for the device."""
        if steps % self._per_call:
            raise ValueError(f"this engine takes {self._per_call} steps per call; expected a multiple, got {steps}")
        for _ in range(steps // self._per_call):
            self._next()
        self._jax.block_until_ready(self._state)

    def next_loss(self) -> float:
        """Call the step once and return the loss of the first step in the call."""
        return float(self._next())

    def peak_memory(self) -> int | None:
        """Peak memory of XLA's allocator, in bytes."""
        statistics = self._device.memory_stats()
        return None if not statistics else statistics.get("peak_bytes_in_use")

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Compile the step for profiling, take this many steps, and return the time of each kernel."""
        from jax_baseline.gpt.compilation import compile_step, profiled

        options = profiled(self._device.platform)
        compiled = compile_step(self._jitted, self._state, *self._batches[0], options=options)
        timed, self._step = self._step, compiled.step
        try:
            self.run(self._per_call)  # the first run initialises the program
            return jax_kernel_times(lambda: self.run(steps), steps, compiled.text)
        finally:
            self._step = timed

    def _next(self) -> Any:
        self._state, metrics = self._step(self._state, *self._batches[self._done % len(self._batches)])
        self._done += 1
        return metrics.loss if self._per_call == 1 else metrics.loss[0]


def bench_config(
    preset: str, *, batch_size: int, dtype: Precision, layers: int | None = None
) -> tuple[GPTConfig, TrainConfig]:
    """Return the shape and the settings for timing. The learning rate is small and constant.

    Args:
        preset: Name of the preset.
        batch_size: Sequences per step.
        dtype: Compute dtype.
        layers: Number of blocks. The default is the preset's.
    """
    model, training = GPTConfig.preset(preset), TrainConfig.preset(preset)
    return replace(model, n_layer=model.n_layer if layers is None else layers), replace(
        training, batch_size=batch_size, dtype=dtype, compile=False, lr=1e-4, min_lr=1e-4, warmup=0
    )


def _named(name: str) -> Any:
    """The object that ``module:name`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _stacked(batches: list[tuple[Tokens, Tokens]], steps: int) -> list[tuple[NDArray, ...]]:
    """Return the arguments of each call: one batch, or ``steps`` batches stacked along a new first axis."""
    if steps == 1:
        return list(batches)
    groups = [batches[start : start + steps] for start in range(0, len(batches) - steps + 1, steps)]
    return [tuple(np.stack(parts) for parts in zip(*group, strict=True)) for group in groups]


def _batches(model: GPTConfig, config: TrainConfig) -> list[tuple[Tokens, Tokens]]:
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    return [batch(corpus.train, config.seed, step, config.batch_size, model.block_size) for step in range(_BATCHES)]

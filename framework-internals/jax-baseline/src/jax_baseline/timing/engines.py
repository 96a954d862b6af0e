"""What is timed: one optimizer step of either framework, ready to be run in a process of its own."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from benchkit import UserError
from benchkit.device import Device
from jax_baseline.timing.kernel_times import KernelTime, jax_kernel_times, torch_kernel_times
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus, require_length

Framework = Literal["torch", "jax"]

# Steps rotate through this many batches that are on the device already: what is timed is the step, not the text.
_BATCHES = 8


@dataclass(frozen=True)
class EngineSpec:
    """Which variant of the step: the same mathematics, executed differently.

    Attributes:
        framework: ``torch`` or ``jax``.
        compiled: pass torch's model through torch.compile; JAX is always compiled.
        attention: of JAX a key of ``model.ATTENTIONS``; of torch ``auto`` or a key of
            ``torch_baseline.model.ATTENTION_KERNELS``.
        donate: let JAX's step overwrite its state.
        scan: let JAX scan over stacked layers.
        remat: let JAX compute each block again in the backward.
        steps_per_dispatch: that one call of JAX's compiled function does.
        low_precision_residual: keep the residual stream in the compute dtype: the one field that changes the numbers.
        data: devices of JAX with a copy of the weights, see :mod:`jax_baseline.gpt.sharding`. The configuration's batch
            is that of each device.
        fsdp: devices that share a copy.
        parts: of torch's model, ``module:function`` of a function without arguments that returns keyword arguments of
            :class:`torch_baseline.model.GPT`: its norm, activation or attention.
        options: of the compiler. For torch, options of ``torch.compile`` separated by commas, switched on; for JAX,
            ``XLA_FLAGS``.
    """

    framework: Framework
    compiled: bool = True
    attention: str = ""
    donate: bool = True
    scan: bool = False
    remat: bool = False
    steps_per_dispatch: int = 1
    low_precision_residual: bool = False
    data: int = 1
    fsdp: int = 1
    parts: str = ""
    options: str = ""

    def __post_init__(self) -> None:
        if self.framework not in get_args(Framework):
            raise ValueError(f"framework must be torch or jax, got {self.framework!r}")
        if not self.attention:
            object.__setattr__(self, "attention", "auto" if self.framework == "torch" else "xla")

    @property
    def summary(self) -> str:
        """The framework, and what is otherwise than in its plain step: ``jax, attention=cudnn, scan=True``."""
        plain = EngineSpec(self.framework)
        names = [each.name for each in fields(self) if getattr(self, each.name) != getattr(plain, each.name)]
        return ", ".join([self.framework, *(f"{name}={getattr(self, name)}" for name in names)])

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return self.data * self.fsdp

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its process needs."""
        return {"XLA_FLAGS": self.options} if self.framework == "jax" and self.options else {}

    def model(self, model: GPTConfig) -> GPTConfig:
        """The shape with what this variant changes in it."""
        return replace(model, low_precision_residual=self.low_precision_residual)


_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"

# What ``bench`` can be asked for by name. The first group is what reports compare; the second tries settings.
ENGINES: Mapping[str, EngineSpec] = {
    "torch-eager": EngineSpec("torch", compiled=False),
    "torch-compile": EngineSpec("torch"),
    "jit": EngineSpec("jax", donate=False),
    "jit-donated": EngineSpec("jax"),
    "jit-scan": EngineSpec("jax", scan=True),
    "jit-scan-remat": EngineSpec("jax", scan=True, remat=True),
    "jit-4-steps": EngineSpec("jax", steps_per_dispatch=4),
    "cudnn": EngineSpec("jax", attention="cudnn"),
    # Without Triton's products in the choice, XLA compiles in half the time and is 1 % faster on an H200 (NOTES.md).
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
    # Not measured yet: the launches of torch's compiled forward and backward replayed as CUDA graphs.
    "torch-compile-graphs": EngineSpec("torch", options="triton.cudagraphs"),
    # Settings that were tried on an H200 and gave nothing or next to it; NOTES.md has the figures.
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
    """Return the engines of these names.

    Raises:
        ValueError: for an unknown one.
    """
    if unknown := [name for name in names if name not in ENGINES]:
        raise ValueError(f"there is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    return {name: ENGINES[name] for name in names}


@dataclass(frozen=True)
class Preparation:
    """What it took to take the first step.

    Attributes:
        first_step_seconds: from a ready model to the first result: tracing, compiling, running.
        loss: of the first step, so that engines can be held against each other before they are timed.
        compile_seconds: by stage, where the framework has stages one can time.
        flops: of a step by XLA's count.
        temporaries: bytes of scratch memory by XLA's count.
        collectives: instructions of the compiled step by kind.
    """

    first_step_seconds: float
    loss: float
    compile_seconds: dict[str, float]
    flops: float | None = None
    temporaries: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)


class Engine(Protocol):
    """One variant of the step, with its model and its data."""

    def prepare(self) -> dict[str, Any]:
        """Take the first step; returns the fields of a :class:`Preparation`."""
        ...

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        ...

    def next_loss(self) -> float:
        """Make one call of the step and return the loss of the first step in it, before its update."""
        ...

    def peak_memory(self) -> int | None:
        """Most bytes of device memory in use so far; None on a CPU."""
        ...

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take so many steps under a profiler; seconds a step by kernel, the largest first."""
        ...


def make_engine(
    spec: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any], device: Device
) -> Engine:
    """Make an engine from plain values, in the child process that it runs in.

    Args:
        spec: fields of :class:`EngineSpec`.
        model: fields of :class:`GPTConfig`.
        training: fields of :class:`TrainConfig` as plain values.
        device: where it runs.
    """
    made = EngineSpec(**spec)
    data = training["data"]
    config = TrainConfig(**{**training, "data": None if data is None else Path(data)})
    engine = TorchEngine if made.framework == "torch" else JaxEngine
    return engine(made, made.model(GPTConfig(**model)), config, device)


class TorchEngine:
    """``torch_baseline``'s step, eager or compiled."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import torch

        from torch_baseline.model import GPT, causal_attention, causal_attention_by
        from torch_baseline.optim import make_optimizer
        from torch_baseline.train import make_train_step

        self._torch, self._device = torch, device
        attention = causal_attention if spec.attention == "auto" else causal_attention_by(spec.attention)
        gpt = GPT(model, seed=config.seed, **{"attention": attention, **_parts(spec.parts)}).to(device)
        if config.dtype == "float64":
            gpt.double()
        if spec.compiled:
            if (reason := missing_inductor(device)) is not None:
                raise UserError(reason)
            gpt.compile(options=dict.fromkeys(spec.options.split(","), True) if spec.options else None)
        self._step = make_train_step(gpt, make_optimizer(gpt, config), config)
        self._batches = [
            tuple(torch.from_numpy(part).to(device) for part in tokens) for tokens in _batches(model, config)
        ]
        self._done = 0

    def prepare(self) -> dict[str, Any]:
        """Take the first step."""
        self._wait()
        start = time.perf_counter()
        loss = self.next_loss()
        self._wait()
        return asdict(Preparation(time.perf_counter() - start, loss, {}))

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        for _ in range(steps):
            self._next()
        self._wait()

    def next_loss(self) -> float:
        """Take one step and return its loss."""
        return float(self._next().item())

    def peak_memory(self) -> int | None:
        """Most bytes that tensors have held."""
        return None if self._device == "cpu" else int(self._torch.cuda.max_memory_allocated())

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take so many steps under torch's profiler."""
        return torch_kernel_times(lambda: self.run(steps), steps, self._device)

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

        from jax_baseline.gpt.model import ATTENTIONS
        from jax_baseline.gpt.sharding import make_mesh, spread, state_sharding, to_mesh
        from jax_baseline.gpt.train import initial_state, make_train_step, require_jax_device

        if spec.attention not in ATTENTIONS:
            raise UserError(f"attention must be one of {', '.join(ATTENTIONS)}, got {spec.attention!r}")
        require_jax_device(device)
        self._jax = jax
        if config.dtype == "float64":
            jax.config.update("jax_enable_x64", True)  # for the whole process, which is this engine's alone
        config = replace(config, batch_size=config.batch_size * spec.devices)
        mesh = make_mesh(spec.data, spec.fsdp, jax.devices(device))
        self._device = mesh.devices.flat[0]
        state = initial_state(model, config, scan=spec.scan)
        shardings = state_sharding(state, mesh)
        self._state = spread(state, shardings)
        self._step: Any = None  # until it is prepared
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
        batches = [tuple(part.astype(np.int32) for part in tokens) for tokens in _batches(model, config)]
        if self._per_call > 1:
            calls = len(batches) // self._per_call
            batches = [
                tuple(
                    np.stack(parts) for parts in zip(*batches[call * self._per_call :][: self._per_call], strict=True)
                )
                for call in range(calls)
            ]
        self._batches = [to_mesh(tokens, mesh) for tokens in batches]
        self._done = 0

    def prepare(self) -> dict[str, Any]:
        """Compile, stage by stage, and take the first step."""
        from jax_baseline.gpt.compilation import compile_step
        from jax_baseline.gpt.sharding import count_collectives

        self._jax.block_until_ready(self._state)
        start = time.perf_counter()
        compiled = compile_step(self._jitted, self._state, *self._batches[0])
        self._step = compiled.step
        loss = self.next_loss()
        seconds = time.perf_counter() - start
        stages = {
            "trace": compiled.trace_seconds,
            "lower": compiled.lower_seconds,
            "compile": compiled.compile_seconds,
        }
        collectives = count_collectives(compiled.text)
        return asdict(Preparation(seconds, loss, stages, compiled.flops, compiled.temporaries, collectives))

    def run(self, steps: int) -> None:
        """Take so many steps and wait for the last."""
        if steps % self._per_call:
            raise ValueError(f"this engine takes {self._per_call} steps a call, got {steps}")
        for _ in range(steps // self._per_call):
            self._next()
        self._jax.block_until_ready(self._state)

    def next_loss(self) -> float:
        """Make one call and return the loss of its first step."""
        return float(self._next())

    def peak_memory(self) -> int | None:
        """Most bytes that XLA's allocator has handed out."""
        statistics = self._device.memory_stats()
        return None if not statistics else statistics.get("peak_bytes_in_use")

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take so many steps under JAX's profiler, of a program compiled again for it."""
        from jax_baseline.gpt.compilation import compile_step, profiled

        options = profiled(self._device.platform)
        compiled = compile_step(self._jitted, self._state, *self._batches[0], options=options)
        timed, self._step = self._step, compiled.step
        try:
            self.run(self._per_call)  # the first run of a program sets it up
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
    """Return the shapes and settings that are timed; the learning rate is small, for its schedule is not at work.

    Args:
        preset: of shape and settings.
        batch_size: sequences a step.
        dtype: of the products.
        layers: blocks; by default the preset's.
    """
    model, training = GPTConfig.preset(preset), TrainConfig.preset(preset)
    return replace(model, n_layer=model.n_layer if layers is None else layers), replace(
        training, batch_size=batch_size, dtype=dtype, compile=False, lr=1e-4, min_lr=1e-4, warmup=0
    )


def _parts(function: str) -> dict[str, Any]:
    if not function:
        return {}
    module, _, name = function.partition(":")
    parts: dict[str, Any] = getattr(importlib.import_module(module), name)()
    return parts


def _batches(model: GPTConfig, config: TrainConfig) -> list[tuple[Tokens, Tokens]]:
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    return [batch(corpus.train, config.seed, step, config.batch_size, model.block_size) for step in range(_BATCHES)]

"""One way to run the training step: its description, what an engine can do, and the batches that it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal, Protocol, get_args

from engines.kernel_times import KernelTime
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus, require_length

Framework = Literal["torch", "jax"]

# Steps rotate through this many batches, which are on the device already, so that no data loading is timed.
BATCHES = 8


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
        data: Number of replicas of the weights: a mesh of :mod:`jax_baseline.gpt.sharding`, or processes of torch under
            DDP (:mod:`engines.ranks`). The batch size of the configuration is that of each device.
        fsdp: Number of devices that share one replica; for torch processes under FSDP2, with ``data`` 1.
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
        if self.framework == "torch" and self.devices > 1 and (self.graph or self.network or self.options):
            raise ValueError(f"several processes take a plain step of the GPT, got {self.summary}")
        if self.framework == "torch" and self.data > 1 and self.fsdp > 1:
            raise ValueError(f"torch's processes share one replica or have one each, got {self.data} × {self.fsdp}")

    @property
    def summary(self) -> str:
        """The framework, and the fields that differ from their defaults: ``jax, attention=cudnn, scan=True``."""
        default = EngineSpec(self.framework)
        names = [option.name for option in fields(self) if getattr(self, option.name) != getattr(default, option.name)]
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


def bench_config(
    preset: str, *, batch_size: int, dtype: Precision, layers: int | None = None, block_size: int | None = None
) -> tuple[GPTConfig, TrainConfig]:
    """Return the shape and the settings for timing. The learning rate is small and constant.

    Args:
        preset: Name of the preset.
        batch_size: Sequences per step.
        dtype: Compute dtype.
        layers: Number of blocks. The default is the preset's.
        block_size: Tokens of a sequence. The default is the preset's.
    """
    model, training = GPTConfig.preset(preset), TrainConfig.preset(preset)
    model = replace(model, n_layer=layers or model.n_layer, block_size=block_size or model.block_size)
    return model, replace(training, batch_size=batch_size, dtype=dtype, compile=False, lr=1e-4, min_lr=1e-4, warmup=0)


def batches(model: GPTConfig, config: TrainConfig) -> list[tuple[Tokens, Tokens]]:
    """Return the batches that an engine rotates through."""
    corpus = load_corpus(config.data)
    require_length(corpus, model.block_size)
    return [batch(corpus.train, config.seed, step, config.batch_size, model.block_size) for step in range(BATCHES)]

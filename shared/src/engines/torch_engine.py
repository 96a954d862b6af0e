"""The step of ``torch_baseline`` as an engine, made in the process that runs it."""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchkit import UserError
from benchkit.device import Device
from engines.kernel_times import GpuTime, KernelTime, torch_gpu_time, torch_kernel_times
from engines.spec import BATCHES, EngineSpec, Preparation, batches
from native_build import missing_inductor
from torch_baseline.config import GPTConfig, TrainConfig

if TYPE_CHECKING:
    import torch

    from torch_baseline.parallel import World
    from torch_baseline.train import TrainStep


class TorchEngine:
    """The step of ``torch_baseline``, eager or compiled; in one of several processes, the part of this one.

    Args:
        spec: The variant.
        model: Shape of the model.
        config: Settings; the batch size is that of each process.
        device: Kind of device.
        world: The processes, for more than one.
    """

    def __init__(
        self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device, world: World | None = None
    ) -> None:
        import torch

        from torch_baseline.model import GPT, causal_attention, causal_attention_by
        from torch_baseline.parallel import World
        from torch_baseline.train import GraphedStep

        self._torch, self._device = torch, device
        self._world = world or World("none", 0, 1, torch.device(device))
        config = replace(config, batch_size=config.batch_size * self._world.size)
        attention = causal_attention if spec.attention == "auto" else causal_attention_by(spec.attention)
        parts = _named(spec.parts)() if spec.parts else {}
        if spec.network:
            torch.manual_seed(config.seed)
            gpt: Any = _named(spec.network)(model).to(device)
        else:
            gpt = GPT(model, seed=config.seed, **{"attention": attention, **parts}).to(self._world.device)
        if config.dtype == "float64":
            gpt.double()
        self._spec, self._gpt, self._config = spec, gpt, config
        self._world.shard_weights(gpt)
        optimizer = self._new_optimizer()
        self._called = self._world.wrap(gpt)
        if spec.compiled:
            if (reason := missing_inductor(device)) is not None:
                raise UserError(reason)
            if spec.options:
                gpt.compile(options=dict.fromkeys(spec.options.split(","), True))
            else:
                self._world.compile(gpt)
        step = self._new_step(optimizer)
        self._step: Any = GraphedStep(step) if spec.graph else step
        self._batches = [
            tuple(self._world.shard(torch.from_numpy(part)).to(self._world.device) for part in tokens)
            for tokens in batches(model, config)
        ]
        self._done = 0

    def _new_optimizer(self) -> torch.optim.Optimizer:
        from torch_baseline.optim import make_optimizer

        spec, config = self._spec, self._config
        kind = _named(spec.optimizer) if spec.optimizer else None
        linear_dtype = getattr(self._torch, config.dtype) if spec.low_precision_weights else None
        return make_optimizer(self._gpt, config, kind=kind, graph=spec.graph, linear_dtype=linear_dtype)

    def _new_step(self, optimizer: torch.optim.Optimizer) -> TrainStep:
        from torch_baseline.train import make_train_step

        return make_train_step(self._called, optimizer, self._config)

    def restart(self, seed: int) -> None:
        """Begin again with the first batch and other initial weights, without compiling.

        Raises:
            UserError: If the step is in a CUDA graph, has low-precision or sharded weights, or is of another network.
        """
        from torch_baseline.model import init_numpy

        spec = self._spec
        if spec.graph or spec.network or spec.low_precision_weights or spec.fsdp > 1:
            raise UserError(f"an engine that begins again is a plain step of the GPT, got {spec.summary}")
        self._gpt.load_numpy(init_numpy(self._gpt.config, seed))
        self._step, self._done = self._new_step(self._new_optimizer()), 0

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
        """Take one step and return its loss, over all processes."""
        return float(self._world.mean(self._next()).item())

    def peak_memory(self) -> int | None:
        """Peak memory of torch's tensors, in bytes; of this process."""
        return None if self._device == "cpu" else int(self._torch.cuda.max_memory_allocated())

    def kernel_times(self, steps: int) -> list[KernelTime]:
        """Take this many steps under torch's profiler and return the time of each kernel."""
        return torch_kernel_times(lambda: self.run(steps), steps, self._device)

    def gpu_time(self, steps: int) -> GpuTime | None:
        """Take this many steps under torch's profiler and return what the GPU does in one; None on a CPU."""

        def run() -> None:
            self._world.meet()  # a profiler takes long to start, and then a GPU would wait for those of other processes
            self.run(steps)

        return None if self._device == "cpu" else torch_gpu_time(run, steps)

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

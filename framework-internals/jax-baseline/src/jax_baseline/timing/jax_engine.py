"""The step of this package as an engine, beside that of ``torch_baseline``."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError
from benchkit.device import Device
from engines import ranks
from engines.kernel_times import KernelTime, by_time
from engines.spec import Engine, EngineSpec, Preparation, batches
from jax_baseline.gpt.devices import require_jax_device
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Tokens


def make_engine(spec: EngineSpec, model: GPTConfig, training: TrainConfig, device: Device) -> Engine:
    """Make an engine of either framework, see :func:`engines.ranks.make_engine`."""
    return (ranks.make_engine if spec.framework == "torch" else JaxEngine)(spec, model, training, device)


class JaxEngine:
    """The step of this package, on one device or on a mesh."""

    def __init__(self, spec: EngineSpec, model: GPTConfig, config: TrainConfig, device: Device) -> None:
        import jax

        from jax_baseline.gpt.model import with_attention
        from jax_baseline.gpt.sharding import make_mesh, spread, state_sharding, to_mesh
        from jax_baseline.gpt.train import initial_state, make_train_step

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
            parts=with_attention(spec.attention),
            remat=spec.remat,
            donate=spec.donate,
            steps_per_dispatch=spec.steps_per_dispatch,
            shardings=shardings,
        )
        self._per_call = spec.steps_per_dispatch
        self._batches = [to_mesh(tokens, mesh) for tokens in _stacked(batches(model, config), self._per_call)]
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
        flops = compiled.costs.get("flops")
        return Preparation(seconds, loss, compiled.stages, flops, compiled.temporaries, collectives)

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
        with patch.object(self, "_step", compiled.step):
            self.run(self._per_call)  # the first run initialises the program
            return jax_kernel_times(lambda: self.run(steps), steps, compiled.text)

    def _next(self) -> Any:
        self._state, metrics = self._step(self._state, *self._batches[self._done % len(self._batches)])
        self._done += 1
        return metrics.loss if self._per_call == 1 else metrics.loss[0]


def _stacked(single: list[tuple[Tokens, Tokens]], steps: int) -> list[tuple[NDArray, ...]]:
    """Return the arguments of each call: one batch, or ``steps`` batches stacked along a new first axis."""
    if steps == 1:
        return list(single)
    groups = [single[start : start + steps] for start in range(0, len(single) - steps + 1, steps)]
    return [tuple(np.stack(parts) for parts in zip(*group, strict=True)) for group in groups]


def jax_kernel_times(run: Callable[[], None], steps: int, text: str) -> list[KernelTime]:
    """Return the time of every HLO instruction that runs.

    ``run`` takes so many steps and waits for the device; ``text`` is the optimised HLO. A name is that of the
    instruction, the type of its result and its ``op_name``.

    Raises:
        UserError: If the profile is empty, as when the process may not read the GPU's counters.
    """
    from jax_baseline.hlo import parse
    from jax_baseline.hlo.profile import kernel_events

    times: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.Counter()
    for operation, seconds in kernel_events(run):
        times[operation] += seconds / steps
        calls[operation] += 1
    if not times:
        raise UserError("JAX's profiler recorded no kernel; it needs permission to read the GPU's activity (CUPTI)")
    shown = {
        instruction.name: f"{', '.join(map(str, instruction.shapes))} {instruction.op_name.split('/', 1)[-1]}"
        for instructions in parse(text).computations.values()
        for instruction in instructions
    }
    return by_time((f"{name} {shown.get(name, '')}", calls[name] / steps, seconds) for name, seconds in times.items())

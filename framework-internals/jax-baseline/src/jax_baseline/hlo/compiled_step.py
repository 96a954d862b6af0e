"""Compiles and profiles the train step: its StableHLO, its optimised HLO, XLA's counts and times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import RemoteObject
from jax_baseline.gpt.compilation import profiled
from torch_baseline.config import GPTConfig, TrainConfig


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step.

    Attributes:
        stablehlo: The input of XLA.
        text: The optimised HLO.
        compile_seconds: Time of tracing, lowering and compilation.
        xla_costs: ``flops`` and ``bytes accessed`` of ``cost_analysis()``. Empty if XLA gives none.
        temporaries: Bytes of scratch memory.
        seconds: Time in one run by name of the kernel. Empty if it was not measured.
        step_seconds: Median time of one step. None if it was not measured.
        versions: Versions of the compiler.
    """

    stablehlo: str
    text: str
    compile_seconds: float
    xla_costs: dict[str, float]
    temporaries: int
    seconds: dict[str, float]
    step_seconds: float | None
    versions: dict[str, str]


def compile_train_step(
    model: GPTConfig, training: TrainConfig, *, attention: str, device: Device, repeats: int
) -> CompiledStep:
    """Compile and profile the train step in a separate process.

    0 repeats run nothing.

    Raises:
        UserError: If the attention, the dtype or the device does not exist.
    """
    arguments = {"model": model, "training": training, "attention": attention, "device": device}
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    with RemoteObject(StepCompiler, arguments, environment=environment) as compiler:
        step: CompiledStep = compiler.call("compile", repeats=repeats)
    return step


class StepCompiler:
    """The step and its device. It lives in the separate process."""

    def __init__(self, model: GPTConfig, training: TrainConfig, attention: str, device: Device) -> None:
        import jax

        from jax_baseline.gpt.model import ATTENTIONS
        from jax_baseline.gpt.train import make_train_step, require_jax_device

        if attention not in ATTENTIONS:
            raise UserError(f"--attention takes {' or '.join(ATTENTIONS)}, got {attention!r}")
        require_jax_device(device)
        self._jax = jax
        self._model, self._training = model, training
        self._device = jax.devices(device)[0]
        if training.dtype == "float64":
            jax.config.update("jax_enable_x64", True)  # this process does nothing else
        try:
            self._step: Any = make_train_step(model, training, attention=ATTENTIONS[attention])
        except ValueError as error:  # an unsupported dtype
            raise UserError(str(error)) from error

    def compile(self, repeats: int) -> CompiledStep:
        """Compile and measure the step."""
        import numpy as np

        from jax_baseline.gpt.train import initial_state

        jax = self._jax
        state = jax.device_put(initial_state(self._model, self._training), self._device)
        generator = np.random.default_rng(self._training.seed)
        shape = (self._training.batch_size, self._model.block_size)
        tokens = jax.device_put(generator.integers(0, 256, shape, np.int32), self._device)
        start = time.perf_counter()
        lowered = self._step.lower(state, tokens, tokens)
        compiled = lowered.compile(compiler_options=profiled(self._device.platform))
        seconds = time.perf_counter() - start
        text = compiled.as_text()
        costs = compiled.cost_analysis() or {}
        times, whole = self._measure(compiled, state, tokens, text, repeats) if repeats else ({}, None)
        return CompiledStep(
            lowered.as_text(),
            text,
            seconds,
            {name: float(costs[name]) for name in ("flops", "bytes accessed") if name in costs},
            compiled.memory_analysis().temp_size_in_bytes,
            times,
            whole,
            {"jax": jax.__version__, "backend": self._device.platform},
        )

    def _measure(
        self, compiled: Any, state: Any, tokens: Any, text: str, repeats: int
    ) -> tuple[dict[str, float], float]:
        import statistics

        from jax_baseline.hlo import kernels, parse
        from jax_baseline.hlo.profile import kernel_seconds

        states = [state]  # the step donates its state

        def run() -> Any:
            states[0], metrics = compiled(states[0], tokens, tokens)
            return metrics

        samples = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self._jax.block_until_ready((run(), states[0]))
            samples.append(time.perf_counter() - start)
        names = [kernel.name for kernel in kernels(parse(text))]
        return kernel_seconds(run, names, repeats=repeats), statistics.median(samples[1:])

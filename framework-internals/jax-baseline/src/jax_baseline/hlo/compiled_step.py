"""Compiles and profiles the train step: its StableHLO, its optimised HLO, XLA's counts and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchkit import UserError
from benchkit.device import Device
from benchkit.processes import RemoteObject
from torch_baseline.config import GPTConfig, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.gpt.compilation import Compiled


@dataclass(frozen=True)
class CompiledStep:
    """A compiled train step, of this machine or of a GPU that is not there.

    Attributes:
        text: The optimised HLO.
        compile_seconds: Time of tracing, lowering and compilation.
        temporaries: Bytes of scratch memory on one device.
        versions: Versions of the compiler.
        stablehlo: The input of XLA.
        xla_costs: See :class:`jax_baseline.gpt.compilation.Compiled`.
        seconds: Time in one run by name of the kernel. Empty if it was not measured.
        step_seconds: Median time of one step. None if it was not measured.
        arguments: Bytes of weights, optimizer state and batch on one device. None if XLA does not report it.
    """

    text: str
    compile_seconds: float
    temporaries: int
    versions: dict[str, str]
    stablehlo: str = ""
    xla_costs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    arguments: int | None = None


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

        from jax_baseline.gpt.compilation import compile_step, profiled
        from jax_baseline.gpt.train import initial_state

        jax = self._jax
        state = jax.device_put(initial_state(self._model, self._training), self._device)
        generator = np.random.default_rng(self._training.seed)
        shape = (self._training.batch_size, self._model.block_size)
        tokens = jax.device_put(generator.integers(0, 256, shape, np.int32), self._device)
        compiled = compile_step(self._step, state, tokens, tokens, options=profiled(self._device.platform))
        seconds, step_seconds = self._measure(compiled, state, tokens, repeats) if repeats else ({}, None)
        return CompiledStep(
            compiled.text,
            compiled.seconds,
            compiled.temporaries or 0,
            {"jax": jax.__version__, "backend": self._device.platform},
            compiled.lowered.as_text(),
            compiled.costs,
            seconds,
            step_seconds,
        )

    def _measure(self, compiled: Compiled, state: Any, tokens: Any, repeats: int) -> tuple[dict[str, float], float]:
        from jax_baseline.hlo import kernels, parse
        from jax_baseline.hlo.profile import kernel_seconds, median_seconds

        states = [state]  # the step donates its state

        def run() -> Any:
            states[0], metrics = compiled.step(states[0], tokens, tokens)
            return metrics, states[0]

        self._jax.block_until_ready(run())
        step_seconds = median_seconds(run, repeats)
        names = [kernel.name for kernel in kernels(parse(compiled.text))]
        return kernel_seconds(run, names, repeats=repeats), step_seconds

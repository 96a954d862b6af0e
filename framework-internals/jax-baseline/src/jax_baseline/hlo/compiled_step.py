"""Compiles and profiles the train step: its StableHLO, its optimised HLO, XLA's counts and times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchkit.device import Device
from benchkit.processes import Job, Runner
from jax_baseline.gpt.devices import process_environment, require_jax_device
from torch_baseline.config import GPTConfig, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.gpt.compilation import Compiled

LIMIT_SECONDS = 300.0  # of one compilation

_OPERATION = re.compile(r"(?:^|[\s\"=])(?:stablehlo|chlo|sdy|mhlo)\.(\w+)")
# Operations for values and structure, which need no work at run time.
_NO_WORK = frozenset({"constant", "return", "tuple", "get_tuple_element"})


@dataclass(frozen=True)
class CompiledStep:
    """An optimised module, of this machine, of a GPU that is not there, or of a file, which has the text alone."""

    text: str  # the optimised HLO
    versions: Mapping[str, str]  # versions of the compiler
    compile_seconds: float = 0.0  # time of tracing, lowering and compilation
    temporaries: int = 0  # bytes of scratch memory on one device
    stablehlo: str = ""  # the input of XLA
    xla_costs: Mapping[str, float] = field(default_factory=dict)  # see :class:`jax_baseline.gpt.compilation.Compiled`
    # Time in one run by name of the kernel. Empty if it was not measured.
    seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float | None = None  # median time of one step. None if it was not measured
    # Bytes of weights, optimizer state and batch on one device. None if XLA does not report it.
    arguments: int | None = None

    @property
    def stablehlo_operations(self) -> int:
        """Number of operations that XLA was given. The body of a function counts once."""
        return sum(name not in _NO_WORK for name in _OPERATION.findall(self.stablehlo))


def compile_train_step(
    model: GPTConfig, training: TrainConfig, *, attention: str, device: Device, repeats: int
) -> CompiledStep:
    """Compile and profile the train step in a separate process.

    0 repeats run nothing.

    Raises:
        UserError: If the attention, the dtype or the device does not exist.
    """
    call = partial(_compiled, model, training, attention, device, repeats)
    return Runner(LIMIT_SECONDS).run(
        Job(call, "compiling the step", environment=process_environment(device, alone=True))
    )


def _compiled(model: GPTConfig, training: TrainConfig, attention: str, device: Device, repeats: int) -> CompiledStep:
    import jax
    import numpy as np

    from jax_baseline.gpt.compilation import compile_step, profiled
    from jax_baseline.gpt.model import with_attention
    from jax_baseline.gpt.train import initial_state, make_train_step

    require_jax_device(device)
    if training.dtype == "float64":
        jax.config.update("jax_enable_x64", True)  # this process does nothing else
    step = make_train_step(model, training, parts=with_attention(attention))
    place = jax.devices(device)[0]
    state = jax.device_put(initial_state(model, training), place)
    shape = training.batch_size, model.block_size
    tokens = jax.device_put(np.random.default_rng(training.seed).integers(0, 256, shape, np.int32), place)
    compiled = compile_step(step, state, tokens, tokens, options=profiled(place.platform))
    seconds, step_seconds = _measured(compiled, state, tokens, repeats) if repeats else ({}, None)
    return CompiledStep(
        compiled.text,
        {"jax": jax.__version__, "backend": place.platform},
        compiled.seconds,
        compiled.temporaries or 0,
        compiled.lowered.as_text(),
        compiled.costs,
        seconds,
        step_seconds,
    )


def _measured(compiled: Compiled, state: Any, tokens: Any, repeats: int) -> tuple[dict[str, float], float]:
    """The time of each kernel, and of the step."""
    import jax

    from jax_baseline.hlo import kernels, parse
    from jax_baseline.hlo.profile import kernel_seconds, median_seconds

    states = [state]  # the step donates its state

    def run() -> Any:
        states[0], metrics = compiled.step(states[0], tokens, tokens)
        return metrics, states[0]

    jax.block_until_ready(run())
    step_seconds = median_seconds(run, repeats)
    names = [kernel.name for kernel in kernels(parse(compiled.text))]
    return kernel_seconds(run, names, repeats=repeats), step_seconds

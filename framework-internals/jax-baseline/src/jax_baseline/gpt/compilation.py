"""Ahead-of-time compilation of the train step, with the time of each stage and XLA's own statistics."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from jax_baseline.gpt.train import Step

# By default XLA may omit roundings to a narrower dtype, also those that a program asks for: on a GPU a cast to bfloat16
# and back is no cast. torch omits none. Without this compiler option a comparison would measure that difference, or
# would not see a cast that one side has too many.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}


def profiled(platform: str) -> dict[str, str] | None:
    """Return compiler options under which a profile shows each kernel by name.

    On a GPU, XLA puts kernels into command buffers (CUDA graphs). A profiler sees each of them as one unnamed event.
    """
    return {"xla_gpu_enable_command_buffer": ""} if platform == "gpu" else None


@dataclass(frozen=True)
class Compiled:
    """A function that was compiled ahead of time."""

    step: Any  # compiled function with the signature of the step
    lowered: Any  # what XLA compiled: ``lowered.as_text()`` is its StableHLO
    # Seconds of ``trace`` (Python to jaxpr), ``lower`` (jaxpr to StableHLO) and ``compile`` (StableHLO to machine
    # code).
    stages: dict[str, float]
    text: str  # optimised HLO
    # XLA's own ``flops`` and ``bytes accessed``, in which the body of a loop counts once; empty if XLA gives none.
    costs: dict[str, float]
    temporaries: int | None  # bytes of scratch memory of one run; None if XLA does not report it

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(self.stages.values())


def compile_step(step: Step, *arguments: Any, options: dict[str, str] | None = None) -> Compiled:
    """Compile a jitted function for arguments like these.

    Arrays are not donated; ``jax.ShapeDtypeStruct`` will do.
    """
    jitted: Any = step
    marks = [time.perf_counter()]
    traced = jitted.trace(*arguments)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile(options)
    marks.append(time.perf_counter())
    seconds = (after - before for before, after in itertools.pairwise(marks))
    costs, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    return Compiled(
        compiled,
        lowered,
        dict(zip(("trace", "lower", "compile"), seconds, strict=True)),
        text=compiled.as_text(),
        costs={name: float(costs[name]) for name in ("flops", "bytes accessed") if name in costs},
        temporaries=None if memory is None else memory.temp_size_in_bytes,
    )

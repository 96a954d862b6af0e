"""The compiled train step as an object of study: how long the compiler took, and what it made."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from jax_baseline.gpt.train import Step


def profiled(platform: str) -> dict[str, str] | None:
    """Compiler options for a program whose kernels a profile is to name.

    On a GPU, XLA puts kernels into command buffers, which are CUDA graphs: to a profiler one event, without the names.

    Args:
        platform: ``gpu`` or ``cpu``.
    """
    return {"xla_gpu_enable_command_buffer": ""} if platform == "gpu" else None


@dataclass(frozen=True)
class Compiled:
    """A step compiled ahead of time, and what that took.

    Attributes:
        step: callable as the step itself.
        trace_seconds: Python to jaxpr.
        lower_seconds: jaxpr to StableHLO.
        compile_seconds: StableHLO to machine code.
        text: the optimised HLO.
        flops: by XLA's own count, which takes a loop's body once; None where it gives none.
        temporaries: bytes of scratch memory a run needs; None where XLA does not say.
    """

    step: Any
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    text: str
    flops: float | None
    temporaries: int | None


def compile_step(step: Step, *arguments: Any, options: dict[str, str] | None = None) -> Compiled:
    """Compile a jitted function for arguments like these.

    Args:
        step: made by ``jax.jit``.
        arguments: arrays or ``jax.ShapeDtypeStruct``; not consumed.
        options: of the compiler, by the names of its flags.
    """
    jitted: Any = step
    marks = [time.perf_counter()]
    traced = jitted.trace(*arguments)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile(options)
    marks.append(time.perf_counter())
    trace, lower, compile_ = (after - before for before, after in itertools.pairwise(marks))
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return Compiled(
        compiled,
        trace,
        lower,
        compile_,
        text=compiled.as_text(),
        flops=costs.get("flops") if costs else None,
        temporaries=None if memory is None else memory.temp_size_in_bytes,
    )

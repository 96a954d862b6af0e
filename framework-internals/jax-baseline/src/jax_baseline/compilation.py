"""The compiled train step as an object of study: how long the compiler took, and what it made."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jax_baseline import hlo
from jax_baseline.train import Step


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


def compile_step(step: Step, *arguments: Any) -> Compiled:
    """Compile a jitted function for arguments like these.

    Args:
        step: made by ``jax.jit``.
        arguments: arrays or ``jax.ShapeDtypeStruct``; not consumed.
    """
    jitted: Any = step
    marks = [time.perf_counter()]
    traced = jitted.trace(*arguments)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    return Compiled(
        compiled,
        *(after - before for before, after in zip(marks, marks[1:], strict=False)),
        text=compiled.as_text(),
        flops=costs.get("flops") if costs else None,
        temporaries=None if memory is None else memory.temp_size_in_bytes,
    )


@dataclass(frozen=True)
class RegionCount:
    """Kernels of one part of the model in one phase."""

    region: str
    phase: hlo.Phase
    kernels: int
    dots: int


@dataclass(frozen=True)
class Summary:
    """An optimised module in numbers.

    Attributes:
        kernels: steps of the program that do something.
        kinds: their number by kind, most frequent first.
        dots: matrix products, alone or inside fusions; a library call that is one is a kind of its own.
        collectives: by opcode.
        donated: arguments whose memory an output takes over.
        arguments: how many there are.
        regions: kernels by part of the model.
    """

    kernels: int
    kinds: dict[str, int]
    dots: int
    collectives: dict[str, int]
    donated: int
    arguments: int
    regions: tuple[RegionCount, ...]

    def as_plain(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)


def summarise(text: str) -> Summary:
    """Count what is in the text of an optimised HLO module.

    Raises:
        ValueError: if it is not one.
    """
    module = hlo.parse(text)
    found = hlo.kernels(module)
    kinds = hlo.count_by_kind(found)
    return Summary(
        kernels=len(found),
        kinds=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        dots=sum(kernel.dots for kernel in found),
        collectives={kind: count for kind, count in kinds.items() if kind in hlo.COLLECTIVES},
        donated=len(module.donated),
        arguments=module.parameters,
        regions=tuple(
            RegionCount(region, phase, len(group), sum(kernel.dots for kernel in group))
            for (region, phase), group in hlo.count_by_region(found).items()
        ),
    )


def backend_name() -> str:
    """The platform JAX compiles for by default: ``cpu`` or ``gpu``."""
    return str(jax.default_backend())

"""The types of all measurements. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from benchkit.results import Quantity
from compile_bench.capture.trace import CompileTrace
from compile_bench.targets.case import Case, Mode


@dataclass(frozen=True)
class FirstSteps:
    """The first steps in a fresh process."""

    steps: tuple[float, ...]  # seconds of each of the first :data:`FIRST_STEPS` steps
    import_seconds: float = 0.0  # import of Dynamo and Inductor; 0 for eager
    toolchain_seconds: float = 0.0  # Inductor's check of compiler and machine, once a process; 0 for eager
    artifact_seconds: float = 0.0  # loading the artifacts of torch.compiler.save_cache_artifacts; 0 without
    # Seconds of the steps by phase of the compilation, see :data:`compile_bench.capture.phases.PHASES`.
    phases: Mapping[str, float] = field(default_factory=dict)
    # How often each of PyTorch's caches was hit, missed or bypassed.
    cache_events: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds from an imported torch to the end of the first steps."""
        return sum(self.steps) + self.import_seconds + self.toolchain_seconds + self.artifact_seconds

    @property
    def rest(self) -> float:
        """Seconds of the steps in no phase: running them, and whatever PyTorch does not time."""
        return max(sum(self.steps) - sum(self.phases.values()), 0.0)


@dataclass(frozen=True)
class Untuned:
    """Steps of a model compiled without autotuning, sampled in alternation with those of a mode that autotunes."""

    mode: Mode  # mode of torch.compile without autotuning
    step: Quantity  # seconds a step
    speedup: Quantity  # time of this step over that of the autotuned one, paired, with its interval


@dataclass(frozen=True)
class Steady:
    """Steps after all compiling, eager and compiled sampled in alternation."""

    eager: Quantity  # seconds of an eager step
    compiled: Quantity  # seconds of a compiled step
    speedup: Quantity  # eager over compiled, paired, with its interval
    method: str  # the clock
    # Percent of the last ten seconds in which some task waited for a CPU core; None if not known.
    pressure: float | None = None
    # Eager over eager, sampled in the same rounds: what this machine shows where there is no difference.
    control: Quantity | None = None
    untuned: Untuned | None = None  # the same model without autotuning; None if the mode does not autotune


@dataclass(frozen=True)
class ErrorPair:
    """Errors of one tensor (or all outputs as one) against float64: ‖x − x₆₄‖₂ / ‖x₆₄‖₂."""

    name: str  # name of the tensor
    eager: float  # error of the eager computation
    compiled: float  # error of the compiled computation
    bound: float  # largest error that the compiled computation may have, see :mod:`compile_bench.measure.accuracy`

    @property
    def holds(self) -> bool:
        """Whether the compiled error is within the bound."""
        return self.compiled <= self.bound


@dataclass(frozen=True)
class Accuracy:
    """Outputs and gradients of eager and compiled, both against float64."""

    output: ErrorPair | None = None  # all outputs as one tensor; for training, the loss
    gradient: ErrorPair | None = None  # the gradient closest to its bound, or furthest over it; None for inference
    tensors: int = 0  # how many tensors were compared
    skipped: str = ""  # why nothing was compared; empty if something was
    # Number of sets of weights that were compared. It is more than 1 if a gradient jumped, see
    # :mod:`compile_bench.measure.accuracy`; the errors are those of the last set.
    attempts: int = 1
    # What is wrong other than an error's size: the compiled call raised, lacks a gradient, or gives NaN or infinity
    # where eager and float64 do not. Empty otherwise.
    wrong: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything that was compared exists, is finite and is within its bound."""
        return not self.wrong and all(pair.holds for pair in (self.output, self.gradient) if pair is not None)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step.

    On a GPU, this is the most that torch's allocator had given out, weights included, plus what captured graphs keep
    for their replays. On a CPU, it is the largest rise within the step, from the profiler's allocator events. The rise
    contains activations, gradients and workspaces, and no weights.
    """

    eager: int  # peak of the eager step
    compiled: int  # peak of the compiled step, captured included
    captured: int = 0  # memory that captured graphs keep and the allocator counts as free; 0 without CUDA graphs


class KernelTime(NamedTuple):
    """GPU kernels of one name in a step."""

    name: str  # name of the kernel, see :func:`kernel_name`
    calls: float  # how often it runs
    seconds: float  # time of all its calls together


def kernel_name(symbol: str) -> str:
    """A kernel's name without return type, template arguments and parameters.

    Examples:
        >>> kernel_name("void at::native::some_kernel<4, float>(int)")
        'at::native::some_kernel'
        >>> kernel_name("_ZN7cutlass6KernelINS_4conv6kernelEEEvNT_6ParamsE")
        'cutlass::Kernel'
    """
    if mangled := re.match(r"_ZN?(?=\d)", symbol):
        rest, parts = symbol[mangled.end() :], []
        while length := re.match(r"\d+", rest):
            end = length.end() + int(length[0])
            parts.append(rest[length.end() : end])
            rest = rest[end:]
        return "::".join(parts)
    return re.split(r"[<(]", symbol.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0]


@dataclass(frozen=True)
class StepProfile:
    """What one step does, by the profiler."""

    # Share of the step inside compiled regions: of the wall time on a CPU, of the kernels' time on a GPU. None if the
    # profiler did not link the GPU's kernels to calls.
    covered: float | None
    operators: float  # calls of ATen operators from Python and autograd, outside of compiled regions
    kernels: float | None  # kernels that ran on the GPU; None on a CPU
    launches: float | None  # calls that launched them; with CUDA graphs one call replays many kernels. None on a CPU
    guard_seconds: float  # time that Dynamo searched for code whose guards hold
    busy_seconds: float | None = None  # time in which at least one kernel or copy ran on the GPU; None on a CPU
    costliest: tuple[KernelTime, ...] = ()  # the kernels that took longest, longest first
    fused_attention: float = 0.0  # kernels of fused attention that ran on the GPU; on a CPU, calls of its operators


@dataclass(frozen=True)
class Compiled:
    """The result of :func:`compile_bench.measure.steps.compiled`; without steady steps, many fields stay None."""

    first: FirstSteps
    trace: CompileTrace
    steady: Steady | None = None
    accuracy: Accuracy | None = None
    memory: Memory | None = None
    eager_profile: StepProfile | None = None
    compiled_profile: StepProfile | None = None
    no_cudagraphs: tuple[str, ...] = ()
    artifact_bytes: int = 0


@dataclass(frozen=True)
class Triage:
    """Breaks and recompilations of one case, counted without a code generator.

    Attributes:
        case: What was traced.
        trace: Its graphs, breaks and recompilations.
        calls: How many steps were made over the schedule.
        failures: Errors that compiling or the compiled steps raised and the model by itself does not.
    """

    case: Case
    trace: CompileTrace
    calls: int
    failures: tuple[str, ...] = ()

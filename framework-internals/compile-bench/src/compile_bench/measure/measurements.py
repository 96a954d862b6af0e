"""What a measurement is asked for, and the typed results it gives. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchkit.results import Quantity
from compile_bench.capture.trace import CompileTrace
from compile_bench.targets.case import Case, Mode


@dataclass(frozen=True)
class FirstSteps:
    """The first steps in a fresh process.

    Attributes:
        steps: seconds of the first :data:`FIRST_STEPS` steps.
        import_seconds: importing Dynamo and Inductor; 0 for eager.
        toolchain_seconds: what Inductor finds out about compiler and machine once a process; 0 for eager.
        trace: what was compiled; None for eager.
        artifact_seconds: loading the artifacts of ``torch.compiler.save_cache_artifacts``; 0 without.
    """

    steps: tuple[float, ...]
    import_seconds: float = 0.0
    toolchain_seconds: float = 0.0
    trace: CompileTrace | None = None
    artifact_seconds: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from an imported torch to the end of the first steps."""
        return sum(self.steps) + self.import_seconds + self.toolchain_seconds + self.artifact_seconds


@dataclass(frozen=True)
class Untuned:
    """Steps of the same model compiled without autotuning, taken in turns with those of a mode that autotunes.

    Attributes:
        mode: that it was compiled in.
        step: seconds.
        speedup: this step over the autotuned one, paired, with its interval.
    """

    mode: Mode
    step: Quantity
    speedup: Quantity


@dataclass(frozen=True)
class Steady:
    """Steps after all compiling, eager and compiled taken in turns.

    Attributes:
        eager: seconds a step.
        compiled: seconds a step.
        speedup: eager over compiled, paired, with its interval.
        method: the clock.
        pressure: percent of the last ten seconds of it in which some task waited for a CPU core; None if not known.
        control: eager over eager, sampled in the same rounds: what this machine shows where there is no difference.
        untuned: the same without autotuning; None where the mode does none.
    """

    eager: Quantity
    compiled: Quantity
    speedup: Quantity
    method: str
    pressure: float | None = None
    control: Quantity | None = None
    untuned: Untuned | None = None


@dataclass(frozen=True)
class ErrorPair:
    """Errors of one tensor (or all outputs as one) against float64: ‖x − x₆₄‖₂ / ‖x₆₄‖₂.

    Attributes:
        name: of the tensor.
        eager: error of the eager computation.
        compiled: error of the compiled one.
        bound: what the compiled one's error may be, see :mod:`compile_bench.measure.accuracy`.
    """

    name: str
    eager: float
    compiled: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the compiled error is within the bound."""
        return self.compiled <= self.bound


@dataclass(frozen=True)
class Accuracy:
    """Outputs and gradients of eager and compiled, both against float64.

    Attributes:
        output: all outputs (for training: the loss).
        gradient: the gradient tensor closest to, or furthest over, its bound; None for inference.
        tensors: how many were compared.
        skipped: why nothing was compared; empty if it was.
        wrong: what no error says: that the compiled call raised, lacks a gradient, or gives NaN or infinity where eager
            and float64 do not; empty otherwise.
        attempts: with how many sets of weights: more than one where a gradient jumped, see
            :mod:`compile_bench.measure.accuracy`; the figures are the last one's.
    """

    output: ErrorPair | None = None
    gradient: ErrorPair | None = None
    tensors: int = 0
    skipped: str = ""
    attempts: int = 1
    wrong: str = ""

    @property
    def holds(self) -> bool:
        """Whether everything that was compared is there, finite and within its bound."""
        return not self.wrong and all(pair.holds for pair in (self.output, self.gradient) if pair is not None)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step.

    On a GPU what torch's allocator had given out at most, weights included, and what captured graphs keep beside it for
    their replays. On a CPU the largest rise within the step, from the profiler's allocator events: activations,
    gradients and workspaces, no weights.

    Attributes:
        eager: of the eager step.
        compiled: of the compiled one, ``captured`` included.
        captured: kept by captured graphs and otherwise counted as free; 0 without CUDA graphs.
    """

    eager: int
    compiled: int
    captured: int = 0


@dataclass(frozen=True)
class KernelTime:
    """GPU kernels of one name, template arguments left out, in a step.

    Attributes:
        name: as the profiler has it, without return type, template arguments and parameters.
        calls: how often it runs.
        seconds: of all these together.
    """

    name: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class StepProfile:
    """What one step does, by the profiler.

    Attributes:
        covered: share inside compiled regions: of the wall time on a CPU, of the kernels' time on a GPU. None on a GPU
            whose kernels the profiler did not tie to calls.
        operators: calls of ATen operators from Python and autograd, outside of compiled regions.
        kernels: kernels that ran on the GPU; None on a CPU.
        launches: calls that started them; with CUDA graphs one replays many. None on a CPU.
        guard_seconds: Dynamo's search for code whose guards hold.
        busy_seconds: while at least one kernel or copy ran on the GPU; None on a CPU.
        dearest: the kernels that took longest, longest first.
        fused_attention: kernels of fused attention that ran on the GPU; on a CPU, calls of its operators.
    """

    covered: float | None
    operators: float
    kernels: float | None
    launches: float | None
    guard_seconds: float
    busy_seconds: float | None = None
    costliest: tuple[KernelTime, ...] = ()
    fused_attention: float = 0.0


@dataclass(frozen=True)
class Compiled:
    """What :func:`compile_bench.measure.steps.compiled` returns; everything but the first steps needs steady steps."""

    first: FirstSteps
    steady: Steady | None = None
    accuracy: Accuracy | None = None
    memory: Memory | None = None
    eager_profile: StepProfile | None = None
    compiled_profile: StepProfile | None = None
    no_cudagraphs: tuple[str, ...] = ()
    artifact_bytes: int = 0


@dataclass(frozen=True)
class Bench:
    """Everything about one case.

    Attributes:
        case: what was measured.
        eager: first steps without compiling.
        cold: first steps with empty caches.
        warm: first steps in a process that finds the caches of the one before; None if not asked for.
        steady: after compiling.
        accuracy: against float64.
        memory: peaks of a step.
        mega: first steps in a process that finds empty folders and loads the artifacts of the cold one; None if not
            asked for.
        eager_profile: of an eager step.
        compiled_profile: of a compiled one.
        no_cudagraphs: why a graph was not replayed as a CUDA graph in a mode that asks for it, in PyTorch's words.
        artifact_bytes: size of the cache artifacts; 0 if not asked for.
        tuned: whether the process of ``cold`` found the kernels that autotuning chose in another mode.
    """

    case: Case
    eager: FirstSteps
    cold: FirstSteps
    warm: FirstSteps | None
    steady: Steady
    accuracy: Accuracy
    memory: Memory | None
    mega: FirstSteps | None = None
    eager_profile: StepProfile | None = None
    compiled_profile: StepProfile | None = None
    no_cudagraphs: tuple[str, ...] = ()
    artifact_bytes: int = 0
    tuned: bool = False

    @property
    def trace(self) -> CompileTrace:
        """What the cold process compiled."""
        assert self.cold.trace is not None
        return self.cold.trace


@dataclass(frozen=True)
class Triage:
    """Breaks and recompilations of one case, counted without a code generator.

    Attributes:
        case: what was traced.
        trace: what was seen.
        calls: how many steps were made over the schedule.
        failures: what compiling raised, or the compiled steps did and the model by itself does not.
    """

    case: Case
    trace: CompileTrace
    calls: int
    failures: tuple[str, ...] = ()

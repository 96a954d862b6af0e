"""What was measured: the types of all measurements, and the records of results.json. Nothing here imports torch.

A measurement makes a record, the report and the commands read it. Exact seconds, bytes and counts are plain numbers; a
sampled figure is a :class:`~benchkit.results.Quantity` with its interval. Whatever follows from these is computed by
the report: totals, verdicts, break-even points, rankings. No record contains a path of the machine that wrote it: files
below a root are named relative to it, others by their last part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchkit.device import Device
from benchkit.results import Quantity, Record, Results
from benchkit.typed_records import TypedRecord
from compile_bench.capture.text import neutral_files
from compile_bench.capture.trace import Break, CompileTrace, Recompile, SilentEager, SilentKind
from compile_bench.measure.shapes import Passes, ranking
from compile_bench.targets.case import Case, Mode, Scope


@dataclass(frozen=True)
class FirstSteps:
    """The first steps in a fresh process."""

    steps: tuple[float, ...]  # seconds of each of the first :data:`FIRST_STEPS` steps
    import_seconds: float = 0.0  # import of Dynamo and Inductor; 0 for eager
    toolchain_seconds: float = 0.0  # Inductor's check of compiler and machine, once a process; 0 for eager
    artifact_seconds: float = 0.0  # loading the artifacts of torch.compiler.save_cache_artifacts; 0 without
    # Seconds of the steps by phase of the compilation, see :data:`compile_bench.capture.parsing.PHASES`.
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
    """Errors of one tensor (or all outputs as one) against float64: ‖x − x₆₄‖₂ / ‖x₆₄‖₂.

    Of an integer tensor, the share of its elements that are not as in float64.
    """

    name: str  # name of the tensor
    eager: float  # error of the eager computation
    compiled: float  # error of the compiled computation
    bound: float  # largest error that the compiled computation may have, see :mod:`compile_bench.measure.accuracy`

    @property
    def holds(self) -> bool:
        """Whether the compiled error is within the bound."""
        return self.compiled <= self.bound


# Begins the name of what a step writes: a buffer, an attribute of a module, an argument.
WRITTEN = "written"


@dataclass(frozen=True)
class Accuracy:
    """Outputs, gradients and what the step writes, of eager and compiled, both against float64."""

    output: ErrorPair | None = None  # all outputs as one tensor; for training, the loss
    # The gradient, single output of several, or written tensor, closest to its bound or furthest over it; None without.
    gradient: ErrorPair | None = None
    tensors: int = 0  # how many tensors were compared
    skipped: str = ""  # why nothing was compared; empty if something was
    # Number of sets of weights that were compared. It is more than 1 if a gradient jumped, see
    # :mod:`compile_bench.measure.accuracy`; the errors are those of the last set.
    attempts: int = 1
    # What is wrong other than an error's size: the compiled call raised, lacks a gradient, or gives NaN or infinity
    # where eager and float64 do not. Empty otherwise.
    wrong: str = ""
    left_out: tuple[str, ...] = ()  # what the step writes and could not be compared: random, or not finite in eager

    @property
    def holds(self) -> bool:
        """Whether everything that was compared exists, is finite and is within its bound."""
        return not self.wrong and all(pair.holds for pair in (self.output, self.gradient) if pair is not None)

    @property
    def gap(self) -> str:
        """The end of a sentence: what the comparison leaves out; empty if nothing."""
        names = ", ".join(self.left_out[:3]) + (f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else "")
        return f"; not compared, since random or not finite by itself: {names}" if names else ""


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


# States of the caches in which first steps were measured: the field of a case, and a name for a reader.
CACHES = {"cold": "empty caches", "warm": "warm caches", "artifact": "cache artifacts"}
TUNED = "choices of autotuning"

# Stands for eager's first steps in a record of a case, since all modes share them.
_RECORDED_APART = FirstSteps(())


class _OfModel:
    """A record about a target, in ``"training"`` or ``"inference"``."""

    target: str
    kind: str

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class EagerStart(_OfModel, TypedRecord, name="eager start", labels=("target", "kind")):
    """The first eager steps of a model, which are compared with those of all modes."""

    target: str
    kind: str
    start: FirstSteps


@dataclass(frozen=True)
class Compilation:
    """What was compiled, in numbers."""

    graphs: int  # captured graphs
    operations: int  # operations in these graphs
    guards: int  # guards of these graphs
    kernels: int  # kernels that Inductor generated
    recorder_seconds: float  # time that recording PyTorch's structured trace took
    guard_check_seconds: float | None = None  # one check of all guards, by Dynamo; None where it does not report it
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()

    @classmethod
    def of(cls, trace: CompileTrace) -> Compilation:
        """Sum up a trace."""
        checks = [graph.guard_seconds for graph in trace.graphs if graph.guard_seconds is not None]
        return cls(
            len(trace.graphs),
            trace.operations,
            trace.guards,
            trace.kernels,
            trace.handler_seconds,
            sum(checks) if checks else None,
            trace.breaks,
            trace.recompiles,
        )

    def neutral(self, root: Path) -> Compilation:
        """The same without paths of this machine."""
        return replace(self, breaks=neutral_files(self.breaks, root), recompiles=neutral_files(self.recompiles, root))


@dataclass(frozen=True)
class Bench(_OfModel, TypedRecord, name="case", labels=("target", "kind", "mode", "scope")):
    """Everything that was measured about one case.

    Attributes:
        target: Name of the target.
        kind: ``"training"`` or ``"inference"``.
        mode: Mode of ``torch.compile``.
        scope: What is compiled: the whole model, or its repeated blocks.
        cold: First steps with empty caches.
        steady: Steps after all compiling.
        compilation: What the process of ``cold`` compiled.
        accuracy: Outputs and gradients against float64.
        warm: First steps in a process that finds the caches of the one before; None if not measured.
        artifact: First steps in a process with empty caches that loads the cache artifacts of the cold one (PyTorch's
            mega-cache); None if not measured.
        memory: Peaks of a step.
        eager_profile: What an eager step does.
        compiled_profile: What a compiled step does.
        no_cudagraphs: Why CUDA graphs were left out in a mode that asks for them, in PyTorch's words.
        artifact_bytes: Size of the cache artifacts; 0 without.
        tuned: Whether the process of ``cold`` found the kernels that autotuning chose in another mode.
        processes: How many processes compiled at the same time.
        sweep_call: Number of the call of ``run.py --sweep`` that measured the case; 0 for the main job.
        sweep_seconds: Seconds that the sweep took for the case; 0 for the main job.
        dynamic: The option of ``torch.compile``.
        eager: First steps without compiling, which all modes of a model share: in results.json a record of their own.
        trace: What the process of ``cold`` compiled, in full; not in results.json.
        device: Device that was measured; in results.json it is in the environment.
    """

    target: str
    kind: str
    mode: Mode
    scope: Scope
    cold: FirstSteps
    steady: Steady
    compilation: Compilation
    accuracy: Accuracy
    warm: FirstSteps | None = None
    artifact: FirstSteps | None = None
    memory: Memory | None = None
    eager_profile: StepProfile | None = None
    compiled_profile: StepProfile | None = None
    no_cudagraphs: tuple[str, ...] = ()
    artifact_bytes: int = 0
    tuned: bool = False
    processes: int = 1
    sweep_call: int = 0
    sweep_seconds: float = 0.0
    dynamic: bool | None = None
    eager: FirstSteps = _RECORDED_APART
    trace: CompileTrace = field(default_factory=CompileTrace)
    device: Device = "cpu"

    @classmethod
    def of_case(cls, case: Case, trace: CompileTrace, **measured: Any) -> Bench:
        """The measurements of a case, with what it compiled; see the attributes."""
        return cls(
            case.target,
            case.kind,
            case.mode,
            case.scope,
            compilation=Compilation.of(trace),
            dynamic=case.dynamic,
            trace=trace,
            device=case.device,
            **measured,
        )

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.target, self.device, self.kind == "training", self.mode, self.dynamic, self.scope)

    @property
    def variant(self) -> str:
        """Mode, and scope unless it is the whole model."""
        return self.mode if self.scope == "whole" else f"{self.mode}, {self.scope}"

    @property
    def swept(self) -> bool:
        """Whether ``run.py --sweep`` measured the case, not the main job."""
        return self.sweep_call > 0

    @property
    def compiled_alone(self) -> bool:
        """Whether its first steps are those of a model that is compiled alone on the machine, from empty caches."""
        return self.processes == 1 and not self.swept and not self.tuned

    @property
    def starts(self) -> list[tuple[str, FirstSteps]]:
        """The first compiled steps, each with the state of the caches in words."""
        names = {**CACHES, "cold": TUNED} if self.tuned else CACHES
        starts = ((name, getattr(self, field)) for field, name in names.items())
        return [(name, start) for name, start in starts if start is not None]

    def records(self, root: Path, results: Results, **swept: Any) -> list[Record]:
        """Its record, and eager's first steps unless ``results`` has them; ``swept`` are fields that the sweep sets."""
        known = results.select(EagerStart.record_name, target=self.target, kind=self.kind)
        apart: dict[str, Any] = {"eager": _RECORDED_APART, "trace": CompileTrace(), "device": "cpu"}
        stored = replace(self, **apart, compilation=self.compilation.neutral(root), **swept)
        return [*([] if known else [EagerStart(self.target, self.kind, self.eager).record()]), stored.record()]


@dataclass(frozen=True)
class FailedCell(_OfModel, TypedRecord, name="failed cell", labels=("target", "kind", "mode")):
    """A cell of the sweep that could not be measured."""

    target: str
    kind: str
    mode: Mode
    why: str  # what went wrong, in one line
    seconds: float  # seconds until it failed
    sweep_call: int  # number of the call of run.py --sweep

    @property
    def variant(self) -> str:
        """The mode: a sweep compiles whole models."""
        return self.mode


@dataclass(frozen=True)
class SweepCall(TypedRecord, name="sweep call", labels=("number",)):
    """One call of ``run.py --sweep``."""

    number: int  # counted from 1
    date: str  # when it began
    command: str
    commit: str | None
    dirty: bool | None  # whether the working tree differed from that commit; None if that is not known


@dataclass(frozen=True)
class Toolchain(TypedRecord, name="toolchain"):
    """Inductor's check of compiler and machine, once for each cache folder."""

    seconds: float
    forked: bool = False  # whether measuring processes are forked from one that has imported torch


@dataclass(frozen=True)
class ShapeStudy(_OfModel, TypedRecord, name="shapes", labels=("target", "kind", "mode")):
    """Strategies for changing shapes, measured on one schedule."""

    target: str
    kind: str
    mode: Mode
    schedule: tuple[str, ...]  # the shapes of the schedule's calls
    varying: tuple[str, ...]  # the dimensions that change, "args[0] dimension 1"
    ranked_for: tuple[int, ...]  # numbers of passes that the strategies are ranked for
    strategies: Mapping[str, Passes]  # the passes of each strategy, in the order they were measured

    @classmethod
    def of_case(
        cls, case: Case, schedule: Sequence[str], varying: Sequence[str], passes: Sequence[Passes]
    ) -> ShapeStudy:
        """The study of a case."""
        strategies: dict[str, Passes] = {made.strategy: made for made in passes}
        return cls(case.target, case.kind, case.mode, tuple(schedule), tuple(varying), (), strategies)

    @property
    def passes(self) -> list[Passes]:
        """The passes of all strategies."""
        return list(self.strategies.values())

    def ranking(self, count: int) -> list[Passes]:
        """The strategies sorted for a number of passes, see :func:`ranking`."""
        return ranking(self.passes, count)

    def ranked(self, counts: Sequence[int], root: Path) -> Record:
        """Its record, for a report that ranks the strategies for these numbers of passes."""
        strategies = {
            name: replace(passes, recompiles=neutral_files(passes.recompiles, root))
            for name, passes in self.strategies.items()
        }
        return replace(self, ranked_for=tuple(counts), strategies=strategies).record()


@dataclass(frozen=True)
class CountedBreaks(TypedRecord, name="triage", labels=("target", "kind")):
    """Breaks and recompilations of a target, counted without a code generator."""

    target: str
    kind: str
    compilation: Compilation
    calls: int  # how many steps were made

    @classmethod
    def of_triage(cls, triage: Triage, root: Path) -> CountedBreaks:
        """What was counted, with files named relative to ``root``."""
        compilation = Compilation.of(triage.trace).neutral(root)
        return cls(triage.case.target, triage.case.kind, compilation, triage.calls)


Kind = Literal[
    "graph break",
    "skipped frame",
    "recompile limit",
    "compile error",
    SilentKind,
]

# File and line of a graph break in the unchanged sources.
Place = tuple[str, int]


@dataclass(frozen=True)
class BreakCost:
    """What a graph break costs."""

    # Python time between the graph before the break and the next graph, per step; None where it could not be measured.
    time_lost: Quantity | None
    breaks_between: int  # number of breaks between the same two graphs; they have one time_lost
    output_bytes: int  # bytes of the tensors that the graph before the break returns to Python
    # Time to trace the functions that exist because the graph was split here, or at the recompile limit the function
    # again, without code generation.
    compile_seconds: float
    not_measured: str = ""  # why there is no time_lost, as a clause; empty where there is one


@dataclass(frozen=True)
class Seen:
    """A message of a survey that goes on: it has just met a break."""

    case: Case
    met: Break


@dataclass(frozen=True)
class Survey:
    """What one process saw of a target, in training or in inference, over several seeds."""

    case: Case  # what was traced
    breaks: tuple[Break, ...]  # graph breaks, merged over the seeds
    seeds: tuple[tuple[int, ...], ...]  # for every break, the seeds that met it
    eager: tuple[SilentEager, ...]  # functions that ran eagerly without a message from Dynamo
    trace: CompileTrace  # trace of the first seed
    recompiles: tuple[Recompile, ...]  # one recompilation for every place and guard
    calls: int  # number of steps for each seed
    # Errors of the compiled model that the eager one does not raise, each in one line. The breaks before an error are
    # kept.
    failures: tuple[str, ...]
    collect_seconds: float  # time that the collector took
    trace_seconds: float  # time of all first calls, the collector's included
    user_files: frozenset[str] = frozenset()  # the files of the breaks that belong to the user
    notes: tuple[str, ...] = ()  # places behind which breaks stay hidden, one sentence each
    hidden: frozenset[Place] = frozenset()  # breaks that skipped frames hide
    untraced: frozenset[tuple[str, str]] = frozenset()  # functions (file and name) in which breaks may stay hidden
    # Cost of the break at a file and line; empty if they were not measured.
    costs: Mapping[Place, BreakCost] = field(default_factory=dict)
    eager_failure: str = ""  # what a later step of the eager model raises, as a sentence; empty if it raises nothing
    regions: str = ""  # the regions that the target's code compiles itself; empty if it compiles none
    complete: bool = True  # whether the survey ended. If not, it has what was seen until then


def place_of(met: Break) -> Place:
    """File and line of a break."""
    return met.file, met.line

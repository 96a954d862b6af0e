"""The kinds of records in results.json: ``measure.serialize`` writes them, the report reads them.

Exact seconds, bytes and counts are plain numbers; a sampled figure is a :class:`~benchkit.results.Quantity` with its
interval. Whatever follows from these is computed by the report: totals, verdicts, break-even points, rankings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchkit.typed_records import TypedRecord
from compile_bench.capture.trace import Break, Recompile
from compile_bench.measure.measurements import Accuracy, FirstSteps, Memory, Steady, StepProfile
from compile_bench.measure.shapes import Passes
from compile_bench.targets.case import Mode, Scope


@dataclass(frozen=True)
class EagerStart(TypedRecord, name="eager start", labels=("target", "kind")):
    """The first eager steps of a model, which are compared with those of all modes."""

    target: str  # name of the target
    kind: str  # "training" or "inference"
    start: FirstSteps  # the steps

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class Compilation:
    """What was compiled."""

    graphs: int  # captured graphs
    operations: int  # operations in these graphs
    guards: int  # guards of these graphs
    kernels: int  # kernels that Inductor generated
    recorder_seconds: float  # time that recording PyTorch's structured trace took
    # One check of all guards, measured by Dynamo; None where Dynamo does not report it.
    guard_check_seconds: float | None = None
    breaks: tuple[Break, ...] = ()  # graph breaks
    recompiles: tuple[Recompile, ...] = ()  # recompilations


@dataclass(frozen=True)
class CaseRecord(TypedRecord, name="case", labels=("target", "kind", "mode", "scope")):
    """Everything that was measured about one case."""

    target: str  # name of the target
    kind: str  # "training" or "inference"
    mode: Mode  # mode of torch.compile
    scope: Scope  # what is compiled: the whole model, or its repeated blocks
    cold: FirstSteps  # first steps with empty caches
    steady: Steady  # steps after all compiling
    compilation: Compilation  # what the process of cold compiled
    accuracy: Accuracy  # outputs and gradients against float64
    warm: FirstSteps | None = None  # first steps with the caches of an earlier process; None if not measured
    artifact: FirstSteps | None = None  # first steps with loaded cache artifacts; None if not measured
    memory: Memory | None = None  # peaks of a step
    eager_profile: StepProfile | None = None  # what an eager step does
    compiled_profile: StepProfile | None = None  # what a compiled step does
    # Why CUDA graphs were left out in a mode that asks for them, in PyTorch's words.
    no_cudagraphs: tuple[str, ...] = ()
    artifact_bytes: int = 0  # size of the cache artifacts; 0 without
    tuned: bool = False  # whether the process of cold found the kernels that autotuning chose in another mode
    processes: int = 1  # how many processes compiled at the same time
    sweep_call: int = 0  # number of the call of run.py --sweep that measured the case; 0 for the main job
    sweep_seconds: float = 0.0  # seconds that the sweep took for the case; 0 for the main job

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class FailedCell(TypedRecord, name="failed cell", labels=("target", "kind", "mode")):
    """A cell of the sweep that could not be measured."""

    target: str  # name of the target
    kind: str  # "training" or "inference"
    mode: Mode  # mode of torch.compile
    why: str  # what went wrong, in one line
    seconds: float  # seconds until it failed
    sweep_call: int  # number of the call of run.py --sweep

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class SweepCall(TypedRecord, name="sweep call", labels=("number",)):
    """One call of ``run.py --sweep``."""

    number: int  # counted from 1
    date: str  # when it began
    command: str  # its command line
    commit: str | None  # the commit that it ran
    dirty: bool | None  # whether the working tree differed from that commit; None if that is not known


@dataclass(frozen=True)
class Toolchain(TypedRecord, name="toolchain"):
    """Inductor's check of compiler and machine, once for each cache folder."""

    seconds: float  # how long the check takes
    forked: bool = False  # whether measuring processes are forked from one that has imported torch


@dataclass(frozen=True)
class ShapesRecord(TypedRecord, name="shapes", labels=("target", "kind", "mode")):
    """Strategies for changing shapes, measured on one schedule."""

    target: str  # name of the target
    kind: str  # "training" or "inference"
    mode: Mode  # mode of torch.compile
    schedule: tuple[str, ...]  # the shapes of the schedule's calls
    varying: tuple[str, ...]  # the dimensions that change, "args[0] dimension 1"
    ranked_for: tuple[int, ...]  # numbers of passes that the strategies are ranked for
    strategies: Mapping[str, Passes]  # the passes of each strategy, in the order they were measured


@dataclass(frozen=True)
class CountedBreaks(TypedRecord, name="triage", labels=("target", "kind")):
    """Breaks and recompilations of a target, counted without a code generator."""

    target: str  # name of the target
    kind: str  # "training" or "inference"
    compilation: Compilation  # what was traced
    calls: int  # how many steps were made

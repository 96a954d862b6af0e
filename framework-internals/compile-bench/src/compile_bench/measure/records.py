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
    """The first eager steps of a model, which are compared with those of all modes.

    Attributes:
        target: Name of the target.
        kind: ``"training"`` or ``"inference"``.
        start: The steps.
    """

    target: str
    kind: str
    start: FirstSteps

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class Compilation:
    """What was compiled.

    Attributes:
        graphs: Captured graphs.
        operations: Operations in these graphs.
        guards: Guards of these graphs.
        kernels: Kernels that Inductor generated.
        recorder_seconds: Time that recording PyTorch's structured trace took.
        guard_check_seconds: One check of all guards, measured by Dynamo; None where Dynamo does not report it.
        breaks: Graph breaks.
        recompiles: Recompilations.
    """

    graphs: int
    operations: int
    guards: int
    kernels: int
    recorder_seconds: float
    guard_check_seconds: float | None = None
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()


@dataclass(frozen=True)
class CaseRecord(TypedRecord, name="case", labels=("target", "kind", "mode", "scope")):
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
        warm: First steps with the caches of an earlier process; None if not measured.
        artifact: First steps with loaded cache artifacts; None if not measured.
        memory: Peaks of a step.
        eager_profile: What an eager step does.
        compiled_profile: What a compiled step does.
        no_cudagraphs: Why CUDA graphs were left out in a mode that asks for them, in PyTorch's words.
        artifact_bytes: Size of the cache artifacts; 0 without.
        tuned: Whether the process of ``cold`` found the kernels that autotuning chose in another mode.
        processes: How many processes compiled at the same time.
        sweep_call: Number of the call of ``run.py --sweep`` that measured the case; 0 for the main job.
        sweep_seconds: Seconds that the sweep took for the case; 0 for the main job.
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

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class FailedCell(TypedRecord, name="failed cell", labels=("target", "kind", "mode")):
    """A cell of the sweep that could not be measured.

    Attributes:
        target: Name of the target.
        kind: ``"training"`` or ``"inference"``.
        mode: Mode of ``torch.compile``.
        why: What went wrong, in one line.
        seconds: Seconds until it failed.
        sweep_call: Number of the call of ``run.py --sweep``.
    """

    target: str
    kind: str
    mode: Mode
    why: str
    seconds: float
    sweep_call: int

    @property
    def model(self) -> tuple[str, str]:
        """Target and kind."""
        return self.target, self.kind


@dataclass(frozen=True)
class SweepCall(TypedRecord, name="sweep call", labels=("number",)):
    """One call of ``run.py --sweep``.

    Attributes:
        number: Counted from 1.
        date: When it began.
        command: Its command line.
        commit: The commit that it ran.
        dirty: Whether the working tree differed from that commit; None if that is not known.
    """

    number: int
    date: str
    command: str
    commit: str | None
    dirty: bool | None


@dataclass(frozen=True)
class Toolchain(TypedRecord, name="toolchain"):
    """Inductor's check of compiler and machine, once for each cache folder.

    Attributes:
        seconds: How long the check takes.
        forked: Whether measuring processes are forked from one that has imported torch.
    """

    seconds: float
    forked: bool = False


@dataclass(frozen=True)
class ShapesRecord(TypedRecord, name="shapes", labels=("target", "kind", "mode")):
    """Strategies for changing shapes, measured on one schedule.

    Attributes:
        target: Name of the target.
        kind: ``"training"`` or ``"inference"``.
        mode: Mode of ``torch.compile``.
        schedule: The shapes of the schedule's calls.
        varying: The dimensions that change, ``"args[0] dimension 1"``.
        ranked_for: Numbers of passes that the strategies are ranked for.
        strategies: The passes of each strategy, in the order they were measured.
    """

    target: str
    kind: str
    mode: Mode
    schedule: tuple[str, ...]
    varying: tuple[str, ...]
    ranked_for: tuple[int, ...]
    strategies: Mapping[str, Passes]


@dataclass(frozen=True)
class CountedBreaks(TypedRecord, name="triage", labels=("target", "kind")):
    """Breaks and recompilations of a target, counted without a code generator.

    Attributes:
        target: Name of the target.
        kind: ``"training"`` or ``"inference"``.
        compilation: What was traced.
        calls: How many steps were made.
    """

    target: str
    kind: str
    compilation: Compilation
    calls: int

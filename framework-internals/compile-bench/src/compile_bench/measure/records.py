"""What was measured, as records of results.json: a measurement makes one, the report and the commands read it.

Exact seconds, bytes and counts are plain numbers; a sampled figure is a :class:`~benchkit.results.Quantity` with its
interval. Whatever follows from these is computed by the report: totals, verdicts, break-even points, rankings. No
record contains a path of the machine that wrote it: files below a root are named relative to it, others by their last
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchkit.device import Device
from benchkit.results import Record, Results
from benchkit.typed_records import TypedRecord
from compile_bench.capture.text import neutral_files
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.measure.measurements import Accuracy, FirstSteps, Memory, Steady, StepProfile, Triage
from compile_bench.measure.shapes import Passes, ranking
from compile_bench.targets.case import Case, Mode, Scope

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

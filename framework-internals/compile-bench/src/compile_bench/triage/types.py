"""What triage finds in a model: typed results. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchkit.results import Quantity
from compile_bench.capture.trace import Break, Recompile
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.survey.types import Kind, Place, Survey


@dataclass(frozen=True)
class BreakCost:
    """What a graph break costs.

    Attributes:
        time_lost: Python time between the graph before the break and the next graph, per step; None where it could not
            be measured.
        breaks_between: Number of breaks between the same two graphs; they have one ``time_lost``.
        output_bytes: Bytes of the tensors that the graph before the break returns to Python.
        compile_seconds: Time to compile the functions that exist because the graph was split here.
        not_measured: Why there is no ``time_lost``, as a clause; empty where there is one.
    """

    time_lost: Quantity | None
    breaks_between: int
    output_bytes: int
    compile_seconds: float
    not_measured: str = ""


@dataclass(frozen=True)
class BreakCosts:
    """The costs of a model's breaks.

    Attributes:
        costs: Cost of the break at a file and line.
        figures: The whole model.
        limits: Functions that run eagerly since they reached the recompile limit.
    """

    costs: dict[Place, BreakCost]
    figures: Figures
    limits: tuple[Break, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that keeps a line out of a graph.

    Attributes:
        kind: What happened.
        file: File of the user's code.
        line: Line in it.
        end_line: Last line of the statement that ``line`` is in.
        function: Function that the line is in.
        source: Text of the line.
        category: Family of reasons.
        reason: Reason in PyTorch's words.
        explanation: PyTorch's sentence behind the reason.
        advice: What to do, from the catalogue or from PyTorch's first hint.
        case: Name of the catalogue's entry; empty if none matches.
        kinds: ``"training"``, ``"inference"`` or both.
        seeds: Seeds that met it.
        times: How often it was met.
        library: The library's line that the user's line calls; empty if the user's line breaks itself.
        user_file: Whether ``file`` belongs to the user and can be changed.
        cost: Cost of the break; None where it was not measured.
        fix: The change that was tried last; None where none was tried.
    """

    kind: Kind
    file: str
    line: int
    end_line: int
    function: str
    source: str
    category: str
    reason: str
    explanation: str
    advice: str
    case: str
    kinds: tuple[str, ...]
    seeds: tuple[int, ...]
    times: int
    library: str = ""
    user_file: bool = True
    cost: BreakCost | None = None
    fix: Fix | None = None

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class TriageReport:
    """Everything triage says about a target.

    Attributes:
        target: Name of the target.
        findings: Findings, the costliest first.
        recompiles: One recompilation for every place and guard.
        surveys: Surveys of the unchanged target.
        combined: The verified fixes as one change, with figures before and after; None if there are none.
        absent: What could not be done, one line each.
    """

    target: str
    findings: tuple[Finding, ...]
    recompiles: tuple[Recompile, ...]
    surveys: tuple[Survey, ...]
    combined: Fix | None = None
    absent: tuple[str, ...] = ()

    @property
    def raised(self) -> tuple[str, ...]:
        """A sentence for every error that ended the tracing and that the eager model does not raise."""
        return tuple(
            f"{survey.case.kind} raises where it is compiled, which ended its tracing: {failure}"
            for survey in self.surveys
            for failure in survey.failures
        )

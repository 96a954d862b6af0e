"""What triage finds in a model, prices and mends: typed results. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchkit.results import Quantity
from compile_bench.capture.trace import Break, Recompile
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.survey_types import Kind, Survey


@dataclass(frozen=True)
class BreakCost:
    """What a break costs.

    Attributes:
        gap: Python between the graph before the break and the next one, per step; None where there is none to measure.
        share: how many breaks lie in that gap together.
        crossing: bytes of the tensors that the graph before hands over to Python.
        compile_seconds: of the functions that exist because the graph was split here.
        no_gap: why there is no gap, as a clause; empty where there is one.
    """

    gap: Quantity | None
    share: int
    crossing: int
    compile_seconds: float
    no_gap: str = ""


@dataclass(frozen=True)
class BreakCosts:
    """Prices by place (file and line), the whole model's figures, and functions given up at the recompile limit."""

    costs: dict[tuple[str, int], BreakCost]
    figures: Figures
    limits: tuple[Break, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that keeps a line out of a graph.

    Attributes:
        kind: what kind of thing.
        file: of the user's code.
        line: in it.
        end_line: last line of the statement that ``line`` is in.
        function: that the line is in.
        source: the line's text.
        category: family of reasons.
        reason: in PyTorch's words.
        explanation: the sentence behind it.
        advice: what to do, from the catalogue or PyTorch's first hint.
        case: of the catalogue, if one matches.
        kinds: ``"training"``, ``"inference"`` or both.
        seeds: that met it.
        times: how often it was met.
        library: the library's line that the user's line led to.
        user_file: whether ``file`` is the user's, so that it can be changed.
        cost: None where it was not measured.
        fix: None where nothing was tried.
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
        target: its name.
        findings: dearest first.
        recompiles: one for every place and guard.
        surveys: what the tracing processes saw.
        together: the accepted patches that hold together as one, with figures before and after; None without any.
        absent: what could not be done, one line each.
    """

    target: str
    findings: tuple[Finding, ...]
    recompiles: tuple[Recompile, ...]
    surveys: tuple[Survey, ...]
    together: Fix | None = None
    absent: tuple[str, ...] = ()

    @property
    def raised(self) -> tuple[str, ...]:
        """A sentence for every error with which tracing ended, and which the model by itself does not raise."""
        return tuple(
            f"{survey.case.kind} raises where it is compiled, which ended its tracing: {failure}"
            for survey in self.surveys
            for failure in survey.failures
        )

"""What triage finds in a model: typed results. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compile_bench.capture.trace import Recompile
from compile_bench.fixes.types import Fix
from compile_bench.measure.survey.types import BreakCost, Kind, Survey


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
        advice: What to do; empty where nothing is known to be safe.
        case: Name of the catalogue's entry that the advice is from, or that is likeliest; empty if none matches.
        kinds: ``"training"``, ``"inference"`` or both.
        seeds: Seeds that met it.
        times: How often it was met.
        library: The library's line that the user's line calls; empty if the user's line breaks itself.
        user_file: Whether ``file`` belongs to the user and can be changed.
        cost: Cost of the break; None where it was not measured.
        fix: The change that was tried last; None where none was tried.
        registry: Number in PyTorch's published list of breaks; empty where PyTorch gives none.
        hint: PyTorch's own first hint; empty where it gives none.
        others: Further advice that fits, by the entry that it is from. It counts once the first is refuted.
        follows_from: The place that this follows from, ``file.py:LINE``: without that break Dynamo would not meet it.
        attribute: The attribute whose changes this is about, as ``self.name``; empty where it is about none.
        past_limit: The functions that reached the recompile limit, with the limit; empty for any other kind.
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
    registry: str = ""
    hint: str = ""
    others: tuple[tuple[str, str], ...] = ()
    follows_from: str = ""
    attribute: str = ""
    past_limit: str = ""

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
        interrupted: Whether triage was interrupted; then this is what it had found until then.
        root: Folder that the patches are relative to; None without patches.
    """

    target: str
    findings: tuple[Finding, ...]
    recompiles: tuple[Recompile, ...]
    surveys: tuple[Survey, ...]
    combined: Fix | None = None
    absent: tuple[str, ...] = ()
    interrupted: bool = False
    root: Path | None = None

    @property
    def raised(self) -> tuple[str, ...]:
        """A sentence for every error that ended the tracing and that the eager model does not raise."""
        return tuple(
            f"{survey.case.kind} raises where it is compiled, which ended its tracing: {failure}"
            for survey in self.surveys
            for failure in survey.failures
        )

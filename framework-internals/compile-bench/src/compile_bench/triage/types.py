"""What triage finds in a model: made from surveys, completed by costs and fixes, and stored in ``results.json``.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchkit.results import Record
from benchkit.typed_records import TypedRecord
from compile_bench.capture.text import neutral, short_place
from compile_bench.capture.trace import Recompile
from compile_bench.fixes.types import Fix
from compile_bench.measure.survey.types import BreakCost, Kind, Survey


@dataclass(frozen=True)
class Finding(TypedRecord, name="finding", labels=("target", "number")):
    """One thing that keeps a line out of a graph."""

    kind: Kind
    place: str  # file.py:LINE of the user's code
    source: str  # text of the line
    category: str  # family of reasons
    reason: str  # in PyTorch's words
    case: str  # the catalogue's entry that the advice is from, or the likeliest one; empty if none matches
    advice: str  # empty where nothing is known to be safe
    kinds: tuple[str, ...]  # "training", "inference" or both
    times: int = 1  # how often it was met
    cost: BreakCost | None = None  # None where it was not measured
    fix: Fix | None = None  # the change that was tried last
    target: str = ""
    number: int = 0  # position in the report, from 1: the costliest first
    end_line: int = 0  # last line of the statement that the line is in
    library: str = ""  # the library's lines that the user's line calls; empty if the user's line breaks itself
    user_file: bool = True  # whether the file belongs to the user and can be changed
    registry: str = ""  # number in PyTorch's published list of breaks
    hint: str = ""  # PyTorch's own first hint
    others: tuple[tuple[str, str], ...] = ()  # entries and advice that count once the first advice is refuted
    follows_from: str = ""  # the place whose break leads to this one
    past_limit: str = ""  # the functions that reached the recompile limit, with the limit

    @property
    def file(self) -> str:
        """The file."""
        return self.place.rpartition(":")[0]

    @property
    def line(self) -> int:
        """The line in it."""
        return int(self.place.rpartition(":")[2])


@dataclass(frozen=True)
class TriageReport(TypedRecord, name="triage report", labels=("target",)):
    """Everything triage says about a target. Findings and the combined fix are records of their own."""

    target: str
    kinds: tuple[str, ...] = ()  # "training", "inference" or both
    trace_seconds: float = 0.0  # of the surveys' first calls
    collect_seconds: float = 0.0  # of these, the collector's
    recompiles: tuple[Recompile, ...] = ()  # one for every place and guard
    absent: tuple[str, ...] = ()  # what could not be done, one line each
    findings: tuple[Finding, ...] = ()  # the costliest first
    surveys: tuple[Survey, ...] = ()  # of the unchanged target; not stored
    combined: Fix | None = None  # the verified fixes as one change
    interrupted: bool = False  # if so, this is what was found until then
    root: Path | None = None  # folder that the patches are relative to; not stored

    @classmethod
    def of_surveys(cls, target: str, surveys: tuple[Survey, ...]) -> TriageReport:
        """A report of what was traced, without findings."""
        return cls(
            target,
            tuple(survey.case.kind for survey in surveys),
            sum(survey.trace_seconds for survey in surveys),
            sum(survey.collect_seconds for survey in surveys),
            surveys=surveys,
        )

    @property
    def raised(self) -> tuple[str, ...]:
        """A sentence for every error that ended the tracing and that the eager model does not raise."""
        return tuple(
            f"{survey.case.kind} raises where it is compiled, which ended its tracing: {failure}"
            for survey in self.surveys
            for failure in survey.failures
        )

    def records(self, root: Path) -> list[Record]:
        """One for the whole, one for every finding, one for the combined fix; files are named relative to ``root``."""
        stored = TriageReport(
            self.target,
            self.kinds,
            self.trace_seconds,
            self.collect_seconds,
            tuple(neutral(again, root) for again in self.recompiles),
            (*self.raised, *self.absent),
        )
        records = [stored.record()]
        for number, finding in enumerate(self.findings, 1):
            named = replace(neutral(finding, root), place=short_place(finding.place, root), source=finding.source)
            fix = None if finding.fix is None else replace(neutral(finding.fix, root), patch=finding.fix.patch)
            records.append(replace(named, target=self.target, number=number, fix=fix).record())
        if self.combined is not None:
            records.append(replace(self.combined, target=self.target).record())
        return records

"""A triage report as records of ``results.json``. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchkit.results import Quantity, Record
from benchkit.typed_records import TypedRecord
from compile_bench.capture.trace import Recompile
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.serialize import neutral, shorten
from compile_bench.measure.survey.types import BreakCost, Kind
from compile_bench.triage.advice import recompile_advice
from compile_bench.triage.types import Finding, TriageReport


@dataclass(frozen=True)
class FailedGuard:
    """A guard that failed, so that a function was compiled again.

    Attributes:
        file: File of the line that made the guard.
        line: That line.
        guard: The guard in PyTorch's words.
        source: The code behind the guard, where PyTorch prints it.
        called_from: The user's line that calls a library's function; empty where the function is the user's.
        package: The installed package that has the line; empty where it is the user's.
        advice: What to do; empty where nothing is known to be safe, None in records before the code's use decided.
    """

    file: str
    line: int
    guard: str
    source: str = ""
    called_from: str = ""
    package: str = ""
    advice: str | None = None


@dataclass(frozen=True)
class TriageSummary(TypedRecord, name="triage report", labels=("target",)):
    """What triage did with a target.

    Attributes:
        target: Name of the target.
        kinds: ``"training"``, ``"inference"`` or both.
        trace_seconds: Time of the surveys' first calls.
        collect_seconds: Time of these that the collector took.
        recompiles: One for every place and guard.
        absent: What could not be done, one line each.
    """

    target: str
    kinds: tuple[str, ...]
    trace_seconds: float
    collect_seconds: float
    recompiles: tuple[FailedGuard, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class TriedFix:
    """The change that was tried last for a finding; the fields are those of :class:`compile_bench.fixes.types.Fix`."""

    title: str
    verdict: str
    accepted: bool = False
    effect: str = ""
    conflict: str = ""
    patch: str = ""
    before: Figures | None = None
    after: Figures | None = None


@dataclass(frozen=True)
class FindingRecord(TypedRecord, name="finding", labels=("target", "number")):
    """A finding; the fields are those of :class:`compile_bench.triage.types.Finding`.

    Attributes:
        number: Position in the report, from 1: the costliest first.
        place: ``file.py:LINE``.
    """

    target: str
    number: int
    kind: Kind
    place: str
    source: str
    category: str
    reason: str
    case: str
    advice: str
    kinds: tuple[str, ...]
    times: int
    cost: BreakCost | None = None
    fix: TriedFix | None = None


@dataclass(frozen=True)
class CombinedFix(TypedRecord, name="combined fix", labels=("target",)):
    """The verified fixes as one change.

    Attributes:
        target: Name of the target.
        cases: Names of the catalogue's entries.
        title: Which fixes it combines.
        effect: What the user has to expect of the changed model.
        before: The unchanged model.
        after: The model with the combined fix.
        speedup: Step before over step after; None in records before it was paired.
        control: The step before over itself, in the same rounds.
        pressure: Percent of the time in which some task waited for a CPU core; None if not known.
    """

    target: str
    cases: str
    title: str
    effect: str
    before: Figures
    after: Figures
    speedup: Quantity | None = None
    control: Quantity | None = None
    pressure: float | None = None


def triage_report_records(report: TriageReport, root: Path) -> list[Record]:
    """One record for the whole, one for every finding, and one for the combined fix.

    Args:
        report: What triage found.
        root: Files below it are named relative to it, others by their last part.
    """
    summary = TriageSummary(
        report.target,
        tuple(survey.case.kind for survey in report.surveys),
        sum(survey.trace_seconds for survey in report.surveys),
        sum(survey.collect_seconds for survey in report.surveys),
        tuple(_failed_guard(each, root) for each in report.recompiles),
        (*report.raised, *report.absent),
    )
    findings = [_finding_record(each, index, report.target, root) for index, each in enumerate(report.findings, 1)]
    records = [summary.record(), *(each.record() for each in findings)]
    fix = report.combined
    if fix is not None:
        assert fix.before is not None
        assert fix.after is not None
        combined = CombinedFix(
            report.target,
            fix.case,
            fix.title,
            fix.effect,
            fix.before,
            fix.after,
            fix.speedup,
            fix.control,
            fix.pressure,
        )
        records.append(combined.record())
    return records


def _failed_guard(each: Recompile, root: Path) -> FailedGuard:
    guard, source, called_from = (neutral(text, root) for text in (each.guard, each.source, each.called_from))
    return FailedGuard(
        shorten(each.file, root), each.line, guard, source, called_from, each.package, recompile_advice(each)
    )


def _finding_record(finding: Finding, number: int, target: str, root: Path) -> FindingRecord:
    return FindingRecord(
        target=target,
        number=number,
        kind=finding.kind,
        place=f"{shorten(finding.file, root)}:{finding.line}",
        source=finding.source,
        category=finding.category,
        reason=neutral(finding.reason, root),
        case=finding.case,
        advice=finding.advice,
        kinds=finding.kinds,
        times=finding.times,
        cost=finding.cost,
        fix=None if finding.fix is None else _tried_fix(finding.fix, root),
    )


def _tried_fix(fix: Fix, root: Path) -> TriedFix:
    return TriedFix(
        title=fix.title,
        verdict=neutral(fix.verdict, root),
        accepted=fix.accepted,
        effect=fix.effect,
        conflict=neutral(fix.conflict, root),
        patch=fix.patch,
        before=fix.before,
        after=fix.after,
    )

"""Triage from end to end: survey a target, measure what its graph breaks cost, and try to fix them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchkit import UserError
from benchkit.processes import ChildFailure, deferred_module
from compile_bench.capture.trace import Recompile
from compile_bench.fixes.fixer import Fixer, FixResults, patch_root
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.harness import Harness
from compile_bench.measure.survey.types import Survey, place_of
from compile_bench.targets.case import Case
from compile_bench.triage.findings import finding_of_break, finding_of_silent, findings_of
from compile_bench.triage.types import BreakCosts, Finding, TriageReport

if TYPE_CHECKING:
    from compile_bench.measure.survey import run as survey_jobs
    from compile_bench.triage import break_cost, cuda_graphs
else:
    survey_jobs = deferred_module("compile_bench.measure.survey.run")
    break_cost = deferred_module("compile_bench.triage.break_cost")
    cuda_graphs = deferred_module("compile_bench.triage.cuda_graphs")

Result = TypeVar("Result")


def run_triage(
    harness: Harness,
    case: Case,
    *,
    kinds: Sequence[bool] = (True, False),
    cost: bool = True,
    fix: bool = True,
    root: Path | None = None,
) -> TriageReport:
    """Find what keeps a target out of graphs, measure what it costs, and fix what can be fixed.

    Args:
        harness: Runs every survey and every measurement in a fresh process.
        case: The target; its ``train`` does not matter.
        kinds: Training (True), inference (False) or both.
        cost: Whether to compile with Inductor and measure what the breaks cost.
        fix: Whether to try changes of the source.
        root: Folder that patches are relative to; by default the working directory, or the sources' own folder.

    Raises:
        UserError: If the target is at fault in every kind of step.
        ChildFailure: If no kind of step could be traced.
    """
    absent: list[str] = []
    surveys = _surveys(harness, case, kinds, absent)
    findings = findings_of(surveys)
    traced = [survey for survey in surveys if not survey.failures] or surveys
    main = traced[0].case
    if case.device == "cuda":
        lost = _attempted(lambda: harness.ask(cuda_graphs.reasons_without_cuda_graphs, main), "CUDA graphs", absent)
        findings += [finding_of_silent(each, surveys[0]) for each in lost or ()]
    costs = _attempted(lambda: harness.ask(break_cost.cost, main), "break costs", absent) if cost else None
    if costs is not None:
        findings = _with_costs(findings, costs, traced[0])
    findings.sort(key=_costliest_first)
    combined: Fix | None = None
    if fix and findings:
        places = tuple(dict.fromkeys((each.file, each.line) for each in findings if each.user_file))
        fixer = Fixer(harness, main, traced, root or patch_root([file for file, _ in places], Path.cwd()))
        results = _attempted(lambda: fixer.fix(places), "fixes", absent)
        if results is not None:
            findings = _with_fixes(findings, results, traced[0])
            combined = results.combined
            if combined is not None and costs is not None:
                measure = partial(harness.ask, break_cost.cost, main, overlay=results.overlay)
                after = _attempted(measure, "the fixed model's step", absent)
                combined = combined if after is None else _measured(combined, costs.figures, after.figures)
    return TriageReport(case.target, tuple(findings), _recompiles(surveys), tuple(surveys), combined, tuple(absent))


def _surveys(harness: Harness, case: Case, kinds: Sequence[bool], absent: list[str]) -> list[Survey]:
    """A survey of every kind of step that can be traced."""
    calls = [partial(harness.trace, survey_jobs.survey, replace(case, train=train)) for train in kinds]
    surveys: list[Survey] = []
    failure: ChildFailure | UserError | None = None
    for found in harness.ask_all(calls):
        if isinstance(found, (ChildFailure, UserError)):
            failure = found
            absent.append(str(found))
        else:
            surveys.append(found)
    if not surveys:
        assert failure is not None
        raise failure
    for survey in surveys:
        absent += [f"{survey.case.kind}: {each}" for each in survey.notes]
    return surveys


def _attempted(action: Callable[[], Result], what: str, absent: list[str]) -> Result | None:
    """The result of an action, or None if it fails. A failure is added to ``absent``; the triage continues."""
    try:
        return action()
    except (ChildFailure, UserError) as error:
        absent.append(f"{what}: {error}")
        return None


def _with_costs(findings: Sequence[Finding], costs: BreakCosts, survey: Survey) -> list[Finding]:
    """The findings with their costs, and functions that reach the recompile limit after more calls than a survey's."""
    known = {(each.file, each.line) for each in findings if each.kind == "recompile limit"}
    late = [finding_of_break(each, (), survey) for each in costs.limits if place_of(each) not in known]
    return [replace(each, cost=costs.costs.get((each.file, each.line))) for each in (*findings, *late)]


def _with_fixes(findings: Sequence[Finding], results: FixResults, survey: Survey) -> list[Finding]:
    """The findings with their fixes, and the breaks that the fixes brought to light."""
    revealed = [finding_of_break(each, (0,), survey) for each in results.revealed]
    return [replace(each, fix=results.fixes.get((each.file, each.line))) for each in (*findings, *revealed)]


def _measured(combined: Fix, before: Figures, after: Figures) -> Fix:
    """The combined fix with measured steps; its number of breaks still includes those behind skipped frames."""
    assert combined.before is not None
    assert combined.after is not None
    return replace(
        combined,
        before=replace(before, breaks=combined.before.breaks),
        after=replace(after, breaks=combined.after.breaks),
    )


def _recompiles(surveys: Sequence[Survey]) -> tuple[Recompile, ...]:
    """The first recompilation for every place and cause."""
    found: dict[tuple[str, int, str, str], Recompile] = {}
    for survey in surveys:
        for each in survey.recompiles:
            found.setdefault((each.file, each.line, each.cause, each.called_from), each)
    return tuple(found.values())


def _costliest_first(finding: Finding) -> tuple[float, float, str, int]:
    cost = finding.cost
    time_lost = cost.time_lost.value if cost is not None and cost.time_lost is not None else 0.0
    return -time_lost, -(cost.compile_seconds if cost is not None else 0.0), finding.file, finding.line

"""Triage from end to end: survey a target, price what is found, mend what can be mended."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchkit import UserError
from benchkit.processes import ChildFailure
from compile_bench.capture.reasons import RECOMPILE_LIMIT
from compile_bench.capture.trace import Break, Recompile
from compile_bench.catalogue import CAUSES, Cause, match, match_limit
from compile_bench.fixes.fixer import Fixer, patch_root
from compile_bench.fixes.source import Source, head_end
from compile_bench.fixes.types import Figures, Fix
from compile_bench.measure.harness import Harness
from compile_bench.measure.survey_types import Kind, SilentEager, Survey
from compile_bench.targets.case import Case
from compile_bench.triage.types import Finding, TriageReport

Result = TypeVar("Result")

# What PyTorch says for itself: what fails eagerly is no target, its rules and issues are not the user's to write, and
# the value that Dynamo cannot make anew is seldom one that is returned.
_NO_ADVICE = re.compile(
    "Your code may result in an error when running in eager|It may be possible to write Dynamo tracing rules"
    "|[Rr]eport an issue|file an issue|If Dynamo is attempting to trace a return statement"
)


def run_triage(
    harness: Harness,
    case: Case,
    *,
    kinds: Sequence[bool] = (True, False),
    cost: bool = True,
    fix: bool = True,
    root: Path | None = None,
) -> TriageReport:
    """Find, price and mend what keeps a target out of graphs.

    Args:
        harness: runs every step of it in a fresh process.
        case: the target; its ``train`` does not matter.
        kinds: training (True), inference (False) or both.
        cost: compile with Inductor and measure.
        fix: try changes of the source.
        root: folder that patches are relative to; by default the working directory, or the sources' own.

    Raises:
        UserError: if the target is at fault in every kind of step.
        ChildFailure: if no kind of step could be traced.
    """
    from compile_bench.measure.survey import lost_graphs
    from compile_bench.triage import break_cost

    absent: list[str] = []
    surveys = _surveys(harness, case, kinds, absent)
    findings = _findings(surveys)
    sound = [survey for survey in surveys if not survey.failures] or surveys
    main = sound[0].case
    if case.device == "cuda":
        lost = _attempted(lambda: harness.ask(lost_graphs, main), "CUDA graphs", absent)
        findings += [_of_silent(each, surveys[0]) for each in lost or ()]
    costed = _attempted(lambda: harness.ask(break_cost.cost, main), "prices", absent) if cost else None
    if costed is not None:
        findings = _with_limits(findings, costed.limits, sound[0])
        findings = [replace(each, cost=costed.costs.get((each.file, each.line))) for each in findings]
    findings.sort(key=_costliest_first)
    together: Fix | None = None
    if fix and findings:
        root = root or patch_root([each.file for each in findings if each.user_file], Path.cwd())
        fixer = Fixer(harness, main, sound, root)
        places = tuple(dict.fromkeys((each.file, each.line) for each in findings if each.user_file))
        fix_results = _attempted(lambda: fixer.fix(places), "mends", absent)
        if fix_results is not None:
            findings = [replace(each, fix=fix_results.fixes.get((each.file, each.line))) for each in findings]
            together = fix_results.together
        if fix_results is not None and together is not None and costed is not None:
            overlay = fix_results.overlay
            after = _attempted(
                lambda: harness.ask(break_cost.cost, main, overlay=overlay), "the mended model's step", absent
            )
            if after is not None:
                together = _measured(together, costed.figures, after.figures)
    return TriageReport(case.target, tuple(findings), _recompiles(surveys), tuple(surveys), together, tuple(absent))


def _measured(together: Fix, before: Figures, after: Figures) -> Fix:
    """With what a step takes; the breaks stay those that were counted, behind functions that were given up too."""
    assert together.before is not None
    assert together.after is not None
    return replace(
        together,
        before=replace(before, breaks=together.before.breaks),
        after=replace(after, breaks=together.after.breaks),
    )


def _surveys(harness: Harness, case: Case, kinds: Sequence[bool], absent: list[str]) -> list[Survey]:
    from compile_bench.measure import survey as jobs

    calls = [partial(harness.trace, jobs.survey, replace(case, train=train)) for train in kinds]
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
    """Do something that may fail without taking what there is with it."""
    try:
        return action()
    except (ChildFailure, UserError) as error:
        absent.append(f"{what}: {error}")
        return None


def _findings(surveys: Sequence[Survey]) -> list[Finding]:
    """One finding for every place and reason, over training and inference."""
    found: dict[tuple[str, int, str, str], Finding] = {}
    for survey in surveys:
        for each, seeds in zip(survey.breaks, survey.seeds, strict=True):
            _add(found, _of_break(each, seeds, survey))
        for silent in survey.eager:
            _add(found, _of_silent(silent, survey))
    return list(found.values())


def _with_limits(findings: Sequence[Finding], limits: Sequence[Break], survey: Survey) -> list[Finding]:
    """Also the functions that are given up only after more calls than a survey makes."""
    known = {(each.file, each.line) for each in findings if each.kind == "recompile limit"}
    new = [each for each in limits if (each.file, each.line) not in known]
    return [*findings, *(_of_break(each, (), survey) for each in new)]


def _add(found: dict[tuple[str, int, str, str], Finding], new: Finding) -> None:
    key = (new.file, new.line, new.reason, new.library)
    before = found.get(key)
    if before is None:
        found[key] = new
        return
    seeds = tuple(sorted(set(before.seeds) | set(new.seeds)))
    found[key] = replace(before, kinds=before.kinds + new.kinds, seeds=seeds, times=before.times + new.times)


def _of_break(each: Break, seeds: tuple[int, ...], survey: Survey) -> Finding:
    source, end, consequence = _statement(each.file, each.line)
    if each.library:  # advice is about the line that breaks
        inner = each.stack[-1]
        there, _, consequence = _statement(inner.file, inner.line)
        cause = _cause(replace(each, columns=None), there or inner.source, consequence)
    else:
        cause = _cause(each, source or each.source, consequence)
    return Finding(
        kind=_kind(each),
        file=each.file,
        line=each.line,
        end_line=end,
        function=each.function,
        source=each.source or source,
        category=each.category,
        reason=each.reason,
        explanation=each.explanation,
        advice=cause.advice if cause is not None else _hint(each.hints),
        case=cause.name if cause is not None else "",
        kinds=(survey.case.kind,),
        seeds=seeds,
        times=each.times,
        library=each.library,
        user_file=each.file in survey.user_files,
    )


def _cause(each: Break, line: str, consequence: str) -> Cause | None:
    """The entry of the catalogue that a break is an instance of."""
    if each.category == RECOMPILE_LIMIT:
        return match_limit(line)
    return match(each.reason, f"{line} {consequence}".strip(), each.columns)


def _hint(hints: Sequence[str]) -> str:
    """PyTorch's first that says what to do; empty if none does."""
    return next((each for each in hints if not _NO_ADVICE.search(each)), "")


def _kind(each: Break) -> Kind:
    if each.category == RECOMPILE_LIMIT:
        return "recompile limit"
    if each.category == "compile error":
        return "compile error"
    return "function given up" if each.whole_frame else "graph break"


_SILENT_CASES: dict[Kind, str] = {"silent eager": "empty-first-call", "method not compiled": "other-method"}
_GRAPH_ADVICE = (
    "A CUDA graph replays the same kernels on the same memory: keep its inputs on the GPU and unmutated, and outside "
    "what needs the CPU."
)


def _of_silent(each: SilentEager, survey: Survey) -> Finding:
    source, end, _ = _statement(each.frame.file, each.frame.line)
    case = _SILENT_CASES.get(each.kind, "")
    return Finding(
        kind=each.kind,
        file=each.frame.file,
        line=each.frame.line,
        end_line=end,
        function=each.function,
        source=source,
        category="silent eager" if case else "CUDA graph",
        reason=each.reason,
        explanation="",
        advice=CAUSES[case].advice if case else _GRAPH_ADVICE,
        case=case,
        kinds=(survey.case.kind,),
        seeds=(),
        times=1,
    )


def _statement(file: str, line: int) -> tuple[str, int, str]:
    """The text of a line, the last line of its statement, and the first thing that an ``if`` there decides about.

    Whether an ``if`` is there to raise shows in that.
    """
    try:
        source = Source.read(Path(file))
    except (OSError, SyntaxError):
        return "", line, ""
    statement = source.statement(line)
    consequence = source.line(statement.body[0].lineno).strip() if isinstance(statement, ast.If) else ""
    return source.line(line).strip(), line if statement is None else head_end(statement), consequence


def _recompiles(surveys: Sequence[Survey]) -> tuple[Recompile, ...]:
    found: dict[tuple[str, int, str, str], Recompile] = {}
    for survey in surveys:
        for each in survey.recompiles:
            found.setdefault((each.file, each.line, each.cause, each.called_from), each)
    return tuple(found.values())


def _costliest_first(finding: Finding) -> tuple[float, float, str, int]:
    cost = finding.cost
    gap = cost.gap.value if cost is not None and cost.gap is not None else 0.0
    return -gap, -(cost.compile_seconds if cost is not None else 0.0), finding.file, finding.line

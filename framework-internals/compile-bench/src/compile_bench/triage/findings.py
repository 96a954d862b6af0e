"""Turns surveys into findings: one for every place and reason, with the catalogue's advice."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compile_bench.capture.reasons import RECOMPILE_LIMIT
from compile_bench.capture.silent_eager import SilentEager
from compile_bench.capture.trace import Break
from compile_bench.catalogue import CAUSES, Cause, match, match_limit
from compile_bench.fixes.source import Source, head_end
from compile_bench.measure.survey.types import Kind, Survey
from compile_bench.triage.types import Finding

# Hints of PyTorch that are no advice here. A model that fails eagerly is no target. A user does not write Dynamo's
# rules or file its issues. The value that Dynamo cannot reconstruct is seldom the returned one.
_NO_ADVICE = re.compile(
    "Your code may result in an error when running in eager|It may be possible to write Dynamo tracing rules"
    "|[Rr]eport an issue|file an issue|If Dynamo is attempting to trace a return statement"
)

_SILENT_CASES: dict[Kind, str] = {"silent eager": "empty-first-call", "method not compiled": "other-method"}

_GRAPH_ADVICE = (
    "A CUDA graph replays the same kernels on the same memory: keep its inputs on the GPU and unmutated, and move what "
    "needs the CPU out of it."
)


def findings_of(surveys: Sequence[Survey]) -> list[Finding]:
    """One finding for every place and reason, over training and inference."""
    found: dict[tuple[str, int, str, str], Finding] = {}
    for survey in surveys:
        new = [finding_of_break(each, seeds, survey) for each, seeds in zip(survey.breaks, survey.seeds, strict=True)]
        new += [finding_of_silent(each, survey) for each in survey.eager]
        for each in new:
            key = (each.file, each.line, each.reason, each.library)
            found[key] = each if key not in found else _merged(found[key], each)
    return list(found.values())


def finding_of_break(each: Break, seeds: tuple[int, ...], survey: Survey) -> Finding:
    """The finding of a graph break.

    Args:
        each: The break.
        seeds: Seeds that met it.
        survey: The survey that it belongs to.
    """
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


def finding_of_silent(each: SilentEager, survey: Survey) -> Finding:
    """The finding of a function that runs eagerly without a message."""
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


def _merged(first: Finding, second: Finding) -> Finding:
    """The same finding of two surveys."""
    seeds = tuple(sorted(set(first.seeds) | set(second.seeds)))
    return replace(first, kinds=first.kinds + second.kinds, seeds=seeds, times=first.times + second.times)


def _cause(each: Break, line: str, consequence: str) -> Cause | None:
    """The catalogue's entry for a break."""
    if each.category == RECOMPILE_LIMIT:
        return match_limit(line)
    return match(each.reason, f"{line} {consequence}".strip(), each.columns)


def _hint(hints: Sequence[str]) -> str:
    """PyTorch's first hint that is advice; empty if there is none."""
    return next((each for each in hints if not _NO_ADVICE.search(each)), "")


def _kind(each: Break) -> Kind:
    if each.category == RECOMPILE_LIMIT:
        return "recompile limit"
    if each.category == "compile error":
        return "compile error"
    return "skipped frame" if each.whole_frame else "graph break"


def _statement(file: str, line: int) -> tuple[str, int, str]:
    """Text of a line, last line of its statement, and the first line of the body if the statement is an ``if``.

    The body tells whether the ``if`` only raises an error.
    """
    try:
        source = Source.read(Path(file))
    except (OSError, SyntaxError):
        return "", line, ""
    statement = source.statement(line)
    consequence = source.line(statement.body[0].lineno).strip() if isinstance(statement, ast.If) else ""
    return source.line(line).strip(), line if statement is None else head_end(statement), consequence

"""Turns surveys into findings: one for every place and reason, with the advice that fits the code's use."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from compile_bench.capture.frames import Frame
from compile_bench.capture.reasons import ITERATOR_IN_USE, RECOMPILE_LIMIT
from compile_bench.capture.silent_eager import SilentEager
from compile_bench.capture.text import distinct
from compile_bench.capture.trace import Break
from compile_bench.catalogue import CAUSES, Advised, Cause, advise, match
from compile_bench.catalogue.syntax import head_end
from compile_bench.catalogue.use import Use
from compile_bench.measure.serialize import no_longer_compiled
from compile_bench.measure.survey.types import Kind, Survey
from compile_bench.triage.advice import advice_on_break, cause_of_separate, guarded_attribute, read
from compile_bench.triage.library_breaks import advice_to_the_caller
from compile_bench.triage.types import Finding

# Hints of PyTorch that are no advice here. A model that fails eagerly is no target. A user does not write Dynamo's
# rules or file its issues. The value that Dynamo cannot reconstruct is seldom the returned one.
_NO_ADVICE = re.compile(
    "Your code may result in an error when running in eager|It may be possible to write Dynamo tracing rules"
    "|[Rr]eport an issue|file an issue|If Dynamo is attempting to trace a return statement"
    "|^If it is a |^Avoid calling (the function )?`<|custom_ops_landing_page|^Do not trace code"
)

_SILENT_CASES: dict[Kind, str] = {"silent eager": "empty-first-call", "method not compiled": "other-method"}

# A comprehension that Dynamo compiles by itself takes its iterator as an argument; inside the caller's graph there is
# no such argument.
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

_GRAPH_ADVICE = (
    "A CUDA graph replays the same kernels on the same memory: keep its inputs on the GPU and unmutated, and move what "
    "needs the CPU out of it."
)


def findings_of(surveys: Sequence[Survey]) -> list[Finding]:
    """One finding for every place and reason, over training and inference."""
    found: dict[tuple[str, int, str], Finding] = {}
    breaks = [each for survey in surveys for each in survey.breaks]
    for survey in surveys:
        new = [
            finding_of_break(each, seeds, survey, breaks)
            for each, seeds in zip(survey.breaks, survey.seeds, strict=True)
        ]
        new += [finding_of_silent(each, survey) for each in survey.eager]
        for each in new:
            key = (each.file, each.line, each.reason)
            found[key] = each if key not in found else _merged(found[key], each)
    return list(found.values())


def finding_of_break(each: Break, seeds: tuple[int, ...], survey: Survey, breaks: Sequence[Break]) -> Finding:
    """The finding of a graph break.

    Args:
        each: The break.
        seeds: Seeds that met it.
        survey: The survey that it belongs to.
        breaks: All breaks of the target.
    """
    source, code, end, consequence = _statement(each.file, each.line)
    own = each.file in survey.user_files and not each.library
    causes = _causes(each, code or each.source, consequence) if own else []
    advice = (
        advice_on_break(causes, each, survey.recompiles, static_shapes=survey.case.dynamic is False)
        if own
        else [Advised("", text)]
        if (text := advice_to_the_caller(each, breaks, survey.recompiles))
        else []
    )
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
        advice=advice[0].text if advice else "",
        case=advice[0].case if advice else causes[0].name if causes else "",
        kinds=(survey.case.kind,),
        seeds=seeds,
        times=each.times,
        library=each.library,
        user_file=each.file in survey.user_files,
        registry=each.registry,
        hint=_hint(each.hints) if own else "",
        others=tuple((other.case, other.text) for other in advice[1:]),
        follows_from=_follows_from(each, breaks),
        attribute=_attribute(each, survey),
        past_limit=no_longer_compiled(each, _qualified),
    )


def without_refuted(finding: Finding, refuted: Collection[str]) -> Finding:
    """A finding without the advice that triage has tried and refuted.

    Args:
        finding: The finding.
        refuted: Entries of the catalogue whose change was refused at the finding's place.
    """
    if finding.case not in refuted or not finding.advice:
        return finding
    case, text = next((other for other in finding.others if other[0] not in refuted), (finding.case, ""))
    return replace(finding, case=case, advice=text)


def _follows_from(each: Break, breaks: Sequence[Break]) -> str:
    """The place of the break that this one is a consequence of; empty if that is not known."""
    caller = each.called_at
    if caller is None or not each.reason.startswith(ITERATOR_IN_USE) or each.function not in _COMPREHENSIONS:
        return ""
    others = [other for other in breaks if other.identity != each.identity and not other.reason.startswith(each.reason)]
    cause = cause_of_separate(caller, others)
    return "" if cause is None else cause.place


def _attribute(each: Break, survey: Survey) -> str:
    if each.category != RECOMPILE_LIMIT:
        return ""
    guards = [guard for guard in survey.recompiles if (guard.file, guard.line) == (each.file, each.line)]
    return guarded_attribute(guards[-1]) if guards else ""


def _qualified(function: Frame) -> str:
    source = read(function.file)
    owner = None if source is None else Use(source, function.line).owner
    return function.function if owner is None else f"{owner.name}.{function.function}"


def finding_of_silent(each: SilentEager, survey: Survey) -> Finding:
    """The finding of a function that runs eagerly without a message."""
    source, _, end, _ = _statement(each.frame.file, each.frame.line)
    case = _SILENT_CASES.get(each.kind, "")
    code = read(each.frame.file)
    use = None if code is None else Use(code, each.frame.line)
    advice = advise([CAUSES[case]], use) if case else [Advised("", _GRAPH_ADVICE)]
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
        advice=advice[0].text if advice else "",
        case=case,
        kinds=(survey.case.kind,),
        seeds=(),
        times=1,
    )


def _merged(first: Finding, second: Finding) -> Finding:
    """The same finding of two surveys, or at two lines of a library that one line calls."""
    seeds = tuple(sorted(set(first.seeds) | set(second.seeds)))
    kinds = tuple(dict.fromkeys(first.kinds + second.kinds))
    called = first.library.split(", ") + second.library.split(", ")
    library = distinct(called)
    return replace(first, kinds=kinds, seeds=seeds, times=first.times + second.times, library=library)


def _causes(each: Break, line: str, consequence: str) -> list[Cause]:
    """The catalogue's entries for a break, the likeliest first."""
    if each.category == RECOMPILE_LIMIT:
        return [CAUSES["recompile-limit-reached"]]
    if consequence in ("break", "continue") and line.startswith(("if", "elif")):
        return [CAUSES["loop-until-value"]] if each.category == "data-dependent control flow" else []
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


def _statement(file: str, line: int) -> tuple[str, str, int, str]:
    """Text of a line, its code alone, the last line of its statement, and the first line of the body of an ``if``.

    The body tells whether the ``if`` only raises an error.
    """
    source = read(file)
    if source is None:
        return "", "", line, ""
    statement = source.statement(line)
    consequence = ""
    if isinstance(statement, ast.If):
        last = statement.body[-1]  # how an ``if`` leaves a loop
        consequence = source.code((last if isinstance(last, (ast.Break, ast.Continue)) else statement.body[0]).lineno)
        consequence = consequence.strip()
    end = line if statement is None else head_end(statement)
    return source.line(line).strip(), source.code(line).strip(), end, consequence

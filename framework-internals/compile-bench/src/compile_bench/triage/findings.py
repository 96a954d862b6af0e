"""What triage finds in a model: one finding for every place and reason, with the advice that fits the code's use.

Made from surveys, completed by costs and fixes, and stored in ``results.json``. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchkit.results import Record
from benchkit.typed_records import TypedRecord
from compile_bench.capture.frames import Frame
from compile_bench.capture.text import distinct, neutral, no_longer_compiled, short_place
from compile_bench.capture.trace import Break, Recompile, SilentEager
from compile_bench.capture.wording import ITERATOR_IN_USE, RECOMPILE_LIMIT
from compile_bench.catalogue import CAUSES, Advised, Cause, advise, match
from compile_bench.catalogue.source import head_end
from compile_bench.catalogue.use import Use
from compile_bench.fixes.types import Fix
from compile_bench.measure.survey.types import BreakCost, Kind, Survey
from compile_bench.triage.advice import advice_on_break, advice_to_the_caller, cause_of_separate, read


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
    merged: dict[tuple[str, str], Finding] = {}
    breaks = [met for survey in surveys for met in survey.breaks]
    for survey in surveys:
        new = [finding_of_break(met, survey, breaks) for met in survey.breaks]
        new += [finding_of_silent(silent, survey) for silent in survey.eager]
        for finding in new:
            key = (finding.place, finding.reason)
            merged[key] = _merged(merged[key], finding) if key in merged else finding
    return list(merged.values())


def finding_of_break(met: Break, survey: Survey, breaks: Sequence[Break]) -> Finding:
    """The finding of a graph break of a survey; ``breaks`` are all of the target."""
    code = _Statement.at(met.file, met.line)
    own = met.file in survey.user_files and not met.library
    causes = _causes(met, code) if own else []
    if own:
        advice = advice_on_break(causes, met, survey.recompiles, static_shapes=survey.case.dynamic is False)
    else:
        text = advice_to_the_caller(met, breaks, survey.recompiles)
        advice = [Advised("", text)] if text else []
    return Finding(
        kind=_kind(met),
        place=met.place,
        source=met.source or code.source,
        category=met.category,
        reason=met.reason,
        case=advice[0].case if advice else causes[0].name if causes else "",
        advice=advice[0].text if advice else "",
        kinds=(survey.case.kind,),
        times=met.times,
        end_line=code.end_line,
        library=met.library,
        user_file=met.file in survey.user_files,
        registry=met.registry,
        hint=_hint(met.hints) if own else "",
        others=tuple((other.case, other.text) for other in advice[1:]),
        follows_from=_follows_from(met, breaks),
        past_limit=no_longer_compiled(met, _qualified),
    )


def without_refuted(finding: Finding, refuted: Collection[str]) -> Finding:
    """A finding without the advice whose change, by the catalogue's entry, triage has tried and refused there."""
    if finding.case not in refuted or not finding.advice:
        return finding
    case, text = next((other for other in finding.others if other[0] not in refuted), (finding.case, ""))
    return replace(finding, case=case, advice=text)


def _follows_from(met: Break, breaks: Sequence[Break]) -> str:
    """The place of the break that this one is a consequence of; empty if that is not known."""
    caller = met.called_at
    if caller is None or not met.reason.startswith(ITERATOR_IN_USE) or met.function not in _COMPREHENSIONS:
        return ""
    others = [other for other in breaks if other.identity != met.identity and not other.reason.startswith(met.reason)]
    cause = cause_of_separate(caller, others)
    return "" if cause is None else cause.place


def _qualified(function: Frame) -> str:
    source = read(function.file)
    owner = None if source is None else Use(source, function.line).owner
    return function.function if owner is None else f"{owner.name}.{function.function}"


def finding_of_silent(silent: SilentEager, survey: Survey) -> Finding:
    """The finding of a function that runs eagerly without a message."""
    frame = silent.frame
    code = _Statement.at(frame.file, frame.line)
    case = _SILENT_CASES.get(silent.kind, "")
    source = read(frame.file)
    use = None if source is None else Use(source, frame.line)
    advice = advise([CAUSES[case]], use) if case else [Advised("", _GRAPH_ADVICE)]
    return Finding(
        kind=silent.kind,
        place=frame.place,
        source=code.source,
        category="silent eager" if case else "CUDA graph",
        reason=silent.reason,
        case=case,
        advice=advice[0].text if advice else "",
        kinds=(survey.case.kind,),
        end_line=code.end_line,
    )


def _merged(first: Finding, second: Finding) -> Finding:
    """The same finding of two surveys, or at two lines of a library that one line calls."""
    kinds = tuple(dict.fromkeys(first.kinds + second.kinds))
    library = distinct(first.library.split(", ") + second.library.split(", "))
    return replace(first, kinds=kinds, times=first.times + second.times, library=library)


def _causes(met: Break, code: _Statement) -> list[Cause]:
    """The catalogue's entries for a break, the likeliest first."""
    if met.category == RECOMPILE_LIMIT:
        return [CAUSES["recompile-limit-reached"]]
    line = code.code or met.source
    if code.consequence in ("break", "continue") and line.startswith(("if", "elif")):
        return [CAUSES["loop-until-value"]] if met.category == "data-dependent control flow" else []
    return match(met.reason, f"{line} {code.consequence}".strip(), met.columns)


def _hint(hints: Sequence[str]) -> str:
    """PyTorch's first hint that is advice; empty if there is none."""
    return next((hint for hint in hints if not _NO_ADVICE.search(hint)), "")


def _kind(met: Break) -> Kind:
    if met.category == RECOMPILE_LIMIT:
        return "recompile limit"
    if met.category == "compile error":
        return "compile error"
    return "skipped frame" if met.whole_frame else "graph break"


@dataclass(frozen=True)
class _Statement:
    """A line of a file and the statement that it is in."""

    end_line: int
    source: str = ""
    code: str = ""  # the line without comments and texts
    consequence: str = ""  # first line of the body of an ``if``, which tells whether it only raises; or how it leaves

    @classmethod
    def at(cls, file: str, line: int) -> _Statement:
        source = read(file)
        if source is None:
            return cls(line)
        statement = source.statement(line)
        consequence = ""
        if isinstance(statement, ast.If):
            last = statement.body[-1]  # how an ``if`` leaves a loop
            decisive = last if isinstance(last, (ast.Break, ast.Continue)) else statement.body[0]
            consequence = source.code(decisive.lineno).strip()
        end = line if statement is None else head_end(statement)
        return cls(end, source.line(line).strip(), source.code(line).strip(), consequence)

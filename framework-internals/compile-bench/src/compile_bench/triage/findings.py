"""What triage finds in a model: one finding for every place and reason, with the advice that fits the code's use.

Advice depends on how the code uses what broke or what a guard checked. Findings are made from surveys, completed by
costs and fixes, and stored in ``results.json``. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchkit.results import Record
from benchkit.typed_records import TypedRecord
from compile_bench.capture.frames import RESUMED, Frame
from compile_bench.capture.text import distinct, neutral, no_longer_compiled, plural, short_place, shorten
from compile_bench.capture.trace import ITERATOR_IN_USE, RECOMPILE_LIMIT, Break, Recompile, SilentEager, cause_of
from compile_bench.catalogue import CAUSES, Advised, Cause, advise, match, match_recompile
from compile_bench.catalogue.source import Source, head_end
from compile_bench.catalogue.use import Use, first_line, guarded_value, name_of
from compile_bench.fixes.types import Fix
from compile_bench.measure.records import BreakCost, Kind, Survey

_LOGGING = ("logger.", "logging.", "log.", "warnings.")
_PYTHONS_OWN = re.compile(r"python3\.\d+/")

# What PyTorch says of a break, and the setting of torch._dynamo.config that captures what the line reads.
_SETTINGS = (
    (re.compile(r"Tensor\.item|_local_scalar_dense|\.tolist"), "capture_scalar_outputs"),
    (re.compile(r"[Dd]ynamic (output )?shape|DynamicOutputShape|nonzero"), "capture_dynamic_output_shape_ops"),
)

# PyTorch's own page of a kind of break.
_PAGE = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb{}.html"
_NO_FAKE = "no fake impl registered"
_REGISTER_FAKE = (
    "Register what the operator gives for tensors without values: torch.library.register_fake, or register_fake of the "
    "operator."
)
NOTHING_KNOWN = "no safe change known"

# Causes that are the caller's wherever the guard is.
_OF_THE_CALL = ("dtype", "device", "global state (grad mode, autocast, …)", "train / eval mode")
_SIZES = "Pass the same sizes in every call, or compile with dynamic=True, so that sizes are symbols."
# Not an entry of a dictionary, such as an optimizer's learning rate.
_INTEGER_ATTRIBUTE = re.compile(r"self(\.\w+)+ == -?\d+")
_WARM_UP = "Call the model once before it is compiled: the first call sets it."

# What a caller can do about a guard in a package, by its cause and whether it is on an attribute of a module.
_IN_PACKAGES = {
    ("tensor size", False): _SIZES,
    ("symbolic shape", False): _SIZES,
    ("None or absent", True): _WARM_UP,
    ("Python value", True): "Set torch._dynamo.config.allow_unspec_int_on_nn_module = True: an integer attribute of a "
    "module is then a symbol.",
}


def read(file: str) -> Source | None:
    """The source of a file; None if it cannot be read as Python."""
    try:
        return Source.read(Path(file))
    except (OSError, SyntaxError):
        return None


def advice_on_break(
    causes: Sequence[Cause], met: Break, guards: Sequence[Recompile], *, static_shapes: bool
) -> list[Advised]:
    """The advice on a break that fits the use of what broke, the likeliest first.

    A function at the recompile limit gets the advice on the guard of its line.
    """
    if met.category == RECOMPILE_LIMIT:
        own = [again for again in guards if (again.file, again.line) == (met.file, met.line)]
        return [advice for again in own[-1:] for advice in _advice_on_guard(again, static_shapes=static_shapes)]
    if _NO_FAKE in met.reason:
        return [Advised("", _REGISTER_FAKE)]
    source = read(met.file)
    return advise(causes, None if source is None else Use(source, met.line, met.columns, stack=met.stack))


def _advice_on_guard(again: Recompile, *, static_shapes: bool) -> list[Advised]:
    source = None if again.package else read(again.file)
    if source is None:
        return advise(match_recompile(again.guard, again.source), None)
    guard = source.with_self(again.guard, again.line)
    use = Use.of_guard(source, again.line, guard, static_shapes=static_shapes)
    return advise(match_recompile(guard, use.code or again.source), use)


def guarded_attribute(again: Recompile) -> str:
    """The attribute that a guard checked, as ``self.name``; empty for anything else."""
    value = guarded_value(again.guard)
    return f"self.{value.rpartition('.')[2]}" if value.startswith("self.") else ""


def recompile_advice(again: Recompile, *, static_shapes: bool = False) -> str:
    """What to do about a recompilation; empty where nothing is known to be safe."""
    if _is_of_package(again.guard, again.package):
        return advice_in_package(again.guard, again.package)
    advice = _advice_on_guard(again, static_shapes=static_shapes)
    return with_entry(advice[0].text, advice[0].case) if advice else ""


def advice_from_guard(guard: str, source: str, package: str) -> str:
    """What to do about a recompilation of which only the guard is known: advice with its condition in words.

    The lines of an installed ``package`` cannot be changed; it is empty for the user's own.
    """
    if _is_of_package(guard, package):
        return advice_in_package(guard, package)
    advice = advise(match_recompile(guard, source), None, value=guarded_value(guard))
    return with_entry(advice[0].text, advice[0].case) if advice else ""


def _is_of_package(guard: str, package: str) -> bool:
    """Whether a guard is about what the user cannot change; torch's functions guard the user's own arguments too."""
    return bool(package) and (package != "torch" or guarded_value(guard).startswith("self"))


def advice_in_package(guard: str, package: str) -> str:
    """What a caller can do about a guard in an installed package; empty where nothing is known to help."""
    if cause_of(guard) in _OF_THE_CALL:
        return advice_from_guard(guard, "", "")
    of_module = re.match(r"(not )?(hasattr\()?self\b", guard) is not None
    if of_module and cause_of(guard) == "Python value" and not _INTEGER_ATTRIBUTE.fullmatch(guard):
        return ""
    return _IN_PACKAGES.get((cause_of(guard), of_module), "")


def with_entry(advice: str, entry: str) -> str:
    """Advice with the catalogue's entry that it is from."""
    return f"{advice} (catalogue: {entry})" if entry else advice


def page(registry: str) -> str:
    """Address of PyTorch's page of a break; empty if PyTorch gives the break no number."""
    return _PAGE.format(registry.removeprefix("GB")) if registry else ""


def cause_of_separate(caller: Frame, breaks: Collection[Break]) -> Break | None:
    """The break that keeps a caller out of a graph, so that what it calls is compiled by itself; None if there is none.

    It is one for which Dynamo skips the calling function, or one on the line of the call.
    """
    source = read(caller.file)
    function = None if source is None else Use(source, caller.line).function
    first = 0 if function is None else first_line(function)
    calling = (caller.file, first)
    skipped = (met for met in breaks if met.whole_frame and calling in [(f.file, f.line) for f in met.compiled])
    at_call = (met for met in breaks if (met.file, met.line) == (caller.file, caller.line))
    return next(skipped, next(at_call, None))


def break_before(again: Recompile, breaks: Collection[Break]) -> Break | None:
    """The break that a recompilation follows from; None if none is known.

    The code after a break is a function of its own. A function that is called where no graph is, too, is compiled by
    itself. What such a function gets is guarded, and would be a value inside the graph without the break.
    """
    if again.function.startswith(RESUMED):
        line = int(again.function.rpartition("_at_")[2] or 0)
        return next((met for met in breaks if again.guard.startswith("___stack") and met.line == line), None)
    if guarded_value(again.guard).startswith(("self", "G[")):
        return None
    if again.called_at is None:  # of the model itself, but also below a function that Dynamo skips
        return next((met for met in breaks if met.whole_frame and _calls(met, again.function)), None)
    return cause_of_separate(again.called_at, breaks)


def _calls(met: Break, name: str) -> bool:
    """Whether the function that a break keeps out of a graph calls one of a name. Every module has a ``forward``."""
    source = read(met.file)
    function = None if source is None or name == "forward" else Use(source, met.line).function
    nodes = () if function is None else ast.walk(function)
    return any(isinstance(node, ast.Call) and name_of(node.func) == name for node in nodes)


def advice_to_the_caller(met: Break, breaks: Sequence[Break], guards: Sequence[Recompile] = ()) -> str:
    """What can be done about a break in an installed package without changing the package; empty if nothing can.

    The breaks that one line of the user leads to get one advice. At the recompile limit the guard of the line counts.
    """
    if _NO_FAKE in met.reason:
        return _REGISTER_FAKE
    if writing := next((frame for frame in met.frames if frame.source.startswith(_LOGGING)), None):
        advice = "Call the model once before it is compiled if the message is written once, or turn the message off"
        return f"{advice}: it comes from {shorten(writing.file).partition('/')[0]}."
    if met.category == RECOMPILE_LIMIT:
        own = (again.guard for again in guards if (again.file, again.line) == (met.file, met.line))
        if any(guarded_value(guard).startswith("self") for guard in own):
            return ""  # state of the package, such as an optimizer's settings
        advice = (
            "Keep what changes from call to call out of the arguments, pass it as a tensor, or mark its size dynamic"
        )
        return f"{advice}; torch._dynamo.config.recompile_limit allows more compilations."
    if met.reason.startswith("Call to `torch._dynamo.graph_break()`") or "Optimizer." in " ".join(met.hints):
        return "PyTorch keeps this call out of graphs: make it outside of what is compiled."
    if setting := _setting(met):
        return (
            f"Set torch._dynamo.config.{setting} = True before the first compiled call: it captures what is read here."
        )
    same_line = [other for other in breaks if other.place == met.place and _packages(other) and not _setting(other)]
    return _disabling(same_line) or _newer(met)


def _setting(met: Break) -> str:
    text = f"{met.reason} {met.explanation}"
    return next((setting for pattern, setting in _SETTINGS if pattern.search(text)), "")


def _disabling(breaks: Sequence[Break]) -> str:
    """Which functions to keep out of the graph, if that leaves fewer breaks or no skipped frame; else empty."""
    around = {met.identity: names for met in breaks if (names := _functions(met))}
    innermost = {names[-1] for names in around.values()}
    # A function that is called by another one of these need not be named.
    named = dict.fromkeys(next(name for name in names if name in innermost) for names in around.values())
    skipped = any(met.whole_frame for met in breaks if met.identity in around)
    if not named or (len(named) == len(around) and not skipped):
        return ""
    gain = f"{plural(len(named), 'break')} instead of {len(around)}" if len(named) < len(around) else ""
    split = "the frames around are split there instead of skipped" if skipped else ""
    what = ", and ".join(part for part in (gain, split) if part)
    return (
        f"Keep {' and '.join(named)} out of the graph with torch.compiler.disable: {what}. All of it runs eagerly then."
    )


def _newer(met: Break) -> str:
    if "torch.compiler.disable" in met.reason:  # somebody wants it so
        return ""
    packages = _packages(met)
    return f"See whether a newer version of {packages[-1]} can be traced." if packages else ""


def _in_library(met: Break) -> list[tuple[str, Frame]]:
    """The frames of installed packages behind the user's line, outermost first, each with its short file name."""
    stack = met.frames
    if met.library:
        last = max((index for index, frame in enumerate(stack) if frame.place == met.place), default=-1)
        stack = stack[last + 1 :]
    named = [(shorten(frame.file), frame) for frame in stack]
    return [(name, frame) for name, frame in named if "/" in name and not _PYTHONS_OWN.match(name)]


def _packages(met: Break) -> list[str]:
    return [name.partition("/")[0] for name, _ in _in_library(met)]


def _functions(met: Break) -> list[str]:
    """The functions of installed packages that a break lies in, outermost first, as they can be imported.

    Empty if the innermost is the ``forward`` of a module that only calls the function with the break: this may be the
    whole model, which the caller wants compiled.
    """
    frames = _in_library(met)
    names = [(name, _importable(frame.file, frame.line)) for name, frame in frames]
    innermost = next((function for _, function in reversed(names) if function), "")
    if not names or (not names[-1][1] and innermost.endswith(".forward")):
        return []
    modules = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in names)
    return [f"{module}.{function}" for module, (_, function) in zip(modules, names, strict=True) if function]


@cache
def _importable(file: str, line: int) -> str:
    """The qualified name of the function that a line is in; empty for a property, and for a function in a function."""
    source = read(file)
    statement = None if source is None else source.statement(line)
    if source is None or statement is None:
        return ""
    function = statement if isinstance(statement, ast.FunctionDef) else source.function(statement)
    if function is None or any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return ""
    outside = [node for node in source.above(function) if not isinstance(node, (ast.Module, ast.If, ast.Try))]
    classes = [node.name for node in outside if isinstance(node, ast.ClassDef)]
    return ".".join([*reversed(classes), function.name]) if len(classes) == len(outside) else ""


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

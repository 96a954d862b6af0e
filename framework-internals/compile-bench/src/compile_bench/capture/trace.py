"""Records of what torch.compile did, and PyTorch's wording of it: messages about breaks, guards that failed.

Nothing here imports torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from compile_bench.capture.frames import Frame

_WORDING: dict[str, list[tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("wording.toml").read_text(encoding="utf-8")
)
_CATEGORIES = [(re.compile(pattern, re.IGNORECASE), category) for pattern, category in _WORDING["categories"]]
_CAUSES, _CHANGES, _NAMES = (
    [(re.compile(pattern), meaning) for pattern, meaning in _WORDING[kind]] for kind in ("causes", "changes", "names")
)

RECOMPILE_LIMIT = "recompile limit"
BACKEND_FAILED = "backend failed"
ASKED_FOR = "asked for by the code"
NOT_ENTERED = "call Dynamo will not enter"

# How the reasons of breaks at an iterator in use begin, which Dynamo can neither take as an argument nor hand over.
ITERATOR_IN_USE = ("Missing tp_iternext", "Generator reconstruction", "Reconstruction failure")

# Lines that introduce a message.
_INTRODUCTION = re.compile(r"^Encountered graph break when attempting to trace .*:$|Graph break encountered:$")
# It differs from process to process, so one reason would be two.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")
# The error of an operator that ran on fake tensors, which the reason does not name.
_OF_AN_OPERATOR = re.compile(r"""with fake tensors: .*: got \w+\((["'])(?P<error>.*)\1\)""", re.S)
_REGISTRY_NUMBER = re.compile(r"/gb/gb(\d{4})\.html")


def parse_message(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Split a formatted graph-break message into reason, explanation and hints."""
    lines = [line.strip() for line in text.split("\n  Explanation:")[0].splitlines() if line.strip()]
    head = [line for line in lines if not _INTRODUCTION.search(line)] or lines
    explanation = re.search(r"^  Explanation: (.*?)(?=^  Hint: |^  Developer debug context:|\Z)", text, re.S | re.M)
    hints = re.findall(r"^  Hint: (.*?)(?=^  Hint: |^\s*\n|^  Developer debug context:|\Z)", text, re.S | re.M)
    # The reason is the last line above an explanation. An error without one begins with the reason.
    reason = (head[-1] if explanation else head[0]) if head else "no reason given"
    if explanation and (failed := _OF_AN_OPERATOR.search(explanation[1])):
        error = failed["error"].partition(r"\n")[0].partition(". ")[0]  # the message is a repr
        reason = f"{reason}: {one_line(error)}"
    return (
        _ADDRESS.sub("", reason.removeprefix("torch._dynamo.exc.Unsupported: ")),
        one_line(explanation[1].split("\n\n")[0]) if explanation else "",
        tuple(one_line(hint) for hint in hints),
    )


def one_line(text: str) -> str:
    """The text on one line, with single spaces."""
    return re.sub(r"\s+", " ", text).strip()


def categorise(reason: str, explanation: str = "") -> str:
    """The category of a break's reason; ``"other"`` if the wording is unknown."""
    for text in (reason, explanation):
        for pattern, category in _CATEGORIES:
            if pattern.search(text):
                return category
    return "other"


def registry_number(text: str) -> str:
    """The number in PyTorch's published list that a message links to, such as ``"GB0170"``; empty without a link."""
    number = _REGISTRY_NUMBER.search(text)
    return f"GB{number[1]}" if number else ""


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def named(value: str) -> str:
    """A value as the code names it."""
    for pattern, name in _NAMES:
        value = pattern.sub(name, value)
    return value[1:-1] if re.fullmatch(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", value) else value


def _dtypes(match: re.Match[str]) -> str:
    before, after = (_DTYPES.get(name, name.lower()) for name in match.group(2, 3))
    return f"{named(match[1])} is {after}, compiled for {before}"


def _dispatch_keys(match: re.Match[str]) -> str:
    before, after = (keys.split(", ") for keys in match.group(2, 3))
    gone = ", ".join(key for key in before if key not in after)
    new = ", ".join(key for key in after if key not in before)
    changed = " and ".join(part for part in (f"without {gone}" if gone else "", f"with {new}" if new else "") if part)
    return f"{named(match[1])} has other dispatch keys, {changed}: another device, or inference mode"


def _compared(match: re.Match[str]) -> str:
    left, sign, right = match.groups()
    if sign in ("<=", "<") and re.fullmatch(r"-?\d+", left):  # ``2 <= x.size()[0]``
        left, sign, right = right, {"<=": ">=", "<": ">"}[sign], left
    relation = {"==": "", ">=": "at least ", ">": "more than ", "<=": "at most ", "<": "less than "}
    return f"{named(left)} is {'now' if sign == '!=' else 'no longer'} {relation.get(sign, '')}{named(right)}"


_MADE: dict[str, Callable[[re.Match[str]], str]] = {
    "dtypes": _dtypes,
    "dispatch_keys": _dispatch_keys,
    "compared": _compared,
}


def cause_of(guard: str) -> str:
    """The cause of a recompilation, from the guard that failed; ``"other"`` if the wording is unknown."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(guard)), "other")


def what_changed(guard: str) -> str:
    """What changed since the code was compiled, as a sentence; the guard itself if its form is unknown."""
    for pattern, sentence in _CHANGES:
        if match := pattern.fullmatch(guard):
            if sentence.startswith("="):
                return _MADE[sentence[1:]](match)
            return sentence.format("", *map(named, match.groups()))
    return f"the guard `{guard}` no longer holds"


SilentKind = Literal["silent eager", "method not compiled", "CUDA graph lost"]

# The values of a guard that failed, and numbers of objects. What it is about stays: ``index 2``, ``args[0]``.
_GUARDED_VALUE = re.compile(r"(?<=expected )-?\d+|(?<=actual )-?\d+|(?<=== )-?[\d.]+(e[+-]?\d+)?$|(?<=, )\d{9,}(?=\))")

# A module that torch.fx generated has a new number each time.
_GENERATED = re.compile(r"^<eval_with_key>\.\d+")


@dataclass(frozen=True)
class Break:
    """A place where Dynamo stopped capturing and Python took over."""

    file: str  # file of the user's line
    line: int  # number of the line, counted from 1; 0 if PyTorch does not say it
    function: str  # function that has the line
    source: str  # text of the line
    reason: str  # kind of break, as PyTorch names it
    explanation: str  # PyTorch's explanation
    hints: tuple[str, ...]  # what PyTorch proposes
    category: str  # one of a dozen groups of reasons
    # Whether Dynamo skipped the frame, or the rest of it, instead of splitting it. The function then runs eagerly from
    # there on.
    whole_frame: bool
    times: int = 1  # how often Dynamo met the break. Each recompilation meets it again
    registry: str = ""  # number in PyTorch's published list, such as "GB0170"; empty if PyTorch gives none
    # The model's lines that led to the break, outermost first, lines of libraries included.
    stack: tuple[Frame, ...] = ()
    compile_ids: tuple[str, ...] = ()  # the compilations that met the break
    # Begin and end of the expression that broke, in the line's text without indentation. This is the whole line if
    # PyTorch does not mark a part of it, and None if PyTorch does not show the line.
    columns: tuple[int, int] | None = None
    package: str = ""  # the installed package whose code breaks; empty if the user's own line does
    # The user's line that called the compiled function from Python; None for the model itself. Dynamo compiles a
    # function by itself only where its caller is not in a graph.
    called_at: Frame | None = None
    compiled: tuple[Frame, ...] = ()  # the compiled functions that met the break, each with its first line

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The stack; the user's line alone if PyTorch shows no stack."""
        return self.stack or (Frame(self.file, self.line, self.function, self.source),)

    @property
    def identity(self) -> tuple[str, int, str, str]:
        """What tells breaks apart: file, line, reason, and the library's line."""
        return self.file, self.line, self.reason, self.library

    @property
    def library(self) -> str:
        """The library's line that the user's line called; empty if the user's line itself breaks."""
        last = self.stack[-1] if self.stack else None
        return "" if last is None or last.place == self.place else _GENERATED.sub("<torch.fx>", last.place)


@dataclass(frozen=True)
class Recompile:
    """A recompilation: a function was compiled again because a guard failed."""

    file: str  # of the function
    line: int  # the line that made the guard, or the function's first line if PyTorch does not say which one did
    guard: str  # the condition that failed in the newest compiled code of the function
    source: str = ""  # text of the line; empty if PyTorch does not say it
    called_from: str = ""  # the user's line that called the function; empty if ``file`` is the user's
    package: str = ""  # the installed package whose code made the guard; empty if it is the user's own
    called_at: Frame | None = None  # see :class:`Break`
    compile_id: str = ""  # of the new compilation, such as "0/1"
    function: str = ""  # its name
    advice: str | None = None  # what to do, if triage has looked for it; empty where nothing is known to be safe

    @property
    def identity(self) -> tuple[str, int, str, str]:
        """What tells guards apart: file, line, the guard without its values, and the caller."""
        return self.file, self.line, _GUARDED_VALUE.sub("…", self.guard), self.called_from

    @property
    def cause(self) -> str:
        """Group of the guard: tensor size, Python value, and so on."""
        return cause_of(self.guard)

    @property
    def what_changed(self) -> str:
        """What changed since the function was compiled, as a sentence."""
        return what_changed(self.guard)

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SilentEager:
    """A function that runs eagerly, or a graph that runs without CUDA graphs, without a message from Dynamo."""

    kind: SilentKind  # what happened
    frame: Frame  # first line of the function; for a method, the line that calls it; for a CUDA graph, the model's line
    function: str  # name of the function
    reason: str  # explanation in one sentence


@dataclass(frozen=True)
class Graph:
    """A captured graph."""

    compile_id: str  # id of its compilation, such as "0/0"
    function: str  # function that it was captured from
    operations: int  # number of calls in it, as Dynamo captured them
    guards: int  # number of conditions that are checked before each call
    guard_seconds: float | None  # time of one check of all guards, as PyTorch measured it; None if it did not
    compile_seconds: float | None = None  # time of its compilation, all phases; None if PyTorch did not say it


@dataclass(frozen=True)
class CompileTrace:
    """Everything that a :class:`~compile_bench.capture.collector.Collector` saw."""

    graphs: tuple[Graph, ...] = ()  # captured graphs, those of recompilations included
    breaks: tuple[Break, ...] = ()  # one entry for each place and reason
    recompiles: tuple[Recompile, ...] = ()  # recompilations, in order
    # Seconds by phase (:data:`compile_bench.capture.parsing.PHASES`). Each instant counts once.
    phases: Mapping[str, float] = field(default_factory=dict)
    cache_events: Mapping[str, int] = field(default_factory=dict)  # numbers of hits, misses and bypasses, by cache
    kernels: int = 0  # number of kernels that Inductor generated (C++ loops or Triton kernels); 0 for other backends
    handler_seconds: float = 0.0  # time that the collector itself took
    # First lines of functions that had no tensor operation in their first call. Dynamo does not look at them again.
    empty: tuple[Frame, ...] = ()

    @property
    def guards(self) -> int:
        """Number of guards of all graphs."""
        return sum(graph.guards for graph in self.graphs)

    @property
    def broken_lines(self) -> int:
        """Number of lines with a break. A line may break for several reasons."""
        return len({(met.file, met.line) for met in self.breaks})

    @property
    def recompiles_by_guard(self) -> Mapping[Hashable, tuple[Recompile, ...]]:
        """The recompilations of each guard, in the order in which the guards first failed."""
        by_guard: dict[Hashable, tuple[Recompile, ...]] = {}
        for again in self.recompiles:
            by_guard[again.identity] = (*by_guard.get(again.identity, ()), again)
        return by_guard

    @property
    def most_of_one_guard(self) -> int:
        """Number of recompilations of the guard that caused most."""
        return max(map(len, self.recompiles_by_guard.values()), default=0)

    @property
    def own(self) -> CompileTrace:
        """The same trace with only those breaks and recompilations that the user's own code causes."""
        return replace(
            self,
            breaks=tuple(met for met in self.breaks if not met.package),
            recompiles=tuple(again for again in self.recompiles if not again.package),
        )

    @property
    def operations(self) -> int:
        """Number of captured calls in all graphs."""
        return sum(graph.operations for graph in self.graphs)

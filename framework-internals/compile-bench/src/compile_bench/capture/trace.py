"""Records of what torch.compile did. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from compile_bench.capture.frames import Frame
from compile_bench.capture.wording import cause_of, what_changed

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
    # Seconds by phase (:data:`compile_bench.capture.phases.PHASES`). Each instant counts once.
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

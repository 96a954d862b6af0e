"""What a survey of a target saw: breaks, skipped frames and recompilations. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from benchkit.results import Quantity
from compile_bench.capture.trace import Break, CompileTrace, Recompile, SilentEager, SilentKind
from compile_bench.targets.case import Case

Kind = Literal[
    "graph break",
    "skipped frame",
    "recompile limit",
    "compile error",
    SilentKind,
]

# File and line of a graph break in the unchanged sources.
Place = tuple[str, int]


@dataclass(frozen=True)
class BreakCost:
    """What a graph break costs."""

    # Python time between the graph before the break and the next graph, per step; None where it could not be measured.
    time_lost: Quantity | None
    breaks_between: int  # number of breaks between the same two graphs; they have one time_lost
    output_bytes: int  # bytes of the tensors that the graph before the break returns to Python
    # Time to trace the functions that exist because the graph was split here, without code generation.
    compile_seconds: float
    not_measured: str = ""  # why there is no time_lost, as a clause; empty where there is one


@dataclass(frozen=True)
class Seen:
    """A message of a survey that goes on: it has just met a break."""

    case: Case
    met: Break


@dataclass(frozen=True)
class Survey:
    """What one process saw of a target, in training or in inference, over several seeds."""

    case: Case  # what was traced
    breaks: tuple[Break, ...]  # graph breaks, merged over the seeds
    seeds: tuple[tuple[int, ...], ...]  # for every break, the seeds that met it
    eager: tuple[SilentEager, ...]  # functions that ran eagerly without a message from Dynamo
    trace: CompileTrace  # trace of the first seed
    recompiles: tuple[Recompile, ...]  # one recompilation for every place and guard
    calls: int  # number of steps for each seed
    # Errors of the compiled model that the eager one does not raise, each in one line. The breaks before an error are
    # kept.
    failures: tuple[str, ...]
    collect_seconds: float  # time that the collector took
    trace_seconds: float  # time of all first calls, the collector's included
    user_files: frozenset[str] = frozenset()  # the files of the breaks that belong to the user
    notes: tuple[str, ...] = ()  # places behind which breaks stay hidden, one sentence each
    hidden: frozenset[Place] = frozenset()  # breaks that skipped frames hide
    untraced: frozenset[tuple[str, str]] = frozenset()  # functions (file and name) in which breaks may stay hidden
    # Cost of the break at a file and line; empty if they were not measured.
    costs: Mapping[Place, BreakCost] = field(default_factory=dict)
    eager_failure: str = ""  # what a later step of the eager model raises, as a sentence; empty if it raises nothing
    regions: str = ""  # the regions that the target's code compiles itself; empty if it compiles none
    complete: bool = True  # whether the survey ended. If not, it has what was seen until then


def place_of(met: Break) -> Place:
    """File and line of a break."""
    return met.file, met.line

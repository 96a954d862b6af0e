"""What a survey of a target saw: breaks, skipped frames and recompilations. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from benchkit.results import Quantity
from compile_bench.capture.silent_eager import SilentEager, SilentKind
from compile_bench.capture.trace import Break, CompileTrace, Recompile
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
    """What a graph break costs.

    Attributes:
        time_lost: Python time between the graph before the break and the next graph, per step; None where it could not
            be measured.
        breaks_between: Number of breaks between the same two graphs; they have one ``time_lost``.
        output_bytes: Bytes of the tensors that the graph before the break returns to Python.
        compile_seconds: Time to trace the functions that exist because the graph was split here, without code
            generation.
        not_measured: Why there is no ``time_lost``, as a clause; empty where there is one.
    """

    time_lost: Quantity | None
    breaks_between: int
    output_bytes: int
    compile_seconds: float
    not_measured: str = ""


@dataclass(frozen=True)
class Seen:
    """A message of a survey that goes on: it has just met a break."""

    case: Case
    met: Break


@dataclass(frozen=True)
class Survey:
    """What one process saw of a target, in training or in inference, over several seeds.

    Attributes:
        case: What was traced.
        breaks: Graph breaks, merged over the seeds.
        seeds: For every break, the seeds that met it.
        eager: Functions that ran eagerly without a message from Dynamo.
        trace: Trace of the first seed.
        recompiles: One recompilation for every place and guard.
        calls: Number of steps for each seed.
        failures: Errors of the compiled model that the eager one does not raise, each in one line. The breaks before
            an error are kept.
        collect_seconds: Time that the collector took.
        trace_seconds: Time of all first calls, the collector's included.
        user_files: The files of the breaks that belong to the user.
        notes: Places behind which breaks stay hidden, one sentence each.
        hidden: Breaks that skipped frames hide.
        untraced: Functions (file and name) in which breaks may stay hidden.
        costs: Cost of the break at a file and line; empty if they were not measured.
        eager_failure: What a later step of the eager model raises, as a sentence; empty if it raises nothing.
        regions: The regions that the target's code compiles itself; empty if it compiles none.
        complete: Whether the survey ended. If not, it has what was seen until then.
    """

    case: Case
    breaks: tuple[Break, ...]
    seeds: tuple[tuple[int, ...], ...]
    eager: tuple[SilentEager, ...]
    trace: CompileTrace
    recompiles: tuple[Recompile, ...]
    calls: int
    failures: tuple[str, ...]
    collect_seconds: float
    trace_seconds: float
    user_files: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    hidden: frozenset[Place] = frozenset()
    untraced: frozenset[tuple[str, str]] = frozenset()
    costs: Mapping[Place, BreakCost] = field(default_factory=dict)
    eager_failure: str = ""
    regions: str = ""
    complete: bool = True


def place_of(found: Break) -> Place:
    """File and line of a break."""
    return found.file, found.line

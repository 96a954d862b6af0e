"""What a survey of a target saw: breaks, skipped frames and recompilations. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.targets.case import Case

Kind = Literal[
    "graph break",
    "function given up",
    "recompile limit",
    "silent eager",
    "method not compiled",
    "CUDA graph lost",
    "compile error",
]

# What a break keeps when lines above it move: file, function and the line's text.
Mark = tuple[str, int]


@dataclass(frozen=True)
class Survey:
    """What one process saw of a target, training or inference, over several seeds.

    Attributes:
        case: what was traced.
        breaks: merged over the seeds.
        seeds: for every break the seeds that met it.
        eager: functions that computed outside any graph without Dynamo saying why, as findings.
        trace: of the first seed.
        recompiles: one for every place and guard.
        calls: steps a seed.
        failures: what a seed raised, one line each; its breaks up to then are kept.
        collect_seconds: time spent in the collector.
        trace_seconds: time of all first calls, that included.
        user_files: those of the breaks' files that are the user's.
        notes: lines that nothing could be seen behind, and why.
        hidden: breaks that were only seen behind functions that Dynamo gave up.
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
    hidden: frozenset[Mark] = frozenset()


@dataclass(frozen=True)
class SilentEager:
    """A function that runs eagerly and about which Dynamo logs nothing.

    Attributes:
        kind: why.
        frame: the function's first line, or for a method the line that calls it.
        function: its name.
        reason: in one sentence.
    """

    kind: Kind
    frame: Frame
    function: str
    reason: str


def mark(found: Break) -> Mark:
    """How a break is recognised in a changed file: by its file, and its line in the unchanged one."""
    return found.file, found.line

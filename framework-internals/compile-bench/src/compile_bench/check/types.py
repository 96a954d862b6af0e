"""What is checked. Nothing here imports torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields

from compile_bench.capture.trace import CompileTrace
from compile_bench.measure.measurements import Memory


@dataclass(frozen=True)
class Inventory:
    """What a target or test compiles to, with the version of torch that counted it.

    A count that is None was not taken, or is not in a lock file of version 1; it is compared with nothing.
    """

    graphs: int  # captured graphs
    breaks: int  # graph breaks
    recompiles: int  # recompilations
    guards: int  # guards of all graphs
    kernels: int  # kernels that Inductor generated
    torch: str  # version of torch
    own_breaks: int | None = None  # graph breaks outside installed packages
    own_recompiles: int | None = None  # recompilations whose guard was made outside installed packages
    recompiles_per_guard: int | None = None  # recompilations that the guard with most of them caused
    # Compiled graphs that run under CUDA graphs as a whole; None on a CPU, in a mode that does not ask for CUDA graphs,
    # and in a test.
    cuda_graphs: int | None = None

    @classmethod
    def of(cls, trace: CompileTrace, torch_version: str, cuda_graphs: int | None = None) -> Inventory:
        """Count a trace."""
        return cls(
            graphs=len(trace.graphs),
            breaks=len(trace.breaks),
            recompiles=len(trace.recompiles),
            guards=trace.guards,
            kernels=trace.kernels,
            torch=torch_version,
            own_breaks=len(trace.own.breaks),
            own_recompiles=len(trace.own.recompiles),
            recompiles_per_guard=trace.most_of_one_guard,
            cuda_graphs=cuda_graphs,
        )

    def drift(self, now: Inventory) -> list[str]:
        """One line for every count that differs."""
        counts = [field.name for field in fields(self) if field.name != "torch"]
        both = {name: (getattr(self, name), getattr(now, name)) for name in counts}
        lines = [
            f"{name}: {locked} locked, {current} now"
            for name, (locked, current) in both.items()
            if None not in (locked, current) and locked != current
        ]
        if lines and self.torch != now.torch:
            lines.append(f"locked with torch {self.torch}, this is {now.torch}: lock anew if that is the reason")
        return lines


@dataclass(frozen=True)
class MemoryRounds:
    """Peaks of an eager and a compiled step, measured in alternation."""

    rounds: tuple[Memory, ...]  # the two peaks of each round

    @property
    def ratios(self) -> tuple[float, ...]:
        """Compiled over eager, for each round; infinite if only the compiled step allocates, 1 if neither does."""
        return tuple(
            peaks.compiled / peaks.eager if peaks.eager else float("inf") if peaks.compiled else 1.0
            for peaks in self.rounds
        )

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def eager(self) -> int:
        """Peak of the eager step in bytes, the median of the rounds."""
        return statistics.median_high(peaks.eager for peaks in self.rounds)

    @property
    def compiled(self) -> int:
        """Peak of the compiled step in bytes, the median of the rounds."""
        return statistics.median_high(peaks.compiled for peaks in self.rounds)


@dataclass(frozen=True)
class GraphRun:
    """How one compiled graph runs in a step after warm-up."""

    compile_id: str  # id of its compilation, such as "0/0"; empty if Inductor's cache gave the graph no key
    function: str  # function that it was captured from
    backward: bool  # whether it is a backward pass
    replays: float  # CUDA graphs that are replayed in a step
    # Kernels that are launched one by one in a step. Copies of arguments into a CUDA graph are among them.
    launches: float
    # Why a part of it, or all of it, runs without CUDA graphs: in PyTorch's words, with the model's line.
    reasons: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all of it runs under CUDA graphs."""
        return self.replays > 0 and not self.reasons

    @property
    def name(self) -> str:
        """``0/0 forward of f``."""
        return f"{self.compile_id or 'a graph'} {'backward' if self.backward else 'forward'} of {self.function or '?'}"


@dataclass(frozen=True)
class Outcome:
    """What the check of one target came to."""

    target: str  # name of the target
    status: int  # exit status
    found: tuple[str, ...] = ()  # what was counted and measured, one phrase each
    exceeded: tuple[str, ...] = ()  # lines about what is over the budget, details indented; empty within it
    error: str = ""  # why there is no result, in one line; empty if there is one

    @property
    def verdict(self) -> str:
        """``within budget``, ``over budget`` or ``not checked``."""
        return "not checked" if self.error else "over budget" if self.exceeded else "within budget"

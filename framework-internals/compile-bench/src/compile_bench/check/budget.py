"""Limits on what is compiled, and one line for each that is exceeded. ``check`` and the pytest plugin share them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchkit import numbers
from compile_bench.capture.text import break_lines, plural, recompile_lines, recompiled
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.measure.records import Bench, Memory
from compile_bench.measure.verdict import busy


@dataclass(frozen=True)
class Budget:
    """The most that may be compiled; None allows any number."""

    breaks: int | None = None  # lines with a graph break
    recompiles: int | None = None  # compilations of a function that had been compiled before
    recompiles_per_guard: int | None = None  # recompilations that one guard may cause
    graphs: int | None = None  # captured graphs
    guards: int | None = None  # guards of all graphs
    kernels: int | None = None  # kernels that Inductor generates
    own_only: bool = False  # whether breaks and recompilations that installed packages cause are left out of the counts

    def exceeded(self, trace: CompileTrace, root: Path) -> list[str]:
        """One line for every limit that is exceeded; breaks and recompilations follow.

        Args:
            trace: What was compiled.
            root: Files below it are named relative to it.
        """
        counted = trace.own if self.own_only else trace
        lines = []
        if _over(counted.broken_lines, self.breaks):
            apart = self._apart(trace.breaks)
            count = f"{plural(len(counted.breaks), 'graph break')}{several_lines(counted)}"
            lines.append(f"{count}, {self.breaks} allowed{apart}")
            lines += [f"  {line}" for line in break_lines(counted.breaks, root)]
        if _over(len(counted.recompiles), self.recompiles):
            apart = self._apart(trace.recompiles)
            lines.append(f"{plural(len(counted.recompiles), 'recompilation')}, {self.recompiles} allowed{apart}")
            lines += [f"  {line}" for line in recompile_lines(counted.recompiles, root)]
        for failed in counted.recompiles_by_guard.values():
            if _over(len(failed), self.recompiles_per_guard):
                guard = f"{recompiled(failed[0], root)}: {failed[0].what_changed}"
                times = plural(len(failed), "recompilation")
                lines.append(f"{guard}: {times}, {self.recompiles_per_guard} allowed for one guard")
        counts = (
            ("graph", len(trace.graphs), self.graphs),
            ("guard", trace.guards, self.guards),
            ("kernel", trace.kernels, self.kernels),
        )
        lines += [f"{plural(count, noun)}, {most} allowed" for noun, count, most in counts if _over(count, most)]
        return lines

    def _apart(self, entries: Sequence[Break | Recompile]) -> str:
        """How many are in the user's own code and how many in each package; empty if no package has any."""
        packages = Counter(entry.package for entry in entries if entry.package)
        named = ", ".join(f"{count} in {package}" for package, count in sorted(packages.items()))
        if not named or self.own_only:
            return f" ({named}, not counted)" if named else ""
        return f": {len(entries) - packages.total()} in your own code, {named}"


def _over(count: int, most: int | None) -> bool:
    return most is not None and count > most


def found_in(trace: CompileTrace) -> str:
    """What was counted, for a target within its budget: ``0 graph breaks, 2 recompilations (at most 1 per guard)``."""
    per_guard = f" (at most {trace.most_of_one_guard} per guard)" if trace.recompiles else ""
    breaks, recompiles = plural(len(trace.breaks), "graph break"), plural(len(trace.recompiles), "recompilation")
    return f"{breaks}{several_lines(trace)}, {recompiles}{per_guard}"


def several_lines(trace: CompileTrace) -> str:
    """`` in 1 line``, where a line breaks for several reasons; else empty."""
    return f" in {plural(trace.broken_lines, 'line')}" if len(trace.breaks) > trace.broken_lines else ""


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


def memory_text(memory: MemoryRounds) -> str:
    """``peak memory compiled 4 MB, eager 8 MB: 0.5× (0.5–0.5 in 3 rounds)``."""
    low, high = (numbers.significant(ratio) for ratio in (min(memory.ratios), max(memory.ratios)))
    peaks = f"compiled {numbers.with_unit(memory.compiled, 'B')}, eager {numbers.with_unit(memory.eager, 'B')}"
    rounds = plural(len(memory.rounds), "round")
    return f"peak memory {peaks}: {numbers.significant(memory.ratio)}× ({low}–{high} in {rounds})"


def without_cuda_graphs(runs: Sequence[GraphRun]) -> list[str]:
    """One line for every compiled graph that runs without CUDA graphs, or whose parts do; empty if none does."""
    if not runs:
        return ["no compiled graph ran, so none ran under CUDA graphs"]
    missing = [run for run in runs if not run.whole]
    if not missing:
        return []
    lines = [f"{len(missing)} of {plural(len(runs), 'compiled graph')} not wholly under CUDA graphs, 0 allowed"]
    for run in missing:
        how = f"in part ({numbers.count(run.replays)} replayed a step)" if run.replays else "not at all"
        lines.append(f"  {run.name}: {how}: {'; '.join(run.reasons) or 'PyTorch gives no reason'}")
    return lines


def too_slow(bench: Bench, min_speedup: float) -> list[str]:
    """Lines for a speed-up whose whole interval is too small, and for results outside their bounds."""
    lines = []
    speedup = bench.steady.speedup
    assert speedup.high is not None
    if speedup.high < min_speedup:
        line = f"speed-up {numbers.quantity(speedup)}, at least {numbers.significant(min_speedup)}× required"
        disturbed = busy(bench)
        lines.append(f"{line} ({disturbed})" if disturbed else line)
    if not bench.accuracy.holds:
        lines.append(bench.accuracy.wrong or "the compiled results are further from float64 than the bound allows")
    return lines

"""Are the counts right? Breaks and graphs by the collector against PyTorch's own two tellers."""

from __future__ import annotations

from dataclasses import dataclass

from compile_bench.targets.case import Case


@dataclass(frozen=True)
class Agreement:
    """One target, counted three times in one process, with everything reset in between.

    Attributes:
        case: what was traced, with the backend ``eager``.
        graphs: by the collector.
        places: ``file.py:LINE`` of every break, by the collector.
        met: how often breaks were met at these places, attempts that Dynamo began anew included.
        whole_frames: of the breaks, how many gave up a whole function.
        explain_graphs: ``torch._dynamo.explain``'s ``graph_count``.
        explain_breaks: its ``graph_break_count``.
        explain_error: why it could not say; empty if it could.
        log_places: ``file.py:LINE`` in what ``TORCH_LOGS=graph_breaks`` prints.
    """

    case: Case
    graphs: int
    places: tuple[str, ...]
    met: int
    whole_frames: int
    explain_graphs: int
    explain_breaks: int
    explain_error: str
    log_places: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether all three say the same."""
        return not self.differences

    @property
    def explained(self) -> bool:
        """Whether every difference has its known ground."""
        return all("not explained" not in line for line in self.differences)

    @property
    def differences(self) -> tuple[str, ...]:
        """Where they differ, and on what ground."""
        lines = []
        own, logged = set(self.places), set(self.log_places)
        if own != logged:
            only_own, only_logged = sorted(own - logged), sorted(logged - own)
            parts = [f"only here: {', '.join(only_own)}"] if only_own else []
            parts += [f"only in the log: {', '.join(only_logged)}"] if only_logged else []
            lines.append(f"places differ from the log's, not explained ({'; '.join(parts)})")
        if self.explain_error:
            return (*lines, f"explain cannot run it: {self.explain_error}")
        if self.explain_graphs != self.graphs:
            lines.append(f"explain captured {self.explain_graphs} graphs, {self.graphs} here, not explained")
        if self.explain_breaks not in (len(self.places), self.met):
            ground = "not explained"
            # explain() counts no breaks: it takes one from the number of graphs.
            if self.explain_breaks == max(self.explain_graphs - 1, 0):
                ground = (
                    "explain takes one from the number of graphs, so a line that breaks in several frames counts "
                    "several times, and one that leaves no graph before it not at all"
                )
            lines.append(
                f"breaks by explain {self.explain_breaks}, places by the collector {len(self.places)}: {ground}"
            )
        return tuple(lines)

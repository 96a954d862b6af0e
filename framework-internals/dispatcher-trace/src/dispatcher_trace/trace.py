"""A recorded trace: its calls, what it does not show, and its output formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from benchkit import numbers
from dispatcher_trace.capture.key_sets import Scope, unwatched_keys
from dispatcher_trace.capture.profile import ENDED, Match
from dispatcher_trace.capture.types import EVIDENCE, SCHEMA_VERSION, Call, Hop, calls_to_json
from dispatcher_trace.explain.findings import Finding, findings
from dispatcher_trace.explain.predict import by_python_dispatcher
from dispatcher_trace.render import perfetto, text, viewer
from dispatcher_trace.render.answer import answer
from dispatcher_trace.render.outline import EVERYTHING, Shown

_ALWAYS = "Hops at"  # how the note begins that every trace has


class Trace:
    """A recorded trace. It is empty until the block that records it ends.

    Attributes:
        unrecorded: Number of times that a constructor of tensor subclasses ran, by the operator that it calls without a
            shim: once; under functorch once a level, with the checks of a tangent. NOTES.md says why.
        match: How the profiler's view fits the trace; None when no profiler ran.
        profile_ended: Whether the traced code ran a profiler of its own, which ended the tracer's.
        scope: Which keys were watched.
        error: The exception that ended the traced code and the user's line that raised it; empty if it ended by itself.
        counted: Number of hops that were counted as alike to others after the first ``max_hops``, and not kept.
        dropped: Number of hops that were neither kept nor alike to kept ones.
        above: Qualified names of the ``__torch_function__`` that calls came through before they were dispatched.
        waiting: Operators that have no shim since they wait for other threads; empty in a process without
            ``torch.distributed``.
    """

    def __init__(self, scope: Scope) -> None:
        self.error = ""
        self.unrecorded: dict[str, int] = {}
        self.counted = self.dropped = 0
        self.above: frozenset[str] = frozenset()
        self.waiting: frozenset[str] = frozenset()
        self.count: Callable[[], int] = lambda: 0
        self._assemble: Callable[[], tuple[list[Call], dict[str, int]]] = lambda: ([], {})
        self.match: Match | None = None
        self.profile_ended = False
        self.scope = scope

    @property
    def hop_count(self) -> int:
        """Number of hops so far, kept or not; while the traced code runs too."""
        return self.count()

    def assemble_with(self, assemble: Callable[[], tuple[list[Call], dict[str, int]]]) -> None:
        """Set what makes :attr:`calls` and :attr:`unshimmed` when one of them is first read."""
        self._assemble = assemble
        vars(self).pop("_assembled", None)

    def assemble(self) -> None:
        """Make the calls now, rather than when they are first read."""
        _ = self._assembled

    @cached_property
    def _assembled(self) -> tuple[list[Call], dict[str, int]]:
        assembled, self._assemble = self._assemble(), lambda: ([], {})
        return assembled

    @property
    def calls(self) -> list[Call]:
        """Operator calls that the traced code made, in order. The calls that those made are inside them."""
        return self._assembled[0]

    @property
    def unshimmed(self) -> dict[str, int]:
        """Number of times that a recorded call went through a Python kernel without shim, by operator and key."""
        return self._assembled[1]

    @property
    def all_calls(self) -> list[Call]:
        """Every call, nested ones too, in order."""
        return [call for top in self.calls for call in top.walk()]

    @property
    def hops(self) -> list[Hop]:
        """Every hop, in order of arrival."""
        return sorted((hop for call in self.all_calls for hop in call.hops), key=lambda hop: hop.number)

    @property
    def agreement(self) -> tuple[int, int]:
        """Number of hops whose key was predicted, and number of all hops that were seen or predicted."""
        calls = self.all_calls
        agreed = sum(hop.predicted == hop.key for call in calls for hop in call.hops)
        return agreed, sum(len(call.hops) + len(call.missed) for call in calls)

    @property
    def notes(self) -> list[str]:
        """What this trace does not show, each in one sentence."""
        notes = [] if self.calls or self.unrecorded else ["No operator was called."]
        if self.error:
            notes.append(self._error_note())
        if self.above - {"Tensor.__torch_function__"}:
            notes.append(f"Ran above the dispatcher and may have changed calls: {_above(self.above)}.")
        if self.counted or self.dropped:
            notes.append(self.kept_note())
        if self.waiting:
            notes.append(f"{' and '.join(sorted(self.waiting))} are not watched, since they wait for other threads.")
        notes.append(f"{_ALWAYS} {', '.join(unwatched_keys(self.scope))} are not watched.")
        for operator, count in self.unrecorded.items():
            notes.append(
                f"What a tensor subclass's constructor calls ({operator}) is not recorded; it ran {_times(count)}."
            )
        for place, count in self.unshimmed.items():
            notes.append(f"{place}, a Python kernel, is not watched; it ran {_times(count)}.")
        if by_python := sum(by_python_dispatcher(call) for call in self.all_calls):
            notes.append(
                f"Torch's Python dispatcher, which torch.compile and torch.export use, chose the kernels of {by_python}"
                " calls: each of its redispatches is shown as a new call. To trace a compiled call, compile it first."
            )
        if self.profile_ended:
            notes.append(ENDED)
        if self.match is not None and self.match.untied_kernels:
            notes.append(
                f"{self.match.untied_kernels} of {self.match.kernels} device kernels ran under no recorded call."
            )
        return notes

    @property
    def raised_at(self) -> Hop | None:
        """The last hop that the exception left which ended the traced code; None if there is no such hop."""
        return next((hop for hop in reversed(self.hops) if hop.error and self.error.startswith(hop.error)), None)

    def _error_note(self) -> str:
        """The exception, unless a hop that it left has it already, and the line."""
        hop = self.raised_at
        if hop is None:
            return f"The traced code raised {self.error}. The trace ends there."
        line = self.error.removeprefix(hop.error).removeprefix(", at ") or "a line that is not known"
        return f"The traced code raised what hop {hop.number} raised, at {line}. The trace ends there."

    def kept_note(self) -> str:
        """How many hops were counted instead of kept, and how many were dropped."""
        others = f", and {numbers.count(self.dropped)} hops of other calls were dropped" if self.dropped else ""
        return (
            f"The trace is long: {numbers.count(self.counted)} hops in calls alike to earlier ones were counted there "
            f"and not kept{others}. --max-hops (in Python max_hops=) keeps more; the last calls are always kept."
        )

    @property
    def findings(self) -> list[Finding]:
        """Hidden copies, synchronisations, fallbacks and wrong predictions, in order."""
        return findings(self.calls)

    def to_json(self) -> dict[str, Any]:
        """The trace as plain JSON, with the versions that its facts depend on."""
        return {
            "schema_version": SCHEMA_VERSION,
            "torch": torch.__version__,
            "scope": self.scope,
            "calls": calls_to_json(self.calls),
            "match": None if self.match is None else asdict(self.match),
            "notes": self.notes,
            "findings": [asdict(finding) for finding in self.findings],
            "evidence": EVIDENCE,
        }

    def to_markdown(self, shown: Shown = EVERYTHING) -> str:
        """The trace as a tree, followed by the reason for each hop.

        Args:
            shown: The part that is printed; everything by default.
        """
        return text.markdown(self.calls, self.notes, shown, failed=bool(self.error))

    def summary(self) -> str:
        """The trace in a few lines: what ran, unexpected hops with their reasons, findings, and what to know of it."""
        inside, hops = _number(len(self.all_calls), "call"), _number(len(self.hops), "hop")
        whole = f"--full prints the tree of {inside} and {hops}, and each reason."
        about = [note for note in self.notes if not note.startswith(_ALWAYS)]
        return "".join(
            f"{line}\n"
            for line in [*answer(self.calls, failed=bool(self.error)), *about, *([whole] if self.calls else [])]
        )

    def to_perfetto(self) -> dict[str, Any]:
        """The trace on a time axis, as a Chrome trace that https://ui.perfetto.dev opens.

        Most of the time between two hops is the tracer's own.
        """
        return perfetto.trace_events(self.calls)

    def to_html(self, title: str = "A trace through the dispatcher") -> str:
        """The trace as one self-contained page that folds and searches; it opens from ``file://``."""
        return viewer.page(self.calls, title=title, notes=self.notes)


def _above(names: Iterable[str]) -> str:
    """The modes and subclasses whose ``__torch_function__`` these are."""
    known = {"DeviceContext": "a default device (torch.device as a context, or torch.set_default_device)"}
    owners = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in names} - {"Tensor"})
    return ", ".join(known.get(owner, f"{owner}.__torch_function__") for owner in owners)


def _number(count: int, noun: str) -> str:
    return f"{numbers.count(count)} {noun}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

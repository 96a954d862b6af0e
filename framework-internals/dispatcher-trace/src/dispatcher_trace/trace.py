"""Recording a walk: the context manager ``trace`` and what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from dispatcher_trace import assemble, dispatcher, keys, perfetto, predict, profile, render, viewer
from dispatcher_trace.findings import Finding, findings
from dispatcher_trace.native_step import Stepper
from dispatcher_trace.recorder import RawHop, Recorder
from dispatcher_trace.records import EVIDENCE, SCHEMA_VERSION, Call, Hop, calls_to_json
from dispatcher_trace.shim import Shims, installed


class Trace:
    """A recorded walk; empty until the block that recorded it has ended.

    Attributes:
        calls: the operator calls that the traced code made, in order; what those called is inside them.
        unrecorded: operator calls that ran without a shim, by operator: see NOTES.md on tensor subclasses.
        unshimmed: how often recorded calls went through a Python kernel of torch's own, which has no shim, by operator
            and key.
        match: how the profiler's view fits, where kernels were asked for.
        scope: which keys were watched.
    """

    def __init__(self, scope: keys.Scope) -> None:
        self.calls: list[Call] = []
        self.unrecorded: dict[str, int] = {}
        self.unshimmed: dict[str, int] = {}
        self.match: profile.Match | None = None
        self.scope = scope

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
        """Hops whose key the static prediction named, of all positions that were seen or predicted."""
        calls = self.all_calls
        agreed = sum(hop.predicted == hop.key for call in calls for hop in call.hops)
        return agreed, sum(len(call.hops) + len(call.missed) for call in calls)

    @property
    def notes(self) -> list[str]:
        """What this walk does not show, each in one sentence."""
        notes = [] if self.calls or self.unrecorded else ["No operator was called."]
        notes.append(f"Hops at {', '.join(keys.unwatched(self.scope))} are not watched.")
        for operator, count in self.unrecorded.items():
            notes.append(f"{operator} ran {_times(count)} inside a tensor subclass's constructor, unrecorded.")
        for place, count in self.unshimmed.items():
            notes.append(f"{place}, a Python kernel of torch's own, is not watched; {_times(count)}.")
        if by_python := sum(predict.by_python(call) for call in self.all_calls):
            notes.append(
                f"Torch's dispatcher in Python, which compiles and exports by it, chose the kernels of {by_python} "
                "calls: what it handed on is shown as a call of its own. To walk a compiled call, compile it before."
            )
        if self.match is not None and self.match.untied_kernels:
            notes.append(
                f"{self.match.untied_kernels} of {self.match.kernels} device kernels ran under no recorded call."
            )
        return notes

    @property
    def findings(self) -> list[Finding]:
        """Hidden copies, synchronisations and wrong predictions, in order."""
        return findings(self.calls)

    def to_json(self) -> dict[str, Any]:
        """The walk as plain JSON, with the versions that its facts depend on."""
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

    def to_markdown(self) -> str:
        """The walk as a tree, and under it why each hop happened."""
        return render.walk(self.calls, self.notes)

    def to_perfetto(self) -> dict[str, Any]:
        """The walk on a time axis, as a Chrome trace that https://ui.perfetto.dev opens.

        The times are those of the traced run: what lies between two hops is mostly the tracer.
        """
        return perfetto.trace_events(self.calls)

    def to_html(self, title: str = "A walk through the dispatcher") -> str:
        """The walk as one self-contained page: fold, search, hover for keys; works from ``file://``."""
        return viewer.page(self.calls, title=title, notes=self.notes)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


@contextmanager
def record(shims: Shims, *, kernels: bool | None = None, native: bool = False) -> Iterator[Trace]:
    """Record one walk with shims that are installed already, to record several without installing each time.

    Args:
        shims: from :func:`dispatcher_trace.shim.installed`.
        kernels: run the profiler as well and tie device kernels to calls; by default where torch sees a GPU.
        native: single-step CPU kernels, each kind once; see :mod:`dispatcher_trace.native_step`.

    Raises:
        UserError: when this machine cannot single-step.
        RuntimeError: when a recording is running, or kernels are asked for and a profiler is running.
    """
    if shims.recorder is not None:
        raise RuntimeError("a recording is running already; end its block first")
    if kernels is None:
        kernels = torch.cuda.is_available()
    trace = Trace(shims.scope)
    stepper = Stepper() if native else None
    firsts: list[RawHop] = []
    profiled: profile.Profile | None = None
    # Assembled and tied also when the traced code raised: the walk to the error is what one wants to see then.
    try:
        with profile.profiled() if kernels else nullcontext() as profiled:
            recorder = shims.recorder = Recorder(shims.number_labels)
            shims.stepper = stepper
            try:
                yield trace
            finally:
                shims.recorder = shims.stepper = None
                trace.unrecorded = recorder.unrecorded
                trace.calls, firsts, trace.unshimmed = assemble.calls_of(recorder, shims.tables)
    finally:
        if profiled is not None:  # the events are there once its block has ended
            trace.match = profile.tie(profiled.events, firsts, trace.calls)


@contextmanager
def trace(*, scope: keys.Scope = "all", kernels: bool | None = None, native: bool = False) -> Iterator[Trace]:
    """Record every hop through the dispatcher that the code of the block causes, on any thread.

    Installing takes three seconds (one with ``scope="core"``); a hop costs tens of microseconds. Results
    are bit-equal to those without, and the dispatch tables are what they were when the block ends, however it ends.

    Args:
        scope: the keys to watch, as :func:`dispatcher_trace.keys.watched` has it.
        kernels: also name the device kernels, through the profiler; by default where torch sees a GPU.
        native: also single-step CPU kernels, each kind once: names the routines that ran below them, at 1 to 15 µs an
            instruction.

    Raises:
        RuntimeError: when a trace is active already, here or on another thread, or torch lacks what is needed.
    """
    with installed(scope) as shims, record(shims, kernels=kernels, native=native) as walk:
        yield walk


def table_of(operator: str) -> dispatcher.Table:
    """The static dispatch table of an operator.

    Raises:
        ValueError: for an operator that does not exist, with near names.
    """
    if not dispatcher.is_operator(operator):
        near = render.near_names(operator, dispatcher.operators())
        raise ValueError(f"no operator {operator!r}{near}")
    return dispatcher.table(operator)

"""Device kernels from ``torch.profiler``, matched with the calls of a trace.

The profiler sees every operator call (but no redispatch) and, on a GPU, every kernel with the call that launched it.
The shims see the same calls. Both lists are in order on each thread, so the n-th operator of the profile is the n-th
call of the trace. Where the lists differ, they are aligned and the difference is counted.
"""

from __future__ import annotations

import difflib
import json
import tempfile
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchkit.timing.profiling import quiet_profiler
from dispatcher_trace.capture import dispatcher
from dispatcher_trace.capture.recorder import RawHop
from dispatcher_trace.capture.types import Call, Kernel

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})

ENDED = (
    "The code ran a profiler of its own, which ended the tracer's: device kernels and operators' times are not known."
)


@dataclass
class Profile:
    """What the profiler saw.

    Attributes:
        events: Events of its Chrome trace; empty until the block has ended, and if the block ran a profiler of its own.
    """

    events: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Match:
    """How a profile and a trace of the same run match.

    Attributes:
        operators: Number of operator calls in the profile, without the tracer's own.
        calls: Number of calls in the trace.
        tied: Number of calls that are matched with an operator of the profile.
        kernels: Number of device kernels, copies and fills in the profile.
        untied_kernels: Number of those that no call of the trace launched.
    """

    operators: int
    calls: int
    tied: int
    kernels: int
    untied_kernels: int


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile the block, on the CPU and on the GPU if there is one.

    Raises:
        RuntimeError: If another profiler is running: a process can have only one.
    """
    if dispatcher.profiler_enabled():
        raise RuntimeError("torch.profiler is running already; end it, or trace without kernels (kernels=False)")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = Profile()
    with warnings.catch_warnings(), quiet_profiler():
        # Warnings about the profiler's own set-up do not concern the traced code.
        warnings.filterwarnings("ignore", module=r"torch\.(profiler|autograd\.profiler)")
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
    try:
        yield profile
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running = dispatcher.profiler_enabled()
        profiler.stop()
        if running:  # else torch has no results, and exporting them crashes the process
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                profiler.export_chrome_trace(str(path))
                profile.events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def attach_kernels(events: Sequence[dict[str, Any]], raws: Sequence[RawHop], calls: Sequence[Call]) -> Match:
    """Put each device kernel under the call that launched it.

    Args:
        events: Events of the profile.
        raws: The captured first hop of every call, in order of their numbers.
        calls: The top-level calls; their ``kernels`` and those of the calls inside are filled in.
    """
    operators = _operator_events(events)
    by_number = {call.hops[0].number: call for top in calls for call in top.walk()}
    call_of_event: dict[int | None, Call] = {}
    tied: list[tuple[RawHop, dict[str, Any]]] = []
    for thread in {raw.native_thread for raw in raws}:
        ours = [raw for raw in raws if raw.native_thread == thread]
        theirs = [event for event in operators if event["tid"] == thread]
        names = [raw.operator.partition(".")[0] for raw in ours]
        pairs = [(ours[i], theirs[j]) for i, j in matching_positions(names, [event["name"] for event in theirs])]
        tied += pairs
        for raw, event in pairs:
            call_of_event[event["args"]["External id"]] = by_number[raw.number]
    launches = _launches(events)
    clock = _clock(tied)
    launched, untied = 0, 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("cat") not in _DEVICE_CATEGORIES:
            continue
        launched += 1
        args = event["args"]
        call = call_of_event.get(args.get("External id")) or call_of_event.get(launches.get(args.get("correlation")))
        if call is None:
            untied += 1
        else:
            call.kernels = (*call.kernels, _kernel(event, clock))
    return Match(len(operators), len(by_number), len(call_of_event), launched, untied)


def operator_names(events: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the operator calls of a profile, in order, without overloads."""
    return [event["name"] for event in _operator_events(events)]


@dataclass(frozen=True)
class Span:
    """One operator call of a profile.

    Attributes:
        name: Name of the operator, without overload.
        seconds: Time of the call without the operators inside it. If the profile has device kernels, their time.
    """

    name: str
    seconds: float


def operator_spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """The operator calls of a profile, in order on each thread; threads in order of their first call."""
    operators = _operator_events(events)
    threads = dict.fromkeys(event["tid"] for event in operators)
    ordered = [event for thread in threads for event in operators if event["tid"] == thread]
    on_device = _device_seconds(events)
    own = _own_seconds(ordered)
    times = [on_device.get(event["args"].get("External id"), 0.0) for event in ordered] if on_device else own
    return [Span(event["name"], seconds) for event, seconds in zip(ordered, times, strict=True)]


def _own_seconds(ordered: Sequence[dict[str, Any]]) -> list[float]:
    """Duration of each event minus the events directly inside it. The events of a thread must be in order."""

    def encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
        return outer["tid"] == inner["tid"] and inner["ts"] < outer["ts"] + outer["dur"]

    own = [event["dur"] * 1e-6 for event in ordered]
    open_spans: list[int] = []
    for index, event in enumerate(ordered):
        while open_spans and not encloses(ordered[open_spans[-1]], event):
            open_spans.pop()
        if open_spans:
            own[open_spans[-1]] -= event["dur"] * 1e-6
        open_spans.append(index)
    return [max(seconds, 0.0) for seconds in own]


def _device_seconds(events: Sequence[dict[str, Any]]) -> dict[int | None, float]:
    """Device time by the identifier of the operator that launched it; empty without a GPU."""
    launches = _launches(events)
    times: dict[int | None, float] = {}
    for event in events:
        if event.get("cat") in _DEVICE_CATEGORIES:
            args = event["args"]
            launcher = args.get("External id") or launches.get(args.get("correlation"))
            times[launcher] = times.get(launcher, 0.0) + event.get("dur", 0) * 1e-6
    return times


def match_calls(calls: Sequence[Call], names: Sequence[str]) -> dict[int, Call]:
    """Match the operators of a profile with the calls of a trace.

    Args:
        calls: All calls of the trace, in order.
        names: Names of the profile's operators, thread by thread.

    Returns:
        The call of each matched operator, by the operator's index in ``names``.
    """
    threads = dict.fromkeys(call.hops[0].thread for call in calls)
    ordered = [call for thread in threads for call in calls if call.hops[0].thread == thread]
    pairs = matching_positions([call.operator.partition(".")[0] for call in ordered], names)
    return {theirs: ordered[ours] for ours, theirs in pairs}


def _operator_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operator calls in order, without the tracer's own."""
    known = {name.partition(".")[0] for name in dispatcher.operators()}
    operators = [event for event in events if event.get("cat") == "cpu_op" and event.get("name") in known]
    own = [event for event in events if event.get("name") == dispatcher.OWN_WORK and "dur" in event]
    spans = [(event["tid"], event["ts"], event["ts"] + event["dur"]) for event in own]
    outside = [
        event
        for event in operators
        if not any(event["tid"] == tid and start <= event["ts"] <= stop for tid, start, stop in spans)
    ]
    return sorted(outside, key=lambda event: event["ts"])


def matching_positions(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs of positions where the two sequences are equal, in order.

    What both begin with and end with is matched first: difflib compares every position with every other one where a
    loop calls the same operator again and again.
    """
    shorter = min(len(a), len(b))
    start = next((at for at in range(shorter) if a[at] != b[at]), shorter)
    end = next((at for at in range(shorter - start) if a[-1 - at] != b[-1 - at]), shorter - start)
    matcher = difflib.SequenceMatcher(None, a[start : len(a) - end], b[start : len(b) - end], autojunk=False)
    blocks = [(start + block.a, start + block.b, block.size) for block in matcher.get_matching_blocks()]
    blocks = [(0, 0, start), *blocks, (len(a) - end, len(b) - end, end)]
    return [(ours + at, theirs + at) for ours, theirs, size in blocks for at in range(size)]


def _launches(events: Sequence[dict[str, Any]]) -> dict[Any, Any]:
    """The operator of each launch, by correlation number: some device events name only their launch."""
    return {
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }


def _clock(tied: Sequence[tuple[RawHop, dict[str, Any]]]) -> float | None:
    """Nanoseconds from the profiler's clock to the trace's clock; None if no call is matched."""
    if not tied:
        return None
    # A shim starts after the profiler's span, so the smallest difference is the closest.
    return min(raw.start_ns - event["ts"] * 1e3 for raw, event in tied)


def _kernel(event: dict[str, Any], clock: float | None) -> Kernel:
    args = event["args"]
    return Kernel(
        name=event["name"],
        grid=tuple(args.get("grid", ())),
        block=tuple(args.get("block", ())),
        seconds=event.get("dur", 0) * 1e-6,
        registers=args.get("registers per thread"),
        shared_memory=args.get("shared memory"),
        stream=args.get("stream"),
        start_ns=0 if clock is None else round(event["ts"] * 1e3 + clock),
    )

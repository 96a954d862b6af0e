"""Below the backend key: device kernels from ``torch.profiler``, tied to the calls of a walk.

The profiler sees every operator call (not redispatches) and, on a GPU, every kernel with the call that launched it. The
shims see the same calls. Both in order, thread by thread: the n-th operator that the profiler saw on a thread is the
n-th call of the walk there, and where the two lists differ they are aligned and the difference is counted.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dispatcher_trace import dispatcher
from dispatcher_trace.recorder import RawHop
from dispatcher_trace.records import Call, Kernel

_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass
class Profile:
    """What the profiler saw.

    Attributes:
        events: of its Chrome trace; empty until the block has ended.
    """

    events: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto prints two lines to standard error at the first profile of a process, unless told otherwise."""
    told = os.environ.get(_KINETO_LOG_LEVEL)
    os.environ.setdefault(_KINETO_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if told is None:
            del os.environ[_KINETO_LOG_LEVEL]


@dataclass(frozen=True)
class Match:
    """How the profiler's view and the walk fit.

    Attributes:
        operators: operator calls that the profiler saw, without the tracer's own.
        calls: calls in the walk.
        tied: calls with an operator of the profiler.
        kernels: device kernels, copies and fills that the profiler saw.
        untied_kernels: those of them under no call of the walk.
    """

    operators: int
    calls: int
    tied: int
    kernels: int
    untied_kernels: int


@contextmanager
def profiled() -> Iterator[Profile]:
    """Profile the block, and the GPU where there is one.

    Raises:
        RuntimeError: when another profiler is running: there is one in a process.
    """
    if dispatcher.profiler_enabled():
        raise RuntimeError("torch.profiler is running already; end it, or trace without kernels (kernels=False)")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = Profile()
    with warnings.catch_warnings(), _quiet_kineto():
        # Whatever the profiler remarks on its own set-up is not the traced code's.
        warnings.filterwarnings("ignore", module=r"torch\.(profiler|autograd\.profiler)")
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
    try:
        yield profile
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            profile.events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def tie(events: Sequence[dict[str, Any]], raws: Sequence[RawHop], calls: Sequence[Call]) -> Match:
    """Put each device kernel under the call that launched it.

    Args:
        events: of the profile.
        raws: the raw first hop of every call, by number.
        calls: the top-level calls, whose ``kernels`` are filled in.
    """
    operators = _operator_events(events)
    by_number = {call.hops[0].number: call for top in calls for call in top.walk()}
    call_of_event: dict[int | None, Call] = {}
    for thread in {raw.native_thread for raw in raws}:
        ours = [raw for raw in raws if raw.native_thread == thread]
        theirs = [event for event in operators if event["tid"] == thread]
        for raw, event in _align(ours, theirs):
            call_of_event[event["args"]["External id"]] = by_number[raw.number]
    # A device event names the operator that launched it, or only the launch, which names the operator.
    launches = {
        event["args"]["correlation"]: event["args"].get("External id")
        for event in events
        if event.get("cat") in _LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
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
            call.kernels = (*call.kernels, _kernel(event))
    return Match(len(operators), len(by_number), len(call_of_event), launched, untied)


def operator_names(events: Sequence[dict[str, Any]]) -> list[str]:
    """The operators that a profile saw, in order, without overloads."""
    return [event["name"] for event in _operator_events(events)]


def _operator_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operator calls in order, without those that the tracer made."""
    known = {name.partition(".")[0] for name in dispatcher.operators()}
    found = [event for event in events if event.get("cat") == "cpu_op" and event.get("name") in known]
    own = [event for event in events if event.get("name") == dispatcher.OWN_WORK and "dur" in event]
    spans = [(event["tid"], event["ts"], event["ts"] + event["dur"]) for event in own]
    outside = [
        event
        for event in found
        if not any(event["tid"] == tid and start <= event["ts"] <= stop for tid, start, stop in spans)
    ]
    return sorted(outside, key=lambda event: event["ts"])


def _align(ours: Sequence[RawHop], theirs: Sequence[dict[str, Any]]) -> list[tuple[RawHop, dict[str, Any]]]:
    names = [raw.operator.partition(".")[0] for raw in ours]
    matcher = difflib.SequenceMatcher(None, names, [event["name"] for event in theirs], autojunk=False)
    return [
        (ours[block.a + offset], theirs[block.b + offset])
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    ]


def _kernel(event: dict[str, Any]) -> Kernel:
    args = event["args"]
    return Kernel(
        name=event["name"],
        grid=tuple(args.get("grid", ())),
        block=tuple(args.get("block", ())),
        seconds=event.get("dur", 0) * 1e-6,
        registers=args.get("registers per thread"),
    )

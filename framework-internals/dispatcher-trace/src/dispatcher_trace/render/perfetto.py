"""A trace in the Chrome trace format: one track of calls and hops per thread, one track of kernels per stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dispatcher_trace.capture.types import Call, Hop, Kernel

_HOST, _DEVICE = 1, 2


def trace_events(calls: Sequence[Call]) -> dict[str, Any]:
    """The document that ui.perfetto.dev and chrome://tracing open; times in microseconds from the start of the trace.

    An arrow leads from each call to the device kernels that it launched.
    """
    threads = {hop.thread: None for top in calls for call in top.walk() for hop in call.hops}
    tracks = {thread: number for number, thread in enumerate(threads, 1)}
    events = [_metadata(_HOST, 0, "process_name", "dispatcher")]
    events += [_metadata(_HOST, number, "thread_name", thread) for thread, number in tracks.items()]
    every = [call for top in calls for call in top.walk()]
    if any(call.kernels for call in every):
        events.append(_metadata(_DEVICE, 0, "process_name", "device"))
    flow = 0
    for call in every:
        events += _host_events(call, tracks)
        for kernel in call.kernels:
            flow += 1
            events += _device_events(call, kernel, flow, tracks)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _host_events(call: Call, tracks: dict[str, int]) -> Iterator[dict[str, Any]]:
    first = call.hops[0]
    track = tracks[first.thread]
    arguments = {"call": call.title, "source": call.source, "node": first.node}
    yield _span(call.operator, "call", track, first.start_ns, first.stop_ns, arguments)
    for hop in call.hops:
        yield _span(hop.key, "hop", track, hop.start_ns, hop.stop_ns, _hop_arguments(hop))


def _hop_arguments(hop: Hop) -> dict[str, Any]:
    return {
        "hop": hop.number,
        "operator": hop.operator,
        "keys": ", ".join(hop.keys),
        "kernel": f"{hop.kind}, {hop.where}",
        "native": hop.native,
        "verdict": hop.verdict,
        "why": hop.why,
    }


def _device_events(call: Call, kernel: Kernel, flow: int, tracks: dict[str, int]) -> list[dict[str, Any]]:
    first = call.hops[0]
    start, stop = kernel.start_ns, kernel.start_ns + round(kernel.seconds * 1e9)
    arguments = {
        "launched by": call.operator,
        "grid": kernel.grid,
        "block": kernel.block,
        "registers": kernel.registers,
        "shared memory": kernel.shared_memory,
        "library": kernel.library,
    }
    stream = kernel.stream or 0
    arrow = {"name": "launch", "cat": "launch", "id": flow}
    return [
        _span(kernel.name, "kernel", stream, start, stop, arguments, process=_DEVICE),
        {**arrow, "ph": "s", "pid": _HOST, "tid": tracks[first.thread], "ts": first.start_ns / 1e3},
        {**arrow, "ph": "f", "bp": "e", "pid": _DEVICE, "tid": stream, "ts": start / 1e3},
    ]


def _span(
    name: str, category: str, track: int, start_ns: int, stop_ns: int, arguments: dict[str, Any], process: int = _HOST
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": track,
        "ts": start_ns / 1e3,
        "dur": max(stop_ns - start_ns, 0) / 1e3,  # a kernel that still ran when the trace ended has no stop
        "args": arguments,
    }


def _metadata(process: int, track: int, name: str, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}

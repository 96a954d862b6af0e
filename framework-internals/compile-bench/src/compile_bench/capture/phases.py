"""Splits the time of a compilation into phases, from the spans that PyTorch's timers record."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

PHASES = ("Dynamo", "AOTAutograd", "Inductor", "C++/Triton compiler", "Autotuning", "Caches")

# Names of dynamo_timed spans (torch/_dynamo/utils.py) and their phases. Any other span belongs to the phase of the span
# around it, so a new inner span in a later PyTorch moves no time between phases.
_PHASE_PATTERNS = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (
            r"entire_frame_compile|_compile\.compile_inner|dynamo|bytecode_tracing|build_guards|compile_attempt_",
            "Dynamo",
        ),
        (r"create_aot_dispatcher_function|aot_|backend_compile|OutputGraph\.call_user_compiler|min_cut", "AOTAutograd"),
        (r"AOTAutogradCache|FxGraphCache|CacheBase|inductor_codecache_torch_key|TritonBundler|pgo\.", "Caches"),
        (r"PyCodeCache\.load_by_key_path", "Caches"),
        (r"compile_file|async_compile\.|.*precompil|reload_kernel|CUDACompile", "C++/Triton compiler"),
        (r"CachingAutotuner\.(benchmark|coordinate|combo)|.*_template_autotuning|benchmark_", "Autotuning"),
        (
            r"inductor_compile|compile_fx|fx_codegen|_recursive_|entire_backward_compile|backward\._backward_impl"
            r"|GraphLowering|Scheduler|code_gen",
            "Inductor",
        ),
    )
)


def without_pauses(
    timed: Iterable[Mapping[str, Any]], pauses: Sequence[tuple[float, float]]
) -> list[Mapping[str, Any]]:
    """Take the pauses of a process out of the times of its events.

    A pause is begin and end, in seconds since the epoch; they are in order and do not overlap.
    """
    begins = [begin for begin, _ in pauses]
    before = [0.0, *accumulate(end - begin for begin, end in pauses)]

    def paused(until: float) -> float:
        count = bisect_right(begins, until)  # not a loop: autotuning waits for its lock thousands of times
        return before[count] - max(pauses[count - 1][1] - until, 0.0) if count else 0.0

    return [{**event, "ts": event["ts"] - paused(event["ts"] * 1e-6) * 1e6} for event in timed]


def phase_seconds(timed: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Split the time of a compilation into phases, so that each instant belongs to one phase.

    The events of several threads are on one track. The span that opened last decides the phase of an instant. While
    Inductor waits for the C++ compiler, for example, the phase is that of the C++ compiler. An event has ``name``,
    ``ph`` (``"B"`` or ``"E"``) and ``ts`` in microseconds. Phases that did not occur are left out.
    """
    open_spans: list[tuple[str, str]] = []  # name, phase
    seconds: dict[str, float] = {}
    last = 0.0
    for event in sorted((event for event in timed if event["ph"] in "BE"), key=lambda event: float(event["ts"])):
        if open_spans:
            phase = open_spans[-1][1]
            seconds[phase] = seconds.get(phase, 0.0) + (event["ts"] - last) * 1e-6
        last = event["ts"]
        name = event["name"]
        if event["ph"] == "B":
            inherited = open_spans[-1][1] if open_spans else "Dynamo"
            phase = next((phase for pattern, phase in _PHASE_PATTERNS if pattern.match(name)), inherited)
            open_spans.append((name, phase))
            continue
        for index in range(len(open_spans) - 1, -1, -1):
            if open_spans[index][0] == name:
                del open_spans[index]
                break
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}

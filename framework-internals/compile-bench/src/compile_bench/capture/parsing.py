"""Turns events of PyTorch's structured trace into records.

This module takes text and numbers and returns typed records. It does not import torch, so recorded events of each
version of torch can test it. :mod:`compile_bench.capture.collector` collects the events.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter, columns_in, frames_in, plain_function
from compile_bench.capture.trace import (
    ASKED_FOR,
    BACKEND_FAILED,
    NOT_ENTERED,
    RECOMPILE_LIMIT,
    Break,
    CompileTrace,
    Graph,
    Recompile,
    categorise,
    one_line,
    parse_message,
    registry_number,
)

# How a guard names a Python float that the graph takes as a tensor: the float is what changed.
_NUMBER_AS_TENSOR = re.compile(r"___as_tensor\((.+?)\)\.item\(\)")
_GUARD_MADE_AT = re.compile(r"#\s+(?P<file>[^\s#]+\.py):(?P<line>\d+) in ")
_GRAPH_OPERATION = re.compile(r"^\s{8}\w+(: [^=]+)? = ", re.MULTILINE)
_GUARD_LATENCY = re.compile(r"Guard latency = ([\d.]+) us")
CACHE_EVENT = re.compile(r"(?:fx_graph|aotautograd|dynamo)_(?:bundled_)?cache_(?:hit|miss|bypass)")
_CALL_OUTSIDE = ("PyTorch itself keeps this call out of graphs: call it outside of what is compiled.",)
_BACKEND_TRACEBACK = "WON'T CONVERT"
_SKIPS_FRAME = ("cannot properly resume", "will skip tracing the frame", "falling back to eager", "cannot resume from")


@dataclass(frozen=True)
class Event:
    """One entry of the structured trace."""

    kind: str  # "dynamo_output_graph", "compilation_metrics", "chromium_event", or the name of an artifact
    compile_id: str  # "frame/compile" as PyTorch counts them; empty outside a compilation
    detail: Any  # metadata of the entry
    payload: str = ""  # text of the entry


@dataclass(frozen=True)
class _Guard:
    """A guard that failed."""

    compile_id: str  # id of the compilation that followed
    text: str  # the condition
    # The lines of the model that made the guard, outermost first; the function if PyTorch does not say them.
    stack: tuple[Frame, ...]


@dataclass(frozen=True)
class _Compilations:
    """What the events say about each compilation, by compile id."""

    metrics: Mapping[str, Mapping[str, Any]]  # PyTorch's metrics
    frames: Mapping[str, Frame]  # the compiled function, with its first line
    # The calls that led to the function, outermost first, and the function itself at the end.
    stacks: Mapping[str, tuple[Frame, ...]]

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Compilations:
        metrics = {event.compile_id: event.detail for event in events if event.kind == "compilation_metrics"}
        frames = {
            compile_id: Frame(str(entry.get("co_filename")), int(entry.get("co_firstlineno") or 0), entry["co_name"])
            for compile_id, entry in metrics.items()
            if entry.get("co_name")
        }
        stacks = {
            event.compile_id: tuple(
                Frame(frame["filename"], frame["line"], frame["name"], frame.get("loc") or "")
                for frame in event.detail["stack"]
                if frame["filename"]
            )
            for event in events
            if event.kind == "dynamo_start"
        }
        return cls(metrics, frames, stacks)

    def frame(self, compile_id: str) -> Frame:
        """The compiled function. A compilation that failed before it began has the frame of an earlier one."""
        if compile_id in self.frames:
            return self.frames[compile_id]
        return next((self.frames[key] for key in self.frames if _same_function(key, compile_id)), Frame("?", 0, "?"))

    def stack(self, compile_id: str) -> tuple[Frame, ...]:
        """The calls that led to the function, or to its latest compilation if this one has no stack."""
        if stack := self.stacks.get(compile_id):
            return stack
        return next((self.stacks[key] for key in reversed(list(self.stacks)) if _same_function(key, compile_id)), ())

    def callers(self, compile_id: str) -> tuple[Frame, ...]:
        """The calls that led to the function, without the function and what it is the rest of."""
        root, calls = self.frame(compile_id), self.stack(compile_id)[:-1]
        while (
            calls
            and root.function.startswith(RESUMED)
            and plain_function(calls[-1].function) == plain_function(root.function)
        ):
            calls = calls[:-1]
        return calls

    def stacks_of(self, compile_id: str) -> list[tuple[Frame, ...]]:
        """The calls that led to the function in this compilation, then in the others."""
        others = (stack for key, stack in self.stacks.items() if _same_function(key, compile_id) and key != compile_id)
        return [self.stacks.get(compile_id, ()), *others]


def _same_function(compile_id: str, other: str) -> bool:
    return compile_id.split("/")[0] == other.split("/")[0]


def read_events(
    events: Sequence[Event],
    *,
    user_code: UserCodeFilter | None = None,
    kernels: int = 0,
    handler_seconds: float = 0.0,
    pauses: Sequence[tuple[float, float]] = (),
) -> CompileTrace:
    """Turn the events of one block into records.

    Phases leave out the ``pauses`` of the process: begin and end in seconds since the epoch.
    """
    user_code = user_code or UserCodeFilter()
    compilations = _Compilations.of(events)
    guards = [_guard(event, compilations, user_code) for event in events if event.kind == "recompile_reasons"]
    graphs = _graphs(events, compilations)
    captured = {graph.compile_id for graph in graphs}
    breaks = _breaks(events, compilations, guards, user_code, captured)
    explained = captured | {compile_id for met in breaks for compile_id in met.compile_ids}
    return CompileTrace(
        graphs=graphs,
        breaks=breaks,
        recompiles=tuple(_recompile(guard, compilations, user_code) for guard in guards),
        phases=phase_seconds(
            without_pauses((event.detail for event in events if event.kind == "chromium_event"), pauses)
        ),
        cache_events=Counter(event.kind for event in events if CACHE_EVENT.fullmatch(event.kind)),
        kernels=kernels,
        handler_seconds=handler_seconds,
        empty=_empty(compilations, explained),
    )


def _graphs(events: Sequence[Event], compilations: _Compilations) -> tuple[Graph, ...]:
    latency = {
        event.compile_id: float(match[1]) * 1e-6 or None  # 0 inside of untimed_guards()
        for event in events
        if event.kind == "dynamo_cpp_guards_str" and (match := _GUARD_LATENCY.search(event.payload))
    }
    # Dynamo may trace a frame several times. The last graph of a compilation is the one that runs.
    texts = {event.compile_id: event.payload for event in events if event.kind == "dynamo_output_graph"}
    graphs = []
    for compile_id, text in texts.items():
        metrics = compilations.metrics.get(compile_id, {})
        graphs.append(
            Graph(
                compile_id,
                compilations.frame(compile_id).function,
                int(metrics.get("graph_op_count") or len(_GRAPH_OPERATION.findall(text))),
                int(metrics.get("guard_count") or 0),
                latency.get(compile_id),
                metrics.get("entire_frame_compile_time_s"),
            )
        )
    return tuple(graphs)


def _empty(compilations: _Compilations, explained: Collection[str]) -> tuple[Frame, ...]:
    """Functions of compilations that ended without a graph, a break or a failure."""
    empty = [
        frame
        for compile_id, frame in compilations.frames.items()
        if compile_id not in explained
        and not compilations.metrics[compile_id].get("fail_type")
        and not frame.function.startswith(RESUMED)
    ]
    return tuple(dict.fromkeys(empty))


def _breaks(
    events: Sequence[Event],
    compilations: _Compilations,
    guards: Sequence[_Guard],
    user_code: UserCodeFilter,
    captured: Collection[str],
) -> tuple[Break, ...]:
    frames = compilations.frames.values()
    resumed = {(frame.file, plain_function(frame.function)) for frame in frames if frame.function.startswith(RESUMED)}
    breaks = []
    for event in events:
        # PyTorch reports an error of the backend twice, first as a Python traceback.
        if event.kind == "dynamo_graph_break_reason" and not event.payload.startswith(_BACKEND_TRACEBACK):
            frame = compilations.frame(event.compile_id)
            met = _break(event, frame, user_code)
            # Torch 2.10 does not say that it skips a frame. It does so if it captured nothing, and if no function
            # resumes after the break: neither the compiled function nor the inlined one that broke.
            functions = {(frame.file, plain_function(frame.function)), (met.file, plain_function(met.function))}
            skipped = event.compile_id not in captured and not functions & resumed
            breaks.append(replace(met, whole_frame=met.whole_frame or skipped))
    breaks = _at_known_callers(breaks, user_code)
    reported = {compile_id for met in breaks for compile_id in met.compile_ids}
    # The recompile limit and suppressed errors of a backend have no graph-break artifact, only metrics.
    breaks += [
        _failure(entry, compile_id, compilations.frame(compile_id), guards, user_code)
        for compile_id, entry in compilations.metrics.items()
        if entry.get("fail_type") and compile_id not in reported
    ]
    placed = (_with_package(_at_users_call(met, compilations, user_code), user_code) for met in breaks)
    return merge_breaks(_with_callers(met, compilations, user_code) for met in placed)


def _with_callers(met: Break, compilations: _Compilations, user_code: UserCodeFilter) -> Break:
    """A break with the function that was compiled, and the line that called it."""
    compile_id = met.compile_ids[0]
    root = compilations.frame(compile_id)
    function = plain_function(root.function)
    within = [
        index
        for index, frame in enumerate(met.stack)
        if (frame.file, plain_function(frame.function)) == (root.file, function) and frame.line >= root.line
    ]
    # Several functions of a file may have one name; the line is in the one that begins last before it.
    start = min(within, key=lambda index: met.stack[index].line, default=None)
    callers = compilations.callers(compile_id) if start is None else met.stack[:start]
    called_at = _caller(callers, user_code)
    return replace(met, called_at=called_at, compiled=(replace(root, function=function),))


def _caller(calls: Sequence[Frame], user_code: UserCodeFilter) -> Frame | None:
    """The user's line among the calls that led to a compiled function; None for the model itself."""
    callers = [frame for frame in user_code.model_frames(calls) if user_code.is_user(frame.file)]
    return replace(callers[-1], function=plain_function(callers[-1].function)) if callers else None


def _with_package(met: Break, user_code: UserCodeFilter) -> Break:
    """A break with the package of its innermost line."""
    return replace(met, package=user_code.package(met.stack[-1].file if met.stack else met.file))


def _break(event: Event, frame: Frame, user_code: UserCodeFilter) -> Break:
    """The break that a graph-break artifact describes."""
    before, _, traceback = event.payload.partition("User code traceback:")
    traceback = traceback.split("\nTraceback (most recent call last):")[0]
    stack = frames_in(traceback)
    named = re.search(r"Graph break in user code at (.*):(\d+)", event.payload)
    place = user_code.innermost(stack)
    if place is None and named and not user_code.is_torch(named[1]):
        place = Frame(named[1], int(named[2]), frame.function)
    place = place or frame
    first = before.partition("*** While handling this graph break")[0].split("Graph Break Reason:")[-1]
    reason, explanation, hints = parse_message(first)
    category = categorise(reason, explanation)
    if category == ASKED_FOR and stack and user_code.is_torch(stack[-1].file):  # Optimizer.step and the like
        category, hints = NOT_ENTERED, _CALL_OUTSIDE
    return Break(
        **_location(place),
        reason=reason,
        explanation=explanation,
        hints=hints,
        category=category,
        whole_frame=any(marker in event.payload for marker in _SKIPS_FRAME),
        registry=registry_number(first),
        stack=user_code.model_frames(stack),
        compile_ids=(event.compile_id,),
        columns=columns_in(traceback, place),
    )


def _failure(
    entry: Mapping[str, Any],
    compile_id: str,
    frame: Frame,
    guards: Sequence[_Guard],
    user_code: UserCodeFilter,
) -> Break:
    """A compilation that failed without a graph-break artifact, from its metrics."""
    text = str(entry.get("fail_reason") or entry["fail_type"])
    reason, explanation, hints = parse_message(text)
    category = categorise(reason, explanation)
    stack = user_code.model_frames(frames_in(text))
    if not stack and category == RECOMPILE_LIMIT:
        # The line whose guard failed last has to change, not the function's first line.
        last = next((guard for guard in reversed(guards) if _same_function(guard.compile_id, compile_id)), None)
        stack = () if last is None else last.stack
    place = user_code.innermost(stack)
    if place is None:
        place = Frame(
            str(entry.get("fail_user_frame_filename") or frame.file),
            int(entry.get("fail_user_frame_lineno") or frame.line),
            str(entry.get("co_name") or frame.function),
        )
    return Break(
        **_location(place),
        reason=reason,
        explanation=explanation,
        hints=hints,
        category=category,
        whole_frame=True,
        registry=registry_number(text),
        stack=stack,
        compile_ids=(compile_id,),
    )


def _location(frame: Frame) -> dict[str, Any]:
    """The fields of a break that say where it is."""
    return {"file": frame.file, "line": frame.line, "function": frame.function, "source": frame.source}


def _at_known_callers(breaks: Sequence[Break], user_code: UserCodeFilter) -> list[Break]:
    """Move breaks in libraries to the user's line, if another break shows which line that is.

    If an operator fails in a library's function that Dynamo inlines, PyTorch names the library's line only. Then it
    compiles that function by itself, and names the whole stack.
    """
    known = {(met.stack[-1].place, met.reason): met for met in breaks if met.stack and user_code.is_user(met.file)}
    moved = []
    for met in breaks:
        whole = known.get((met.place, met.reason))
        if whole is not None and not user_code.is_user(met.file):
            names = ("file", "line", "function", "source", "stack", "columns")
            met = replace(met, **{name: getattr(whole, name) for name in names})
        moved.append(met)
    return moved


def _at_users_call(met: Break, compilations: _Compilations, user_code: UserCodeFilter) -> Break:
    """Move a break in a library's function that was compiled by itself to the user's line that called the function."""
    if user_code.is_user(met.file) or not met.compile_ids:
        return met
    calls = user_code.model_frames(compilations.stack(met.compile_ids[0]))
    caller = user_code.innermost(calls)
    if caller is None or not user_code.is_user(caller.file) or caller is calls[-1]:
        return met  # the last frame is the compiled function itself, with its first line
    here = Frame(met.file, met.line, met.function, met.source)
    return replace(
        met,
        **_location(replace(caller, function=plain_function(caller.function))),
        stack=(*calls[:-1], *(met.stack or (here,))),
        columns=None,
    )


def with_failing_lines(trace: CompileTrace, lines: Mapping[str, Frame], user_code: UserCodeFilter) -> CompileTrace:
    """A trace with the backend's failures at the lines of the operators that failed.

    ``lines`` has them by compile id.
    """
    breaks = []
    for met in trace.breaks:
        line = next((lines[compile_id] for compile_id in met.compile_ids if compile_id in lines), None)
        if line is not None and met.category == BACKEND_FAILED:
            if met.library and not user_code.is_user(line.file):
                met = replace(met, stack=(*met.stack, line))  # a library's line that the user's line called
            else:
                there = _location(replace(line, function=plain_function(line.function)))
                met = replace(met, **there, stack=(line,), columns=None)
            met = _with_package(met, user_code)
        breaks.append(met)
    return replace(trace, breaks=merge_breaks(breaks))


def merge_breaks(breaks: Iterable[Break]) -> tuple[Break, ...]:
    """Merge breaks with the same place and reason. Their counts add up."""
    merged: dict[tuple[str, int, str, str], Break] = {}
    for met in breaks:
        before = merged.get(met.identity)
        if before is not None:
            met = replace(
                before,
                times=before.times + met.times,
                compile_ids=tuple(dict.fromkeys(before.compile_ids + met.compile_ids)),
                whole_frame=before.whole_frame or met.whole_frame,
                compiled=tuple(dict.fromkeys(before.compiled + met.compiled)),
            )
        merged[met.identity] = met
    return tuple(merged.values())


def broken_in_error(text: str, kind: str, user_code: UserCodeFilter, raised_at: Sequence[Frame] = ()) -> Break | None:
    """The error of a failed compilation as a break, or None if it names no line of the model.

    Where the text names no line, the compiled code raised the error, and ``raised_at``, its traceback, gives the place.
    """
    named = frames_in(text.partition("from user code:")[2])
    stack = user_code.model_frames(named or raised_at)
    place = user_code.innermost(stack)
    if place is None:
        return None
    reason, explanation, hints = parse_message(text.split("\n\n")[0])
    met = Break(
        **_location(place),
        reason=f"{kind}: {reason}" if named else f"{kind}: {reason}; the model by itself does not raise it",
        explanation=explanation,
        hints=hints,
        category="compile error",
        whole_frame=True,
        stack=stack,
    )
    return _with_package(met, user_code)


def _guard(event: Event, compilations: _Compilations, user_code: UserCodeFilter) -> _Guard:
    try:
        reasons = json.loads(event.payload)
    except ValueError:  # a single reason comes as plain text
        reasons = event.payload
    newest = reasons[0] if isinstance(reasons, list) else str(reasons)
    frame = compilations.frame(event.compile_id)
    first_line = newest.split("\n")[0]
    stack = user_code.model_frames(frames_in(newest))
    made_at = _GUARD_MADE_AT.search(first_line)
    if not stack and made_at and frame.file.endswith(made_at["file"]):  # PyTorch leaves out the path's first folders
        source = "".join(first_line[: made_at.start()].split("  # ", 1)[1:]).strip()
        stack = (Frame(frame.file, int(made_at["line"]), frame.function, source),)
    text = one_line(re.sub(r"^\d+/\d+: ", "", first_line).split("  # ")[0])
    return _Guard(event.compile_id, _NUMBER_AS_TENSOR.sub(r"\1", text), stack or (frame,))


def _recompile(guard: _Guard, compilations: _Compilations, user_code: UserCodeFilter) -> Recompile:
    place = guard.stack[-1]
    callers = map(user_code.innermost, (guard.stack, *compilations.stacks_of(guard.compile_id)))
    caller = next((caller for caller in callers if caller is not None and user_code.is_user(caller.file)), None)
    called = caller is not None and not user_code.is_user(place.file)
    return Recompile(
        place.file,
        place.line,
        guard=guard.text,
        compile_id=guard.compile_id,
        function=compilations.frame(guard.compile_id).function,
        source=place.source,
        called_from=caller.place if called and caller is not None else "",
        package=user_code.package(place.file),
        called_at=_caller(compilations.callers(guard.compile_id), user_code),
    )


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

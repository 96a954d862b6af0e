"""What one compilation did, read from the events of PyTorch's structured trace.

Pure text and numbers in, typed records out: nothing here imports torch, so the formats that PyTorch prints are tested
on recorded events. :mod:`compile_bench.capture.collector` is what hands the events over.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter, columns_in, frames_in, plain_function
from compile_bench.capture.phases import phase_seconds, without_pauses
from compile_bench.capture.reasons import (
    ASKED_FOR,
    BACKEND_FAILED,
    NOT_ENTERED,
    RECOMPILE_LIMIT,
    categorise,
    cause_of,
    one_line,
    parse_message,
    registry_number,
)

_GUARD_MADE_AT = re.compile(r"#\s+(?P<file>[^\s#]+\.py):(?P<line>\d+) in ")
_GRAPH_OPERATION = re.compile(r"^\s{8}\w+(: [^=]+)? = ", re.MULTILINE)
_GUARD_LATENCY = re.compile(r"Guard latency = ([\d.]+) us")
_CACHE_EVENT = re.compile(r"(?:fx_graph|aotautograd|dynamo)_(?:bundled_)?cache_(?:hit|miss|bypass)")
_OUTSIDE = ("PyTorch itself keeps this call out of graphs: call it outside of what is compiled.",)
_BACKEND_TRACEBACK = "WON'T CONVERT"
_WHOLE_FRAME = ("cannot properly resume", "will skip tracing the frame", "falling back to eager", "cannot resume from")


@dataclass(frozen=True)
class Event:
    """One entry of the structured trace.

    Attributes:
        kind: ``"dynamo_output_graph"``, ``"compilation_metrics"``, ``"chromium_event"``, an artifact's name, ….
        compile_id: ``"frame/compile"`` as PyTorch counts them; empty outside a compilation.
        detail: the entry's metadata.
        payload: its text.
    """

    kind: str
    compile_id: str
    detail: Any
    payload: str = ""


@dataclass(frozen=True)
class Break:
    """A place where Dynamo stopped capturing and Python went on by itself.

    Attributes:
        file: of the user's code.
        line: in it, counted from 1; 0 when PyTorch did not say.
        function: that the line is in.
        source: the line's text.
        reason: what kind of break it is, in PyTorch's words.
        explanation: the sentence behind it.
        hints: what PyTorch proposes.
        category: one of a dozen families of reasons.
        whole_frame: whether the function was given up, as a whole or from a line before on, and runs eagerly for good,
            instead of being split.
        times: how often it was met (every recompilation meets it anew).
        registry: the number in PyTorch's published list, ``"GB0170"``; empty if it gave none.
        stack: the model's lines that led to it, outermost first, those of libraries included.
        compile_ids: the compilations that met it.
        columns: where in the line's text, without its indentation, what broke begins and ends: with the line where
            PyTorch does not say where it ends; None where it did not show the line.
    """

    file: str
    line: int
    function: str
    source: str
    reason: str
    explanation: str
    hints: tuple[str, ...]
    category: str
    whole_frame: bool
    times: int = 1
    registry: str = ""
    stack: tuple[Frame, ...] = ()
    compile_ids: tuple[str, ...] = ()
    columns: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"

    @property
    def identity(self) -> tuple[str, int, str, str]:
        """What tells breaks apart: line, reason, and where in a library that the line calls."""
        return self.file, self.line, self.reason, self.library

    @property
    def library(self) -> str:
        """The library line that the user's line led to; empty if the break is in the user's line itself."""
        last = self.stack[-1] if self.stack else None
        return "" if last is None or last.place == self.place else last.place


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again because a guard of the earlier code failed.

    Attributes:
        compile_id: of the new compilation, ``"0/1"``.
        function: that was compiled again.
        file: where it is.
        line: its first line, or the line that made the guard where PyTorch says so.
        guard: the condition that no longer held, against the newest earlier code.
        source: the line's text; empty where PyTorch does not say it.
        called_from: the user's line, ``file.py:LINE``, that called it; empty where ``file`` is the user's.
    """

    compile_id: str
    function: str
    file: str
    line: int
    guard: str
    source: str = ""
    called_from: str = ""

    @property
    def cause(self) -> str:
        """The family of the condition: tensor size, Python value, …."""
        return cause_of(self.guard)

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Graph:
    """One captured graph.

    Attributes:
        compile_id: ``"0/0"``.
        function: whose code it is.
        operations: calls in it, as Dynamo captured them.
        guards: conditions that are checked before every call.
        guard_seconds: one check of all of them, as PyTorch measured it; None where it did not.
        compile_seconds: of compiling it, all phases; None where PyTorch did not say.
    """

    compile_id: str
    function: str
    operations: int
    guards: int
    guard_seconds: float | None
    compile_seconds: float | None = None


@dataclass(frozen=True)
class EmptyFrame:
    """A function in whose first call Dynamo found no tensor operation: it is never looked at again.

    Attributes:
        file: of the function.
        line: its first.
        function: its name.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class CompileTrace:
    """All that was seen of the compilations in one ``with Collector()`` block.

    Attributes:
        graphs: captured, recompiled ones included.
        breaks: one for every place and reason.
        recompiles: in the order they happened.
        phases: seconds by phase (:data:`compile_bench.capture.phases.PHASES`), each instant counted once.
        cache_events: how often each cache was hit, missed or passed by.
        kernels: generated by Inductor (C++ loops or Triton kernels); 0 for another backend.
        handler_seconds: time spent in the collector itself.
        empty: functions that Dynamo gave up since their first call did nothing with tensors.
    """

    graphs: tuple[Graph, ...] = ()
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    cache_events: Mapping[str, int] = field(default_factory=dict)
    kernels: int = 0
    handler_seconds: float = 0.0
    empty: tuple[EmptyFrame, ...] = ()

    @property
    def guards(self) -> int:
        """Conditions over all graphs."""
        return sum(graph.guards for graph in self.graphs)

    @property
    def broken_lines(self) -> int:
        """Lines with a break, each counted once: one line may break for several reasons."""
        return len({(found.file, found.line) for found in self.breaks})

    @property
    def operations(self) -> int:
        """Captured calls over all graphs."""
        return sum(graph.operations for graph in self.graphs)


def read_events(
    events: Sequence[Event],
    *,
    user_code: UserCodeFilter | None = None,
    kernels: int = 0,
    handler_seconds: float = 0.0,
    pauses: Sequence[tuple[float, float]] = (),
) -> CompileTrace:
    """Turn the events of one block into records.

    Args:
        events: in the order they came.
        user_code: whose lines are whose; without it every line counts as the user's.
        kernels: passed on.
        handler_seconds: passed on.
        pauses: when the process stood still, begin and end in seconds since the epoch: no time of any phase.
    """
    user_code = user_code or UserCodeFilter()
    timed = [event.detail for event in events if event.kind == "chromium_event"]
    metrics = {event.compile_id: event.detail for event in events if event.kind == "compilation_metrics"}
    frames = {
        compile_id: Frame(str(entry.get("co_filename")), int(entry.get("co_firstlineno") or 0), entry["co_name"])
        for compile_id, entry in metrics.items()
        if entry.get("co_name")
    }
    starts = _stacks(events)
    recompiles = tuple(
        _recompile(event, frames, starts.get(event.compile_id, ()), user_code)
        for event in events
        if event.kind == "recompile_reasons"
    )
    graphs = _graphs(events, frames, metrics)
    captured = {graph.compile_id for graph in graphs}
    breaks = _breaks(events, frames, metrics, recompiles, user_code, captured)
    return CompileTrace(
        graphs=graphs,
        breaks=breaks,
        recompiles=recompiles,
        phases=phase_seconds(without_pauses(timed, pauses)),
        cache_events=Counter(event.kind for event in events if _CACHE_EVENT.fullmatch(event.kind)),
        kernels=kernels,
        handler_seconds=handler_seconds,
        empty=_empty(metrics, frames, graphs, breaks),
    )


def _frame_of(compile_id: str, frames: Mapping[str, Frame]) -> Frame:
    """The frame of a compilation, or of an earlier one of the same code when this one was given up before it began."""
    if compile_id in frames:
        return frames[compile_id]
    same = f"{compile_id.split('/')[0]}/"
    return next((frame for key, frame in frames.items() if key.startswith(same)), Frame("?", 0, "?"))


def _graphs(
    events: Sequence[Event], frames: Mapping[str, Frame], metrics: Mapping[str, Mapping[str, Any]]
) -> tuple[Graph, ...]:
    latency = {
        event.compile_id: float(found[1]) * 1e-6
        for event in events
        if event.kind == "dynamo_cpp_guards_str" and (found := _GUARD_LATENCY.search(event.payload))
    }
    # Dynamo may trace a frame more than once before it settles: the last graph of a compilation is the one that runs.
    texts = {event.compile_id: event.payload for event in events if event.kind == "dynamo_output_graph"}
    return tuple(
        Graph(
            compile_id,
            _frame_of(compile_id, frames).function,
            int(metrics.get(compile_id, {}).get("graph_op_count") or len(_GRAPH_OPERATION.findall(text))),
            int(metrics.get(compile_id, {}).get("guard_count") or 0),
            latency.get(compile_id),
            metrics.get(compile_id, {}).get("entire_frame_compile_time_s"),
        )
        for compile_id, text in texts.items()
    )


def _empty(
    metrics: Mapping[str, Mapping[str, Any]],
    frames: Mapping[str, Frame],
    graphs: Sequence[Graph],
    breaks: Sequence[Break],
) -> tuple[EmptyFrame, ...]:
    explained = {graph.compile_id for graph in graphs} | {each for entry in breaks for each in entry.compile_ids}
    found = [
        frames[compile_id]
        for compile_id, entry in metrics.items()
        if compile_id in frames
        and compile_id not in explained
        and not entry.get("fail_type")
        and not frames[compile_id].function.startswith(RESUMED)
    ]
    return tuple(dict.fromkeys(EmptyFrame(frame.file, frame.line, frame.function) for frame in found))


def _breaks(
    events: Sequence[Event],
    frames: Mapping[str, Frame],
    metrics: Mapping[str, Mapping[str, Any]],
    recompiles: Sequence[Recompile],
    user_code: UserCodeFilter,
    captured: Collection[str],
) -> tuple[Break, ...]:
    resumed = {(e.file, plain_function(e.function)) for e in frames.values() if e.function.startswith(RESUMED)}
    found = []
    for event in events:
        # An error of the backend is told twice, first as a Python traceback.
        if event.kind == "dynamo_graph_break_reason" and not event.payload.startswith(_BACKEND_TRACEBACK):
            frame = _frame_of(event.compile_id, frames)
            each = _break(event.payload, event.compile_id, frame, user_code)
            # torch 2.10 does not say it: nothing was captured, and nothing goes on behind the break, neither in the
            # function that was compiled nor in the one that it was following into.
            goes_on = {(frame.file, plain_function(frame.function)), (each.file, plain_function(each.function))}
            skipped = event.compile_id not in captured and not goes_on & resumed
            found.append(replace(each, whole_frame=each.whole_frame or skipped))
    found = _with_callers(found, user_code)
    told = {compile_id for entry in found for compile_id in entry.compile_ids}
    # Some failures never reach the graph-break artifact: the recompile limit, and errors of a backend that Dynamo
    # suppresses. They stand in the metrics of the compilation alone.
    failures = [
        _failure(entry, compile_id, _frame_of(compile_id, frames), recompiles, user_code)
        for compile_id, entry in metrics.items()
        if entry.get("fail_type") and compile_id not in told
    ]
    stacks = _stacks(events)
    # Of every function, by its number, also its latest compilation.
    stacks |= {compile_id.split("/")[0]: stack for compile_id, stack in stacks.items()}
    return merge_breaks(_called_by_user(each, stacks, user_code) for each in (*found, *failures))


def _stacks(events: Sequence[Event]) -> dict[str, tuple[Frame, ...]]:
    """Of every compilation who called the function, itself at the end."""
    return {
        event.compile_id: tuple(
            Frame(frame["filename"], frame["line"], frame["name"], frame.get("loc") or "")
            for frame in event.detail["stack"]
            if frame["filename"]
        )
        for event in events
        if event.kind == "dynamo_start"
    }


def _called_by_user(found: Break, stacks: Mapping[str, tuple[Frame, ...]], user_code: UserCodeFilter) -> Break:
    """A break in a library's function that was compiled by itself, at the user's line that called it."""
    if user_code.of_user(found.file) or not found.compile_ids:
        return found
    met = found.compile_ids[0]
    own = user_code.inside(stacks.get(met) or stacks.get(met.split("/")[0], ()))
    caller = user_code.innermost(own)
    if caller is None or not user_code.of_user(caller.file) or caller is own[-1]:
        return found  # of the function that was compiled only its first line is known
    there = Frame(found.file, found.line, found.function, found.source)
    return replace(
        found,
        file=caller.file,
        line=caller.line,
        function=plain_function(caller.function),
        source=caller.source,
        stack=(*own[:-1], *(found.stack or (there,))),
        columns=None,
    )


def _with_callers(breaks: Sequence[Break], user_code: UserCodeFilter) -> list[Break]:
    """Breaks in libraries, each at the user's line that led to it.

    Where an operator fails inside of a library's function that Dynamo follows into, PyTorch names the library's line
    alone; when it then compiles that function by itself it names the whole stack.
    """
    known = {
        (each.stack[-1].place, each.reason): each for each in breaks if each.stack and user_code.of_user(each.file)
    }
    attributed = []
    for each in breaks:
        whole = known.get((each.place, each.reason))
        if whole is not None and not user_code.of_user(each.file):
            names = ("file", "line", "function", "source", "stack", "columns")
            each = replace(each, **{name: getattr(whole, name) for name in names})
        attributed.append(each)
    return attributed


def with_lines(trace: CompileTrace, lines: Mapping[str, Frame], user_code: UserCodeFilter) -> CompileTrace:
    """A trace whose errors of a backend stand at the lines that they are about.

    Args:
        trace: what was seen.
        lines: of the operator that failed, by compilation.
        user_code: whose code a file is.
    """
    breaks = []
    for each in trace.breaks:
        line = next((lines[compile_id] for compile_id in each.compile_ids if compile_id in lines), None)
        if line is not None and each.category == BACKEND_FAILED and each.library and not user_code.of_user(line.file):
            each = replace(each, stack=(*each.stack, line))  # in a library, which the user's line called
        elif line is not None and each.category == BACKEND_FAILED:
            each = replace(
                each,
                file=line.file,
                line=line.line,
                function=plain_function(line.function),
                source=line.source,
                stack=(line,),
                columns=None,
            )
        breaks.append(each)
    return replace(trace, breaks=merge_breaks(breaks))


def merge_breaks(breaks: Iterable[Break]) -> tuple[Break, ...]:
    """One entry for every place and reason; how often it was met is added up."""
    merged: dict[tuple[str, int, str, str], Break] = {}
    for each in breaks:
        before = merged.get(each.identity)
        if before is None:
            merged[each.identity] = each
            continue
        compile_ids = tuple(dict.fromkeys(before.compile_ids + each.compile_ids))
        merged[each.identity] = replace(
            before,
            times=before.times + each.times,
            compile_ids=compile_ids,
            whole_frame=before.whole_frame or each.whole_frame,
        )
    return tuple(merged.values())


def _break(text: str, compile_id: str, frame: Frame, user_code: UserCodeFilter) -> Break:
    before, _, traceback = text.partition("User code traceback:")
    traceback = traceback.split("\nTraceback (most recent call last):")[0]
    stack = frames_in(traceback)
    own = user_code.inside(stack)
    named = re.search(r"Graph break in user code at (.*):(\d+)", text)
    place = user_code.innermost(stack)
    if place is None and named and not user_code.of_torch(named[1]):
        place = Frame(named[1], int(named[2]), frame.function)
    place = place or frame
    first = before.partition("*** While handling this graph break")[0].split("Graph Break Reason:")[-1]
    reason, explanation, hints = parse_message(first)
    category = categorise(reason, explanation)
    if category == ASKED_FOR and stack and user_code.of_torch(stack[-1].file):  # Optimizer.step and the like
        category, hints = NOT_ENTERED, _OUTSIDE
    return Break(
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        reason=reason,
        explanation=explanation,
        hints=hints,
        category=category,
        whole_frame=any(marker in text for marker in _WHOLE_FRAME),
        registry=registry_number(first),
        stack=own,
        compile_ids=(compile_id,),
        columns=columns_in(traceback, place),
    )


def _failure(
    entry: Mapping[str, Any],
    compile_id: str,
    frame: Frame,
    recompiles: Sequence[Recompile],
    user_code: UserCodeFilter,
) -> Break:
    """A compilation that failed without a graph-break message."""
    text = str(entry.get("fail_reason") or entry["fail_type"])
    reason, explanation, hints = parse_message(text)
    category = categorise(reason, explanation)
    same = f"{compile_id.split('/')[0]}/"
    last = next((each for each in reversed(recompiles) if each.compile_id.startswith(same)), None)
    place = user_code.innermost(frames_in(text))
    if place is None and category == RECOMPILE_LIMIT and last is not None:
        # The line whose guard failed last is what has to change, not the function's first line.
        place = Frame(last.file, last.line, last.function)
    if place is None:
        place = Frame(
            str(entry.get("fail_user_frame_filename") or frame.file),
            int(entry.get("fail_user_frame_lineno") or frame.line),
            str(entry.get("co_name") or frame.function),
        )
    return Break(
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        reason=reason,
        explanation=explanation,
        hints=hints,
        category=category,
        whole_frame=True,
        registry=registry_number(text),
        stack=user_code.inside(frames_in(text)),
        compile_ids=(compile_id,),
    )


def innermost_in(text: str, user_code: UserCodeFilter) -> Frame | None:
    """The user's line that a text with a traceback in it names."""
    return user_code.innermost(frames_in(text))


def broken_in_error(text: str, kind: str, user_code: UserCodeFilter, raised_at: Sequence[Frame] = ()) -> Break | None:
    """The place that a failed compilation's error names, as a break; None if it names none of the model's.

    Args:
        text: of the error.
        kind: its type's name.
        user_code: whose lines are whose.
        raised_at: the error's own traceback: the place where its text names none, as of an error that the compiled
            code raises and the model by itself does not.
    """
    named = frames_in(text.partition("from user code:")[2])
    stack = user_code.inside(named or raised_at)
    place = user_code.innermost(stack)
    if place is None:
        return None
    reason, explanation, hints = parse_message(text.split("\n\n")[0])
    return Break(
        file=place.file,
        line=place.line,
        function=place.function,
        source=place.source,
        reason=f"{kind}: {reason}" if named else f"{kind}: {reason}; the model by itself does not raise it",
        explanation=explanation,
        hints=hints,
        category="compile error",
        whole_frame=True,
        stack=stack,
    )


def _recompile(
    event: Event, frames: Mapping[str, Frame], stack: Sequence[Frame], user_code: UserCodeFilter
) -> Recompile:
    text = event.payload
    try:
        reasons = json.loads(text)
    except ValueError:  # a single reason comes as plain text
        reasons = text
    newest = reasons[0] if isinstance(reasons, list) else str(reasons)
    frame = _frame_of(event.compile_id, frames)
    first_line = newest.split("\n")[0]
    guard = one_line(re.sub(r"^\d+/\d+: ", "", first_line).split("  # ")[0])
    made_at = next(iter(frames_in(newest)), None)
    noted = _GUARD_MADE_AT.search(first_line)
    if made_at is None and noted and frame.file.endswith(f"/{noted['file']}"):
        said = first_line[: noted.start()].split("  # ", 1)[1:]
        made_at = Frame(frame.file, int(noted["line"]), frame.function, "".join(said).strip())
    place = made_at or frame
    caller = None if user_code.of_user(place.file) else user_code.innermost(stack)
    return Recompile(
        event.compile_id,
        frame.function,
        place.file,
        place.line,
        guard,
        place.source,
        caller.place if caller is not None and user_code.of_user(caller.file) else "",
    )

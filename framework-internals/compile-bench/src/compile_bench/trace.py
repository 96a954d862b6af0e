"""What one compilation did, read from the events of PyTorch's structured trace.

Pure text and numbers in, typed records out: nothing here imports torch, so the formats that PyTorch prints are tested
on recorded events. :mod:`compile_bench.collector` is what hands the events over.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

PHASES = ("Dynamo", "AOTAutograd", "Inductor", "C++/Triton compiler", "Autotuning", "Caches")

# A dynamo_timed name (torch/_dynamo/utils.py) and the phase it starts. A name that is not here belongs to whatever it
# is nested in, so that a new inner name in a later PyTorch moves no time from one phase to another.
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

RECOMPILE_LIMIT = "recompile limit"
BACKEND_FAILED = "backend failed"
ASKED_FOR = "asked for by the code"
NOT_ENTERED = "call Dynamo will not enter"

# Reason -> category, first match. The registry numbers of PyTorch's own list change between releases; the wording of
# the kinds below has been the same from 2.10 on.
_CATEGORIES = tuple(
    (re.compile(pattern, re.IGNORECASE), category)
    for pattern, category in (
        (r"recompile.?limit|cache.?size.?limit", RECOMPILE_LIMIT),
        (r"data.dependent branch|data.dependent jump|dynamic control flow", "data-dependent control flow"),
        (
            r"Tensor\.item|\.item\(\)|data.dependent operator|_local_scalar_dense|\.tolist|repr\(\) on tensor"
            r"|sort with non-constant keys|list with non-scalar tensor",
            "tensor value read by Python",
        ),
        (
            r"dynamic (output )?shape|DynamicOutputShape|data.dependent output shape|nonzero|unbacked",
            "data-dependent shape",
        ),
        (r"graph_break\(\)|call to .?torch\._dynamo\.graph_break|user.requested", ASKED_FOR),
        (r"builtin operator|reorderable_logging|logging|print", "side effect"),
        (
            r"marked as skipped|dynamo\.disable|skipped function|forbidden|torch\.compiler\.disable"
            r"|numpy function|ndarray method|time function|copy\.deepcopy|op returned non-Tensor|RNN, GRU, or LSTM",
            NOT_ENTERED,
        ),
        (r"backend compiler|BackendCompilerFailed|^backend=", BACKEND_FAILED),
        (r"context manager|contextlib", "context manager"),
        (r"requires_grad|autograd\.(Function|grad)|backward|hook", "autograd"),
        (
            r"sparse tensor|resize_\(\)|tensor data attribute|nn\.Parameter\(\)|opaque object",
            "tensor Dynamo cannot represent",
        ),
        (r"bytecode|tp_|__\w+__|generator|exception|super\(\)|iterator|class|builtin", "Python construct"),
    )
)

_RECOMPILE_CAUSES = (
    ("size mismatch", "tensor size"),
    ("stride mismatch", "tensor layout"),
    ("rank mismatch", "tensor rank"),
    ("dtype mismatch", "dtype"),
    ("device mismatch", "device"),
    ("requires_grad mismatch", "requires_grad"),
    ("dispatch key set mismatch", "dispatch keys"),
    ("GLOBAL_STATE", "global state (grad mode, autocast, …)"),
    ("grad_mode", "global state (grad mode, autocast, …)"),
    ("___check_obj_id", "another object"),
    ("___check_type_id", "another type"),
    ("len(", "container length"),
    (".training", "train / eval mode"),
    ("Eq(", "symbolic shape"),
    ("Ne(", "symbolic shape"),
    (" == ", "Python value"),
    (" <= ", "symbolic shape"),
)

_TRACEBACK_LINE = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)'
    r'(?:\n(?!\s*File ")(?P<indent>\s+)(?P<source>[^\n]*)(?:\n(?P<marks>[ ~^]*[~^])(?=\n|\Z))?)?',
    re.MULTILINE,
)
_GUARD_MADE_AT = re.compile(r"#\s+(?P<file>[^\s#]+\.py):(?P<line>\d+) in ")
_REGISTRY_NUMBER = re.compile(r"/gb/gb(\d{4})\.html")
_GRAPH_OPERATION = re.compile(r"^\s{8}\w+(: [^=]+)? = ", re.MULTILINE)
_GUARD_LATENCY = re.compile(r"Guard latency = ([\d.]+) us")
_CACHE_EVENT = re.compile(r"(?:fx_graph|aotautograd|dynamo)_(?:bundled_)?cache_(?:hit|miss|bypass)")
# Dynamo names what runs after a break torch_dynamo_resume_in_FUNCTION_at_LINE.
RESUMED = "torch_dynamo_resume_in_"
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
class Frame:
    """A line of a call stack.

    Attributes:
        file: as Python names it.
        line: in it, counted from 1.
        function: that the line is in.
        source: the line's text; empty where PyTorch could not read it.
    """

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def place(self) -> str:
        """``file.py:LINE``."""
        return f"{self.file}:{self.line}"


class Folders:
    """Whose code a file is.

    Args:
        torch: folder of the torch package.
        library: folders of Python's own and of installed packages.
        launcher: folder of the code that calls the model: frames up to its last one are not the model's.
        launched: names of files in ``launcher`` that are models all the same.
    """

    def __init__(
        self, torch: str = "", library: Sequence[str] = (), launcher: str = "", launched: Sequence[str] = ()
    ) -> None:
        self._torch = _folder(torch)
        self._library = tuple(_folder(each) for each in library if each)
        self._launcher = _folder(launcher)
        self._launched = frozenset(launched)

    def of_torch(self, file: str) -> bool:
        """Whether PyTorch brings the file along."""
        return bool(self._torch) and file.startswith(self._torch)

    def of_user(self, file: str) -> bool:
        """Whether the file is neither PyTorch's nor Python's nor an installed package's."""
        generated = file.startswith("<")
        return not (generated or self.of_torch(file) or file.startswith(self._library) or self._launches(file))

    def inside(self, stack: Sequence[Frame]) -> tuple[Frame, ...]:
        """The frames of the model: without what calls it, and without PyTorch's."""
        last = max((index for index, frame in enumerate(stack) if self._launches(frame.file)), default=-1)
        return tuple(frame for frame in stack[last + 1 :] if not self.of_torch(frame.file))

    def innermost(self, stack: Sequence[Frame]) -> Frame | None:
        """The line that a reader can change: the innermost of the user's, or of a library where none is the user's."""
        own = self.inside(stack)
        return next((frame for frame in reversed(own) if self.of_user(frame.file)), own[-1] if own else None)

    def _launches(self, file: str) -> bool:
        # The separator at the end of the folder keeps "…/launcher_models/" out.
        named = file.rpartition("/")[2]
        return bool(self._launcher) and file.startswith(self._launcher) and named not in self._launched


def _folder(path: str) -> str:
    return path.rstrip("/") + "/" if path else ""


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
        cause: the family of the condition: tensor size, Python value, ….
        called_from: the user's line, ``file.py:LINE``, that called it; empty where ``file`` is the user's.
    """

    compile_id: str
    function: str
    file: str
    line: int
    guard: str
    cause: str
    called_from: str = ""

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
        phases: seconds by phase (:data:`PHASES`), each instant counted once.
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
    folders: Folders | None = None,
    kernels: int = 0,
    handler_seconds: float = 0.0,
    pauses: Sequence[tuple[float, float]] = (),
) -> CompileTrace:
    """Turn the events of one block into records.

    Args:
        events: in the order they came.
        folders: whose lines are whose; without it every line counts as the user's.
        kernels: passed on.
        handler_seconds: passed on.
        pauses: when the process stood still, begin and end in seconds since the epoch: no time of any phase.
    """
    folders = folders or Folders()
    timed = [event.detail for event in events if event.kind == "chromium_event"]
    metrics = {event.compile_id: event.detail for event in events if event.kind == "compilation_metrics"}
    frames = {
        compile_id: Frame(str(entry.get("co_filename")), int(entry.get("co_firstlineno") or 0), entry["co_name"])
        for compile_id, entry in metrics.items()
        if entry.get("co_name")
    }
    starts = _stacks(events)
    recompiles = tuple(
        _recompile(event, frames, starts.get(event.compile_id, ()), folders)
        for event in events
        if event.kind == "recompile_reasons"
    )
    graphs = _graphs(events, frames, metrics)
    captured = {graph.compile_id for graph in graphs}
    breaks = _breaks(events, frames, metrics, recompiles, folders, captured)
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


def without_pauses(
    timed: Iterable[Mapping[str, Any]], pauses: Sequence[tuple[float, float]]
) -> list[Mapping[str, Any]]:
    """Chromium trace events on a clock that stood still with the process.

    Args:
        timed: as for :func:`phase_seconds`.
        pauses: begin and end, in seconds since the epoch; in order and apart.
    """
    begins = [begin for begin, _ in pauses]
    before = [0.0, *accumulate(end - begin for begin, end in pauses)]

    def still(until: float) -> float:
        count = bisect_right(begins, until)  # autotuning waits for its lock thousands of times
        return before[count] - max(pauses[count - 1][1] - until, 0.0) if count else 0.0

    return [{**event, "ts": event["ts"] - still(event["ts"] * 1e-6) * 1e6} for event in timed]


def phase_seconds(timed: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Split the time of a compilation into phases so that each instant belongs to one.

    The events of several threads come on one track. At every instant the phase is that of the span opened last: inside
    a span of Inductor that waits for the C++ compiler, the C++ compiler.

    Args:
        timed: Chromium trace events: ``name``, ``ph`` (``"B"`` or ``"E"``), ``ts`` in microseconds.

    Returns:
        Seconds by phase; phases that did not occur are left out.
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
            open_spans.append((name, _phase(name, inherited)))
            continue
        for index in range(len(open_spans) - 1, -1, -1):
            if open_spans[index][0] == name:
                del open_spans[index]
                break
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}


def _phase(name: str, inherited: str) -> str:
    return next((phase for pattern, phase in _PHASE_PATTERNS if pattern.match(name)), inherited)


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
    folders: Folders,
    captured: Collection[str],
) -> tuple[Break, ...]:
    resumed = {(e.file, plain_function(e.function)) for e in frames.values() if e.function.startswith(RESUMED)}
    found = []
    for event in events:
        # An error of the backend is told twice, first as a Python traceback.
        if event.kind == "dynamo_graph_break_reason" and not event.payload.startswith(_BACKEND_TRACEBACK):
            frame = _frame_of(event.compile_id, frames)
            each = _break(event.payload, event.compile_id, frame, folders)
            # torch 2.10 does not say it: nothing was captured, and nothing goes on behind the break, neither in the
            # function that was compiled nor in the one that it was following into.
            goes_on = {(frame.file, plain_function(frame.function)), (each.file, plain_function(each.function))}
            given_up = event.compile_id not in captured and not goes_on & resumed
            found.append(replace(each, whole_frame=each.whole_frame or given_up))
    found = _with_callers(found, folders)
    told = {compile_id for entry in found for compile_id in entry.compile_ids}
    # Some failures never reach the graph-break artifact: the recompile limit, and errors of a backend that Dynamo
    # suppresses. They stand in the metrics of the compilation alone.
    failures = [
        _failure(entry, compile_id, _frame_of(compile_id, frames), recompiles, folders)
        for compile_id, entry in metrics.items()
        if entry.get("fail_type") and compile_id not in told
    ]
    # Of every function, by its number, its latest compilation.
    stacks = {compile_id.split("/")[0]: stack for compile_id, stack in _stacks(events).items()}
    return merge_breaks((*found, *(_called_by_user(each, stacks, folders) for each in failures)))


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


def _called_by_user(found: Break, stacks: Mapping[str, tuple[Frame, ...]], folders: Folders) -> Break:
    """A library's function that hit the recompile limit, at the user's line that called it where that is known."""
    if found.category != RECOMPILE_LIMIT or folders.of_user(found.file):
        return found
    own = folders.inside(stacks.get(found.compile_ids[0].split("/")[0], ()))
    caller = folders.innermost(own)
    if caller is None or not folders.of_user(caller.file):
        return found
    there = Frame(found.file, found.line, found.function, found.source)
    return replace(
        found,
        file=caller.file,
        line=caller.line,
        function=plain_function(caller.function),
        source=caller.source,
        stack=(*own[:-1], there),
        columns=None,
    )


def _with_callers(breaks: Sequence[Break], folders: Folders) -> list[Break]:
    """Breaks in libraries, each at the user's line that led to it.

    Where an operator fails inside of a library's function that Dynamo follows into, PyTorch names the library's line
    alone; when it then compiles that function by itself it names the whole stack.
    """
    known = {(each.stack[-1].place, each.reason): each for each in breaks if each.stack and folders.of_user(each.file)}
    attributed = []
    for each in breaks:
        whole = known.get((each.place, each.reason))
        if whole is not None and not folders.of_user(each.file):
            names = ("file", "line", "function", "source", "stack", "columns")
            each = replace(each, **{name: getattr(whole, name) for name in names})
        attributed.append(each)
    return attributed


def plain_function(name: str) -> str:
    """A function's own name, also where Dynamo names the part of it that goes on behind a break."""
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name


def with_lines(trace: CompileTrace, lines: Mapping[str, Frame]) -> CompileTrace:
    """A trace whose errors of a backend stand at the lines that they are about.

    Args:
        trace: what was seen.
        lines: of the operator that failed, by compilation.
    """
    breaks = []
    for each in trace.breaks:
        line = next((lines[compile_id] for compile_id in each.compile_ids if compile_id in lines), None)
        if line is not None and each.category == BACKEND_FAILED:
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
    merged: dict[tuple[str, int, str], Break] = {}
    for each in breaks:
        key = (each.file, each.line, each.reason)
        before = merged.get(key)
        if before is None:
            merged[key] = each
            continue
        compile_ids = tuple(dict.fromkeys(before.compile_ids + each.compile_ids))
        merged[key] = replace(
            before,
            times=before.times + each.times,
            compile_ids=compile_ids,
            whole_frame=before.whole_frame or each.whole_frame,
        )
    return tuple(merged.values())


def _stack(text: str) -> tuple[Frame, ...]:
    return tuple(
        Frame(m["file"], int(m["line"]), m["function"].strip(), (m["source"] or "").strip())
        for m in _TRACEBACK_LINE.finditer(text)
    )


def _columns(text: str, place: Frame) -> tuple[int, int] | None:
    """What a traceback marks in a place's line, the innermost time that the line is in it: all of it where nothing."""
    found = [m for m in _TRACEBACK_LINE.finditer(text) if m["file"] == place.file and int(m["line"]) == place.line]
    if not found or not found[-1]["source"]:
        return None
    if not found[-1]["marks"]:
        return 0, len(found[-1]["source"].rstrip())
    marks, indent = found[-1]["marks"], len(found[-1]["indent"].rpartition("\n")[2])
    return len(marks) - len(marks.lstrip()) - indent, len(marks) - indent


def _break(text: str, compile_id: str, frame: Frame, folders: Folders) -> Break:
    before, _, traceback = text.partition("User code traceback:")
    traceback = traceback.split("\nTraceback (most recent call last):")[0]
    stack = _stack(traceback)
    own = folders.inside(stack)
    named = re.search(r"Graph break in user code at (.*):(\d+)", text)
    place = folders.innermost(stack)
    if place is None and named and not folders.of_torch(named[1]):
        place = Frame(named[1], int(named[2]), frame.function)
    place = place or frame
    first = before.partition("*** While handling this graph break")[0].split("Graph Break Reason:")[-1]
    reason, explanation, hints = _message(first)
    category = categorise(reason, explanation)
    if category == ASKED_FOR and stack and folders.of_torch(stack[-1].file):  # Optimizer.step and the like
        category, hints = NOT_ENTERED, _OUTSIDE
    number = _REGISTRY_NUMBER.search(first)
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
        registry=f"GB{number[1]}" if number else "",
        stack=own,
        compile_ids=(compile_id,),
        columns=_columns(traceback, place),
    )


def _failure(
    entry: Mapping[str, Any], compile_id: str, frame: Frame, recompiles: Sequence[Recompile], folders: Folders
) -> Break:
    """A compilation that failed without a graph-break message."""
    text = str(entry.get("fail_reason") or entry["fail_type"])
    reason, explanation, hints = _message(text)
    category = categorise(reason, explanation)
    number = _REGISTRY_NUMBER.search(text)
    same = f"{compile_id.split('/')[0]}/"
    last = next((each for each in reversed(recompiles) if each.compile_id.startswith(same)), None)
    place = folders.innermost(_stack(text))
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
        registry=f"GB{number[1]}" if number else "",
        stack=folders.inside(_stack(text)),
        compile_ids=(compile_id,),
    )


def innermost_in(text: str, folders: Folders) -> Frame | None:
    """The user's line that a text with a traceback in it names."""
    return folders.innermost(_stack(text))


def broken_in_error(text: str, kind: str, folders: Folders, raised_at: Sequence[Frame] = ()) -> Break | None:
    """The place that a failed compilation's error names, as a break; None if it names none of the model's.

    Args:
        text: of the error.
        kind: its type's name.
        folders: whose lines are whose.
        raised_at: the error's own traceback: the place where its text names none, as of an error that the compiled
            code raises and the model by itself does not.
    """
    named = _stack(text.partition("from user code:")[2])
    stack = folders.inside(named or raised_at)
    place = folders.innermost(stack)
    if place is None:
        return None
    reason, explanation, hints = _message(text.split("\n\n")[0])
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


def _message(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Reason, explanation and hints of a formatted graph-break message."""
    head = [line.strip() for line in text.split("\n  Explanation:")[0].splitlines() if line.strip()]
    explanation = re.search(r"^  Explanation: (.*?)(?=^  Hint: |^  Developer debug context:|\Z)", text, re.S | re.M)
    hints = re.findall(r"^  Hint: (.*?)(?=^  Hint: |^\s*\n|^  Developer debug context:|\Z)", text, re.S | re.M)
    said = explanation[1] if explanation else ""
    # Above an explanation the last line is the kind of break; an error of another kind begins with what it is.
    title = (head[-1] if explanation else head[0]) if head else "no reason given"
    return (
        title.removeprefix("torch._dynamo.exc.Unsupported: "),
        _one_line(said.split("\n\n")[0]),
        tuple(_one_line(hint) for hint in hints),
    )


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def categorise(reason: str, explanation: str = "") -> str:
    """The family of a break's reason; ``"other"`` for wording that is not known."""
    for text in (reason, explanation):
        for pattern, category in _CATEGORIES:
            if pattern.search(text):
                return category
    return "other"


def _recompile(event: Event, frames: Mapping[str, Frame], stack: Sequence[Frame], folders: Folders) -> Recompile:
    text = event.payload
    try:
        reasons = json.loads(text)
    except ValueError:  # a single reason comes as plain text
        reasons = text
    newest = reasons[0] if isinstance(reasons, list) else str(reasons)
    frame = _frame_of(event.compile_id, frames)
    first_line = newest.split("\n")[0]
    guard = _one_line(re.sub(r"^\d+/\d+: ", "", first_line).split("  # ")[0])
    made_at = next(iter(_stack(newest)), None)
    noted = _GUARD_MADE_AT.search(first_line)
    if made_at is None and noted and frame.file.endswith(f"/{noted['file']}"):
        made_at = Frame(frame.file, int(noted["line"]), frame.function)
    place = made_at or frame
    caller = None if folders.of_user(place.file) else folders.innermost(stack)
    return Recompile(
        event.compile_id,
        frame.function,
        place.file,
        place.line,
        guard,
        next((cause for marker, cause in _RECOMPILE_CAUSES if marker in guard), "other"),
        caller.place if caller is not None and folders.of_user(caller.file) else "",
    )

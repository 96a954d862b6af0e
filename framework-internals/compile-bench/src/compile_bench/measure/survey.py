"""Survey a target: trace it without generating code, in a process of its own, and report what stays out of graphs.

Dynamo splits a function at a graph break and resumes it behind the break. Inside a loop, a ``try`` or an unsupported
context manager it cannot resume: it skips the whole frame, and nothing that follows in the function is traced. So the
model is traced again, with Dynamo allowed to resume in loops and the statements around such a break changed
(:mod:`compile_bench.targets.overlay`). Everything else runs as it is written, with the model's own values. This is
repeated until no such statement surrounds a skipped frame.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchkit import Quantity, Timing, UserError
from benchkit.errors import first_line
from benchkit.processes import send_message
from compile_bench.capture.collector import (
    Collector,
    CudaGraphSkips,
    FailingOperatorBackend,
    backend_of,
    compile_id,
    hooked,
    resuming_in_loops,
    settings,
    untimed_guards,
    user_code_filter,
)
from compile_bench.capture.eager_frames import EagerFrame, EagerWatch, lost_cuda_graphs, silent_functions
from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter, plain_function
from compile_bench.capture.parsing import broken_in_error, merge_breaks, with_failing_lines
from compile_bench.capture.text import distinct, some
from compile_bench.capture.trace import (
    BACKEND_FAILED,
    ITERATOR_IN_USE,
    RECOMPILE_LIMIT,
    Break,
    CompileTrace,
    Recompile,
    SilentEager,
)
from compile_bench.measure.records import BreakCost, Place, Seen, Survey, Triage, place_of
from compile_bench.measure.steps import eager_failure, load_again, load_case
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import (
    Block,
    changeable_blocks,
    forget_user_modules,
    handlers_around,
    is_in_block,
    overlaid,
    resumable,
)
from compile_bench.targets.randomness import generators, seed_everything
from compile_bench.targets.regional import OwnRegions, compile_case, inside_regions, regions_compiled_with
from compile_bench.targets.target import FunctionModel, Step, Target, describe_error, has_fixed_mode

# -- what breaks cost: Python time between two graphs, the tensors in between, additional compilation ------------------

_STEPS = 40
_MOST_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Interval:
    """The time from the end of one graph to the start of the next, within a step."""

    before: str  # compile id of the graph before
    after: str  # compile id of the graph after
    seconds: tuple[float, ...]  # one value for every step
    functions: frozenset[tuple[str, str]]  # the user's functions (file and name) that ran in between


class _Run(NamedTuple):
    """One run of a graph."""

    identity: str  # compile id of the graph
    start: float  # begin, of time.perf_counter()
    end: float  # end, likewise


class GraphTimer:
    """A backend that records when each graph runs.

    The time between two graphs does not depend on the backend that compiles.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.__name__ = backend.__name__  # Dynamo's messages show this name
        self.outputs: dict[str, int] = {}
        self._on = False
        self._runs: list[_Run] = []

    def __call__(self, module: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        return self._timed(self._backend, module, inputs)

    def for_region(self, wanted: str | Callable[..., Any]) -> Callable[..., Any]:
        """The backend for a region whose code asks for ``wanted``: that one, timed; this one in place of Inductor."""
        if wanted == "inductor":
            return self

        def timed_backend(module: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
            return self._timed(own, module, inputs, **options)

        own = backend_of(wanted)
        timed_backend.__name__ = getattr(own, "__name__", str(own))
        return timed_backend

    def _timed(self, backend: Callable[..., Any], module: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        identity, run = compile_id(), backend(module, inputs, **options)

        def timed(*args: Any) -> Any:
            if not self._on:
                return run(*args)
            start = time.perf_counter()
            result = run(*args)
            self._runs.append(_Run(identity, start, time.perf_counter()))
            self.outputs.setdefault(identity, _bytes(result))
            return result

        return timed

    def intervals(self, step: Callable[[], Any]) -> list[_Interval]:
        """Measure steps in which nothing is compiled any more. Returns the intervals of a step in order."""
        functions = self._functions(step)
        self._on = True
        steps: list[list[_Run]] = []
        begin = time.perf_counter()
        while len(steps) < _STEPS and (len(steps) < 3 or time.perf_counter() - begin < _MOST_SECONDS):
            self._runs.clear()
            step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            steps.append(list(self._runs))
        self._on = False
        order = [run.identity for run in steps[-1]]
        alike = [runs for runs in steps if [run.identity for run in runs] == order]
        return [
            _Interval(
                before,
                after,
                tuple(runs[index].start - runs[index - 1].end for runs in alike),
                functions.get(index, frozenset()),
            )
            for index, (before, after) in enumerate(pairwise(order), 1)
        ]

    def _functions(self, step: Callable[[], Any]) -> dict[int, frozenset[tuple[str, str]]]:
        """For every graph of a step, by its index: the user's functions that ran since the graph before it."""
        user_code = user_code_filter()
        active: list[tuple[str, str]] = []
        seen: dict[int, set[tuple[str, str]]] = {}

        def event(frame: FrameType, kind: str, _: Any) -> None:
            if kind not in ("call", "return") or not user_code.is_user(frame.f_code.co_filename):
                return
            entry = (frame.f_code.co_filename, frame.f_code.co_name)
            if kind == "call":
                active.append(entry)
            seen.setdefault(len(self._runs), set()).update(active)
            if kind == "return" and active:
                active.pop()

        self._runs.clear()
        self._on = True
        before = sys.getprofile()
        sys.setprofile(event)
        try:
            step()
        finally:
            sys.setprofile(before)
            self._on = False
        return {index: frozenset(functions) for index, functions in seen.items()}


def costs_of(
    timer: GraphTimer, step: Callable[[], Any], trace: CompileTrace, *, settled: bool
) -> Mapping[Place, BreakCost]:
    """Measure what the breaks of a traced step cost.

    Time is lost in the forward pass alone: backward graphs run inside the autograd engine.
    """
    breaks = {place_of(met): met for met in trace.breaks}
    limits = [met for met in trace.breaks if met.category == RECOMPILE_LIMIT]
    intervals = timer.intervals(step) if settled and breaks else []
    caused = {place: _intervals_of(met, intervals) for place, met in breaks.items()}
    sharing = Counter(interval for own in caused.values() for interval in own)
    return {
        place: BreakCost(
            time_lost=_sum(caused[place]),
            breaks_between=max((sharing[interval] for interval in caused[place]), default=1),
            output_bytes=sum(timer.outputs.get(interval.before, 0) for interval in caused[place]),
            compile_seconds=_compile_seconds(met, trace),
            not_measured="" if caused[place] else why_not_measured(met, settled=settled, limits=limits),
        )
        for place, met in breaks.items()
    }


def why_not_measured(met: Break, *, settled: bool, limits: Sequence[Break]) -> str:
    """Why the time that a break loses could not be measured, as a clause.

    ``limits`` are functions that reached the recompile limit before a step was reached in which nothing is compiled.
    """
    if not settled:
        return "something is still compiled in every step"
    around = {plain_function(frame.function) for frame in met.stack} | {plain_function(met.function)}
    for limit in limits:
        skipped = limit.stack[-1] if limit.library else limit
        if plain_function(skipped.function) in around:
            return (
                f"{plain_function(skipped.function)} is recompiled up to the recompile limit and then runs eagerly "
                f"(because of what changes at {Path(skipped.file).name}:{skipped.line}), so that no graph runs around "
                "the break"
            )
    return "no graph runs both before and behind it in a step without compilation"


def _intervals_of(met: Break, intervals: Sequence[_Interval]) -> list[_Interval]:
    """The intervals that a break causes."""
    if met.whole_frame:
        return [interval for interval in intervals if (met.file, met.function) in interval.functions]
    own = [interval for interval in intervals if interval.before in met.compile_ids]
    if own:
        return own
    # Nothing was computed between this break and the one before. Compilations are numbered in the order they happen.
    numbers = [_number(identity) for identity in met.compile_ids]

    def around(interval: _Interval) -> bool:
        before, after = _number(interval.before), _number(interval.after)
        return any(before < number < after for number in numbers)

    return [interval for interval in intervals if around(interval)][:1]


def _number(compile_id: str) -> int:
    """The number of the compiled frame, from its compile id such as ``3/0``."""
    return int(compile_id.split("/")[0])


def _sum(intervals: Sequence[_Interval]) -> Quantity | None:
    """The sum of one break's intervals, step by step."""
    steps = [sum(seconds) for seconds in zip(*(interval.seconds for interval in intervals), strict=True)]
    return Timing(tuple(steps), 1, "wall-clock", 0.0).quantity() if steps else None


def _compile_seconds(met: Break, trace: CompileTrace) -> float:
    """Time to compile the resume functions behind a break, in its function and in the user's functions around it.

    At the recompile limit it is the time of all recompilations of the function.
    """
    if met.category == RECOMPILE_LIMIT:
        frames = {_number(identity) for identity in met.compile_ids}
        seconds = [graph.compile_seconds or 0.0 for graph in trace.graphs if _number(graph.compile_id) in frames]
        return sum(seconds[1:])
    names = {f"{RESUMED}{frame.function}_at_{frame.line}" for frame in met.stack}
    return sum(graph.compile_seconds or 0.0 for graph in trace.graphs if graph.function in names)


def _bytes(result: Any) -> int:
    """Bytes of the tensors that a graph returns."""
    tensors = [part for part in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(part, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# -- one tracing pass: a compiled target step by step, and what Dynamo reports -----------------------------------------

# Steps with the same arguments: an attribute that changes from call to call recompiles before any shape does.
STEADY_CALLS = 3

# Further steps while each of them compiles something. A function that is compiled in every call reaches the recompile
# limit after eight compilations (torch._dynamo.config.recompile_limit) and runs eagerly from then on.
_SETTLING_CALLS = 12


@dataclass
class TracingPass:
    """What Dynamo reported for one state of the sources."""

    first: CompileTrace = field(default_factory=CompileTrace)  # the trace of the first seed
    trace: CompileTrace = field(default_factory=CompileTrace)  # the trace of all seeds
    breaks: list[tuple[int, Break]] = field(default_factory=list)  # every graph break with the seed that met it first
    # Functions that ran eagerly without a message, by their first line.
    eager: dict[Frame, SilentEager] = field(default_factory=dict)
    # Errors that the compiled model raised and the eager one does not, each in one line.
    failures: dict[str, None] = field(default_factory=dict)
    # Costs of the first seed's breaks, if they were asked for.
    costs: Mapping[Place, BreakCost] = field(default_factory=dict)
    calls: int = 0  # number of steps with the first seed
    # The error of a later step that the eager model raises too, which ended the tracing; else empty.
    eager_failure: str = ""
    _told: set[Hashable] = field(default_factory=set)

    def add(self, trace: CompileTrace, seed: int) -> None:
        """Add what was compiled until now; what is new belongs to this seed."""
        if self.trace == CompileTrace():
            self.first = trace
        self.trace = trace
        known = {met.identity for _, met in self.breaks}
        self.breaks += [(seed, met) for met in trace.breaks if met.identity not in known]

    def add_silent(self, eager: Iterable[EagerFrame]) -> None:
        """Add functions that computed outside any graph, unless a break explains it."""
        for silent in silent_functions(eager, self.trace):
            self.eager.setdefault(silent.frame, silent)

    def tell(self, breaks: Sequence[Break], case: Case) -> None:
        """Send a message about each new break to the owner of this process."""
        for met in breaks:
            if met.identity not in self._told:
                self._told.add(met.identity)
                send_message(Seen(case, met))

    def add_failure(self, error: Exception, seed: int, user_code: UserCodeFilter) -> None:
        """Add an error, and its place as a break."""
        remedy = _REMEDY.search(str(error))
        self.failures[f"{first_line(error)}; {remedy[1]}" if remedy else first_line(error)] = None
        place = broken_in_error(str(error), type(error).__name__, user_code, raised_at(error))
        if place is not None:
            # Dynamo reports the same error at the library's line, without the user's line.
            self.breaks = [met for met in self.breaks if met[1].place != place.library or not place.library]
            self.breaks.append((seed, place))


# The line of an error's message in which PyTorch says what to do.
_REMEDY = re.compile(r"^Workaround: (.+?)[:.]?$", re.MULTILINE)


def _without_hooks(target: Target) -> list[str]:
    if not (hooks := hooked(target.model)) or hooked(target.copied()):
        return []
    return [f"hooks of {some(hooks)} are not looked at, nor do they run: steps are of copies, which have no such hooks"]


def trace_target(
    target: Target, case: Case, seeds: Sequence[int], *, cost: bool = False, tell: bool = False
) -> TracingPass:
    """Trace a target: with the first seed until nothing is compiled any more, then with the other seeds.

    Another seed compiles something new where random numbers choose what Python does. The backend is ``aot_eager`` for a
    training step, which traces the backward pass as well, and ``eager`` for inference. Without random numbers only the
    first seed is used. With ``tell`` each break is sent as a message, the first ones after the first step.
    """
    user_code = user_code_filter()
    torch.compiler.reset()
    backend = FailingOperatorBackend("aot_eager" if case.train else "eager", user_code)
    timer = GraphTimer(backend)
    error: Exception | None = None
    regions = regions_compiled_with(timer.for_region) if isinstance(target.model, OwnRegions) else nullcontext()
    with regions, untimed_guards(), Collector() as collector:
        model = own_model(target, case)
        inside = inside_regions(model, case)
        try:
            compiled = compile_case(model, case, backend=timer)
        except UserError:
            raise
        except Exception as refused:  # before the first step, as for a scripted model
            return _refused_at_once(refused, target, case, seeds[0])
        watch = EagerWatch([*inside, *(compiled.modules() if isinstance(compiled, FunctionModel) else ())], user_code)
        steps = _Steps(target, case, compiled, collector, watch, backend)
        seen = steps.seen
        try:
            settled = steps.take_with_first_seed(seeds[0], tell=tell)
            seen.costs = costs_of(timer, steps.step, seen.first, settled=settled) if cost else {}
            steps.take_with_other_seeds(seeds)
        except Exception as raised:  # whatever the model or the compiler raises
            error = raised
    if error is not None:
        seen.eager_failure = _eager_failure(target, case, steps.count, steps.scheduled)
    seen.add(steps.trace(), steps.seed)
    if error is not None and not seen.eager_failure:
        seen.add_failure(error, steps.seed, user_code)
    if tell:
        seen.tell([met for _, met in seen.breaks], case)
    return seen


def _refused_at_once(error: Exception, target: Target, case: Case, seed: int) -> TracingPass:
    """The pass of a model that torch.compile does not take, although it runs eagerly."""
    seen = TracingPass(eager_failure=_eager_failure(target, case, 1))
    seen.add_failure(error, seed, user_code_filter())
    return seen


def _error_of_lowering(target: Target, case: Case, seed: int) -> Exception | None:
    """What an inference step raises in AOTAutograd, where Inductor begins, as for an argument of a subclass of Tensor.

    Not the backend of all steps: of two floats that change, ``aot_eager`` compiles again where Inductor does not.
    """
    torch.compiler.reset()
    backend = backend_of("aot_eager")

    def for_region(wanted: str | Callable[..., Any]) -> Callable[..., Any]:
        return backend if wanted == "inductor" else backend_of(wanted)

    regions = regions_compiled_with(for_region) if isinstance(target.model, OwnRegions) else nullcontext()
    seed_everything(seed)
    try:
        with regions:
            target.step(compile_case(own_model(target, case), case, backend=backend), train=False)()
    except Exception as error:  # whatever the compiler raises
        return error
    finally:
        torch.compiler.reset()
    return None


class _Steps:
    """The steps of a tracing pass, and what they have shown until now."""

    def __init__(
        self,
        target: Target,
        case: Case,
        compiled: nn.Module,
        collector: Collector,
        watch: EagerWatch,
        backend: FailingOperatorBackend,
    ) -> None:
        self.seen = TracingPass()
        self.seed = 0
        self.count = 0
        self.scheduled = 0  # entries of the schedule whose step began
        self._target, self._case, self._compiled = target, case, compiled
        self._collector, self._watch, self._backend = collector, watch, backend
        self._made: Step | None = None
        self._before: tuple[object, ...] = ()  # states of the random generators after seeding

    def step(self) -> object:
        """Take a step. One function makes all steps with the same arguments: its state can cause recompilations."""
        if self._made is None:
            self._made = self._target.step(self._compiled, train=self._case.train)
        self.count += 1
        return self._made()

    def trace(self) -> CompileTrace:
        """What was compiled until now."""
        return with_failing_lines(self._collector.trace(), self._backend.lines, user_code_filter())

    def take_with_first_seed(self, seed: int, *, tell: bool) -> bool:
        """Take steps until nothing is compiled any more, and the schedule's. Returns whether that was reached."""
        self.seed = seed
        seed_everything(seed)
        self._before = generators()
        self.step()
        if tell:
            self.seen.tell(self.trace().breaks, self._case)
        self.seen.calls, settled = run_until_settled(self.step, self._collector)
        for call in islice(self._target.calls(), 1, None):
            self.scheduled += 1
            call.step(self._compiled, train=self._case.train)()
            self.seen.calls += 1
        self.seen.add(self.trace(), seed)
        self.seen.add_silent(self._watch.run(self.step))  # it is a further step, which may compile something too
        return settled

    def take_with_other_seeds(self, seeds: Sequence[int]) -> None:
        """Take steps with each further seed if the model draws random numbers."""
        for seed in seeds[1:] if generators() != self._before else ():
            self.seen.add(self.trace(), seeds[0])
            compilations = self._collector.compilations
            self.seed = seed
            seed_everything(seed)
            for _ in range(STEADY_CALLS):
                self.step()
            self.seen.add(self.trace(), seed)
            if self._collector.compilations > compilations:
                self.seen.add_silent(self._watch.run(self.step))


def run_until_settled(step: Step, collector: Collector) -> tuple[int, bool]:
    """Run a step that has run once until it compiles nothing more.

    Returns the number of calls, the first one included, and whether the last one compiled nothing.
    """
    for call in range(2, STEADY_CALLS + _SETTLING_CALLS + 1):
        before = collector.compilations
        step()
        settled = collector.compilations == before
        if settled and call >= STEADY_CALLS:
            break
    return call, settled


def own_model(target: Target, case: Case) -> nn.Module:
    """A copy of the target's model that no other step changes; the model is loaded again where it cannot be copied."""
    try:
        return copy.deepcopy(target.model)
    except Exception:  # whatever deepcopy raises for a lock, an open file, …
        forget_user_modules(user_code_filter())  # Dynamo would look up the globals of the modules that are loaded
        return load_case(case).model


def raised_at(error: Exception) -> list[Frame]:
    """The frames of an error's traceback, outermost first."""
    return [
        Frame(entry.filename, entry.lineno or 0, plain_function(entry.name), entry.line or "")
        for entry in traceback.extract_tb(error.__traceback__)
    ]


def _eager_failure(target: Target, case: Case, steps: int, scheduled: int = 0) -> str:
    """What the eager model raises in a step behind the first one, as a sentence; empty if it raises nothing.

    It takes its own steps, and then those of the first entries of its schedule.
    """
    if isinstance(target.model, FunctionModel):  # whose state, in globals, the compiled steps have changed
        forget_user_modules(user_code_filter())
        target = load_case(case)
    model = own_model(target, case)
    step = target.step(model, train=case.train)
    entries = islice(target.calls(), 1, 1 + scheduled)
    further = (lambda call=call: call.step(model, train=case.train)() for call in entries)
    for number, take in enumerate(chain(repeat(step, steps), further), 1):
        try:
            take()
        except Exception as error:  # whatever the model raises
            if number == 1:
                raise eager_failure(target, case, error) from error
            place = f"step {number}" if number <= steps else f"entry {number - steps} of the schedule"
            return f"raises by itself, uncompiled, in {place} of {case.kind}: {describe_error(error)}"
    return ""


# -- what hides behind skipped frames, and the survey ------------------------------------------------------------------


@dataclass
class Hidden:
    """What was found behind skipped frames."""

    breaks: list[tuple[int, Break]] = field(default_factory=list)  # graph breaks with the seed that met them
    notes: list[str] = field(default_factory=list)  # places behind which breaks stay hidden, one sentence each
    # Functions (file and name) that are still skipped, so that not all of their lines were traced.
    untraced: frozenset[tuple[str, str]] = frozenset()


@dataclass
class _Blocks:
    """Statements around skipped frames."""

    changed: set[Block] = field(default_factory=set)  # those that are changed
    needed: set[Block] = field(default_factory=set)  # those that stay as they are, since the model raises without them

    def change_around(self, frames: Iterable[Frame]) -> bool:
        """Change the statements around these lines too. Returns whether there are new ones."""
        user_code = user_code_filter()
        own = (frame for frame in frames if user_code.is_user(frame.file))
        around = {block for frame in own for block in changeable_blocks(frame.file, frame.line)}
        new = around - self.changed - self.needed
        self.changed |= new
        return bool(new)

    def adapt_to(self, error: Exception) -> bool:
        """Keep the handlers of an error, or change the statements around it. Returns whether anything changed."""
        frames = raised_at(error)
        handlers = {block for frame in frames for block in handlers_around(frame.file, frame.line)} & self.changed
        self.changed -= handlers
        self.needed |= handlers
        return bool(handlers) or self.change_around(frames)


def breaks_behind_skipped_frames(case: Case, seen: TracingPass, seeds: Sequence[int]) -> Hidden:
    """Find the graph breaks that skipped frames hide."""
    user_code = user_code_filter()
    hidden, blocks = Hidden(), _Blocks()
    skipped = _skipped(seen)
    installed = [met for met in skipped if _is_installed(met, user_code)]
    if installed:
        hidden.notes.append(f"breaks behind {_names(installed)} may stay hidden: the code is an installed package's")
    skipped = [met for met in skipped if met not in installed]
    known = {met.place for _, met in seen.breaks} | {met.library for _, met in seen.breaks}
    failure = ""
    blocks.change_around(_frames(skipped))
    pending = bool(skipped)
    while pending:
        try:
            traced = _trace_changed(blocks, case, seeds)
        except Exception as error:  # whatever the changed model raises
            pending = blocks.adapt_to(error)
            failure = "" if pending else f"; with the statements there changed: {first_line(error)}"
            continue
        new = [(seed, met) for seed, met in traced.breaks if met.place not in known and _in_unchanged_model(met)]
        known |= {met.place for _, met in new}
        seen.tell([met for _, met in new], case)
        for seed, met in new:  # in the unchanged function, a break in a loop or ``try`` skips the whole frame
            whole_frame = met.whole_frame or is_in_block(met.file, met.line)
            hidden.breaks.append((seed, replace(met, whole_frame=whole_frame)))
        skipped = [met for met in _skipped(traced) if not _is_installed(met, user_code)]
        pending = blocks.change_around(_frames(skipped))
    forget_user_modules(user_code)  # the loaded ones are the changed ones
    skipped = [met for met in skipped if not met.function.startswith("<")]  # a lambda or comprehension ends there
    if skipped:
        hidden.notes.append(f"breaks behind {_names(skipped)} may stay hidden: Dynamo skips the frame there{failure}")
        hidden.untraced = frozenset((frame.file, plain_function(frame.function)) for frame in _frames(skipped))
    return hidden


def _trace_changed(blocks: _Blocks, case: Case, seeds: Sequence[int]) -> TracingPass:
    """Trace the sources with these statements changed."""
    # An RNN makes Dynamo skip the frame too, unless this setting lets it trace one.
    with overlaid(resumable(blocks.changed)), resuming_in_loops(), settings({"allow_rnn": True}):
        target = load_again(case)
        target.step(own_model(target, case), train=case.train)()
        return trace_target(load_again(case), case, seeds)


def _skipped(seen: TracingPass) -> list[Break]:
    """The breaks that made Dynamo skip a frame. A function at the recompile limit is left out: it was traced before."""
    breaks = (met for _, met in seen.breaks if met.whole_frame and met.category != RECOMPILE_LIMIT)
    return list(merge_breaks(breaks))


def _is_installed(met: Break, user_code: UserCodeFilter) -> bool:
    """Whether the skipped frame is an installed package's, whose sources are not changed."""
    own = [frame for frame in _frames((met,)) if user_code.is_user(frame.file)]
    return bool(met.library or not own) and not any(is_in_block(frame.file, frame.line) for frame in own)


def _frames(breaks: Iterable[Break]) -> Iterator[Frame]:
    """The frames that led to breaks. Dynamo inlines calls, so it skips the frames of the callers too."""
    for met in breaks:
        yield from met.frames


def _in_unchanged_model(met: Break) -> bool:
    """Whether the unchanged model has the break too; the changes here can cause others."""
    changed = met.category in (RECOMPILE_LIMIT, "compile error", BACKEND_FAILED)
    return not changed and not met.reason.startswith(ITERATOR_IN_USE)


_FIXED_MODE = "the model is not put into this mode: its own one is fixed, as that of an exported program"


def _names(breaks: Iterable[Break]) -> str:
    return distinct(f"{Path(met.file).name}:{met.line}" for met in breaks)


SEEDS = (0, 1, 2)


def triage(case: Case) -> Triage:
    """Count graph breaks and recompilations over a case's schedule."""
    seen = survey(case, seeds=(0,))
    if seen.eager_failure:
        raise UserError(f"{case.target} {seen.eager_failure}")
    return Triage(case, replace(seen.trace, breaks=seen.breaks), seen.calls, seen.failures)


def survey(case: Case, *, seeds: Sequence[int] = SEEDS, behind: bool = True, cost: bool = False) -> Survey:
    """Find what keeps a target out of graphs."""
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # the trace contains what it warns of
    user_code = user_code_filter()
    target = load_case(case)
    start = time.perf_counter()
    seen = trace_target(target, case, seeds, cost=cost, tell=True)
    seconds = time.perf_counter() - start
    hidden = breaks_behind_skipped_frames(case, seen, seeds) if behind else Hidden()
    if behind and not case.train and not (seen.breaks or seen.failures or seen.eager_failure):  # a clean verdict
        error = _error_of_lowering(target, case, seeds[0])
        if error is not None and not _eager_failure(target, case, 1):
            seen.add_failure(error, seeds[0], user_code)
    breaks = seen.breaks + hidden.breaks
    merged = merge_breaks(met for _, met in breaks)
    seeds_of: dict[Hashable, dict[int, None]] = defaultdict(dict)  # sets that keep their order
    for seed, met in breaks:
        seeds_of[met.identity][seed] = None
    return Survey(
        case,
        breaks=merged,
        seeds=tuple(tuple(seeds_of[met.identity]) for met in merged),
        eager=tuple(seen.eager.values()),
        trace=seen.first,
        recompiles=_distinct(seen.trace.recompiles),
        calls=seen.calls,
        failures=tuple(seen.failures),
        collect_seconds=seen.trace.handler_seconds,
        trace_seconds=seconds,
        user_files=frozenset(met.file for met in merged if user_code.is_user(met.file)),
        notes=(
            *([f"the model {seen.eager_failure}"] if seen.eager_failure else ()),
            *([_FIXED_MODE] if has_fixed_mode(target.model) else ()),
            *(_without_hooks(target) if case.train else ()),
            *hidden.notes,
        ),
        eager_failure=seen.eager_failure,
        regions=target.model.text if isinstance(target.model, OwnRegions) else "",
        hidden=frozenset(place_of(met) for _, met in hidden.breaks),
        untraced=hidden.untraced,
        costs=seen.costs,
    )


def _distinct(recompiles: Iterable[Recompile]) -> tuple[Recompile, ...]:
    """One recompilation for every place and guard."""
    distinct: dict[Hashable, Recompile] = {}
    for again in recompiles:
        distinct.setdefault(again.identity, again)
    return tuple(distinct.values())


def reasons_without_cuda_graphs(case: Case) -> list[SilentEager]:
    """Why Inductor does not use CUDA graphs for a case that asks for them, each reason with the model's line.

    Regions that the model's code compiles keep their own mode.
    """
    target = load_case(case)
    asked = case if isinstance(target.model, OwnRegions) else replace(case, mode="reduce-overhead")
    compiled = compile_case(own_model(target, case), asked)
    step = target.step(compiled, train=case.train)
    with CudaGraphSkips() as skips:
        for _ in range(STEADY_CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            step()
    return lost_cuda_graphs(skips.reasons, skips.messages, user_code_filter())

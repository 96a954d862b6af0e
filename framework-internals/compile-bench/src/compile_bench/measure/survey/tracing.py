"""One tracing pass: run a compiled target step by step, without generating code, and keep what Dynamo reports."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import nn

from benchkit.errors import first_line
from benchkit.processes import send_message
from compile_bench.capture.collector import Collector, untimed_guards, user_code_filter
from compile_bench.capture.eager_frames import EagerFrame, EagerWatch, silent_functions
from compile_bench.capture.failing_operator import FailingOperatorBackend
from compile_bench.capture.frames import Frame, UserCodeFilter, plain_function
from compile_bench.capture.parsing import broken_in_error, with_failing_lines
from compile_bench.capture.trace import Break, CompileTrace, SilentEager
from compile_bench.measure.steps import eager_failure, load_case
from compile_bench.measure.survey.break_cost import GraphTimer, costs_of
from compile_bench.measure.survey.types import BreakCost, Place, Seen
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import forget_user_modules
from compile_bench.targets.randomness import generators, seed_everything
from compile_bench.targets.regional import OwnRegions, compile_case, inside_regions, regions_compiled_with
from compile_bench.targets.target import FunctionModel, Step, Target, describe_error

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
        self.failures[first_line(error)] = None
        place = broken_in_error(str(error), type(error).__name__, user_code, raised_at(error))
        if place is not None:
            # Dynamo reports the same error at the library's line, without the user's line.
            self.breaks = [met for met in self.breaks if met[1].place != place.library or not place.library]
            self.breaks.append((seed, place))


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
        compiled = compile_case(model, case, backend=timer)
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
        seen.eager_failure = _eager_failure(target, case, steps.count)
    seen.add(steps.trace(), steps.seed)
    if error is not None and not seen.eager_failure:
        seen.add_failure(error, steps.seed, user_code)
    if tell:
        seen.tell([met for _, met in seen.breaks], case)
    return seen


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


def _eager_failure(target: Target, case: Case, steps: int) -> str:
    """What the eager model raises in a step behind the first one, as a sentence; empty if it raises nothing."""
    if isinstance(target.model, FunctionModel):  # whose state, in globals, the compiled steps have changed
        forget_user_modules(user_code_filter())
        target = load_case(case)
    step = target.step(own_model(target, case), train=case.train)
    for number in range(1, steps + 1):
        try:
            step()
        except Exception as error:  # whatever the model raises
            if number == 1:
                raise eager_failure(target, case, error) from error
            return f"raises by itself, uncompiled, in step {number} of {case.kind}: {describe_error(error)}"
    return ""

"""Tracing a target without generating code, in a process of its own."""

from __future__ import annotations

import copy
import logging
import re
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import cast

import torch
from torch import nn

from benchkit import UserError
from compile_bench.capture.collector import Collector, CudaGraphSkips, user_code_filter
from compile_bench.capture.eager_frames import EagerFrame, EagerWatch
from compile_bench.capture.failing_operator import FailingOperatorBackend
from compile_bench.capture.frames import Frame, UserCodeFilter, frames_in, plain_function
from compile_bench.capture.parsing import broken_in_error, merge_breaks, with_failing_lines
from compile_bench.capture.reasons import BACKEND_FAILED, RECOMPILE_LIMIT
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.fixes import holding
from compile_bench.fixes.holding import Held, Marked, overlays, rewind
from compile_bench.measure.measurements import Triage
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey_types import SilentEager, Survey, mark
from compile_bench.targets.case import Case
from compile_bench.targets.overlay import forget_user_modules, overlaid
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.target import Target

SEEDS = (0, 1, 2)

# Three steps with the same arguments: what changes from call to call of itself shows before any shape does.
_STEADY_CALLS = 3

# Lines that are taken out of the way one after the other in search of what lies behind.
_MOST_ROUNDS = 12

# Of these lines nothing more can be held.
_ALL_OF_IT = (Held("value"), Held("lambda"))

# Categories of breaks that are about the values in a statement, not about what it calls.
_READS = frozenset(("data-dependent control flow", "tensor value read by Python", "data-dependent shape"))


def triage(case: Case) -> Triage:
    """Count graph breaks and recompilations over a case's schedule."""
    found = survey(case, seeds=(0,))
    return Triage(case, replace(found.trace, breaks=found.breaks), found.calls, found.failures)


def survey(case: Case, *, seeds: Sequence[int] = SEEDS, behind: bool = True) -> Survey:
    """Find what keeps a case out of graphs, over several seeds.

    ``aot_eager`` follows the backward pass too, ``eager`` the forward pass alone. What lies behind a function that
    Dynamo gave up as a whole is looked for in further rounds (:mod:`compile_bench.fixes.holding`) if ``behind``.
    """
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)  # warnings of breaks: they are in the trace
    user_code = user_code_filter()
    target = load_case(case)
    start = time.perf_counter()
    look = _look(target, case, seeds, user_code)
    seconds = time.perf_counter() - start
    hidden = _behind(look, case, seeds[:1], user_code) if behind else []
    look.breaks += hidden
    merged = merge_breaks(each for _, each in look.breaks)
    return Survey(
        case,
        merged,
        tuple(_seeds_of(each, look.breaks) for each in merged),
        tuple(look.eager.values()),
        look.traces[0],
        _distinct(recompile for trace in look.traces for recompile in trace.recompiles),
        _STEADY_CALLS + sum(1 for _ in target.schedule),
        tuple(look.failures),
        sum(trace.handler_seconds for trace in look.traces),
        seconds,
        frozenset(each.file for each in merged if user_code.is_user(each.file)),
        tuple(look.notes),
        frozenset(mark(each) for _, each in hidden),
    )


@dataclass
class _Look:
    """What was seen with one state of the source."""

    traces: list[CompileTrace] = field(default_factory=list)
    breaks: list[tuple[int, Break]] = field(default_factory=list)
    eager: dict[Frame, SilentEager] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _look(
    target: Target, case: Case, seeds: Sequence[int], user_code: UserCodeFilter, *, backward: bool = True
) -> _Look:
    """Trace a target with every seed, of a training step the backward pass too if ``backward``."""
    look = _Look()
    for seed in seeds:
        torch.compiler.reset()
        model = own_model(target, case)
        backend = FailingOperatorBackend("aot_eager" if case.train and backward else "eager", user_code)
        compiled = cast(nn.Module, torch.compile(model, backend=backend, dynamic=case.dynamic))
        seed_everything(seed)
        error: Exception | None = None
        with Collector() as collector:
            try:
                # One for all calls with the same arguments: what it keeps in between may be why it is compiled again.
                step = target.step(compiled, train=case.train)
                others = (each.step(compiled, train=case.train) for each in islice(target.calls(), 1, None))
                for each in chain(repeat(step, _STEADY_CALLS), others):
                    rewind()
                    each()
            except Exception as raised:  # whatever the model or the compiler raises
                error = raised
        trace = with_failing_lines(collector.trace(), backend.lines, user_code)
        look.traces.append(trace)
        look.breaks += [(seed, each) for each in trace.breaks]
        if error is not None:
            _refuse_if_eager_fails(target, case)
            look.failures[_one_line(error)] = None
            found = broken_in_error(str(error), type(error).__name__, user_code, _raised_at(error))
            if found is not None:
                # Dynamo tells the same of the library's line alone.
                look.breaks = [each for each in look.breaks if each[1].place != found.library or not found.library]
                look.breaks.append((seed, found))
            continue
        for silent in unexplained(EagerWatch(model.modules(), user_code).run(step), trace):
            look.eager.setdefault(silent.frame, silent)
    return look


def _raised_at(error: Exception) -> list[Frame]:
    """An error's traceback, outermost first."""
    return [
        Frame(each.filename, each.lineno or 0, plain_function(each.name), each.line or "")
        for each in traceback.extract_tb(error.__traceback__)
    ]


def _refuse_if_eager_fails(target: Target, case: Case) -> None:
    """A model that raises by itself has nothing to be triaged."""
    rewind()
    try:
        target.step(own_model(target, case), train=case.train)()
    except Exception as error:  # whatever the model raises
        raise UserError(f"{case.target} raises by itself, uncompiled, in {case.kind}: {_one_line(error)}") from error


def _behind(look: _Look, case: Case, seeds: Sequence[int], user_code: UserCodeFilter) -> list[tuple[int, Break]]:
    """The breaks behind functions that were given up, one given-up line after the other taken out of the way."""
    found: list[tuple[int, Break]] = []
    held: dict[tuple[str, int], Held] = {}
    latest = look.breaks
    barred: set[tuple[str, int]] = set()
    at_once = True
    for _ in range(_MOST_ROUNDS):
        hiding: dict[tuple[str, int], list[Break]] = {}
        for each in _hiding([each for _, each in latest], held, user_code):
            hiding.setdefault((each.file, each.line), []).append(each)
        in_the_way = {place: _what_to_hold(breaks, held.get(place)) for place, breaks in hiding.items()}
        new = {place: what for place, what in in_the_way.items() if held.get(place) != what and place not in barred}
        if not new:
            break
        new = new if at_once else dict(list(new.items())[:1])
        try:
            latest = _look_behind(held | new, case, seeds, user_code)
        except Exception as error:  # a held value may be one that the model cannot go on with
            if len(new) == 1:
                ((file, line),) = new
                barred |= set(new)
                why = _one_line(error.__cause__ or error if isinstance(error, UserError) else error)
                look.notes.append(f"behind {Path(file).name}:{line} not all could be traced: with it held: {why}")
            at_once = False
            continue
        held |= new
        # A library's line that a user's leads to is known too: behind what is held PyTorch may name it alone.
        known = {each.place for _, each in look.breaks + found} | {each.library for _, each in look.breaks + found}
        known |= {f"{file}:{line}" for file, line in held}
        found += [
            (seed, each) for seed, each in latest if each.place not in known and not _made_by_holding(each, user_code)
        ]
    if held:
        forget_user_modules(user_code)  # they hold recorded values
    look.notes += [
        f"behind {Path(each.file).name}:{each.line} nothing was looked for: its file is an installed package's"
        for each in merge_breaks(each for _, each in look.breaks + found)
        if each.whole_frame and each.category != RECOMPILE_LIMIT and not user_code.is_user(each.file)
    ]
    return found


def _look_behind(
    held: Mapping[tuple[str, int], Held], case: Case, seeds: Sequence[int], user_code: UserCodeFilter
) -> list[tuple[int, Break]]:
    """The breaks that are seen with lines held at what they compute."""
    recording, replaying = overlays(held)
    with overlaid(recording):
        forget_user_modules(user_code)
        target = load_case(case)
        seed_everything(seeds[0])
        target.step(target.model, train=case.train)()
    with overlaid(replaying):
        forget_user_modules(user_code)
        look = _look(load_case(case), case, seeds, user_code)
        if look.failures and case.train:
            # The backward pass of what is held may be what fails; the forward pass goes on without it.
            forget_user_modules(user_code)
            return look.breaks + _look(load_case(case), case, seeds, user_code, backward=False).breaks
        return look.breaks


def _hiding(breaks: Sequence[Break], held: Mapping[tuple[str, int], Held], user_code: UserCodeFilter) -> list[Break]:
    """The breaks that hide what follows them.

    A function that was given up where it calls one that breaks is given up for that one's sake: the call is left as it
    is, since held it would hide all that is called, until nothing inside of it is left to hold.
    """
    # Until it hit the limit, a function was traced as a whole.
    own = [each for each in breaks if each.category != RECOMPILE_LIMIT and user_code.is_user(each.file)]
    inside: dict[tuple[str, int], list[Break]] = {}
    for each in own:
        for place in {(frame.file, frame.line) for frame in each.stack} - {(each.file, each.line)}:
            inside.setdefault(place, []).append(each)
    found = []
    for each in own:
        if each.whole_frame:
            called = inside.get((each.file, each.line), [])
            left = [one for one in called if held.get((one.file, one.line)) not in _ALL_OF_IT]
            found += left or [each]
    return found


def _what_to_hold(breaks: Sequence[Break], before: Held | None) -> Held:
    """What broke by itself first; then, of a call for its own sake such as kept.append(x.item()), the arguments.

    Args:
        breaks: of a line.
        before: what was held of it; None of one that was not.
    """
    if any(each.function == "<lambda>" for each in breaks):
        return Held("lambda")
    marked = frozenset(
        Marked(*each.columns, each.category == "data-dependent control flow")
        for each in breaks
        if each.columns is not None
    )
    reads = all(each.category in _READS for each in breaks)
    if before is None:
        return Held("arguments" if reads else "value", marked)
    # Of a call that itself is not traced, once its arguments are known, nothing less can be held.
    if before.marked and not marked <= before.marked and (reads or before.part == "value"):
        return replace(before, marked=before.marked | marked)
    return Held("value")


def _made_by_holding(each: Break, user_code: UserCodeFilter) -> bool:
    """Whether a held value, of a kind that the code would not have had there, may be the only cause."""
    if user_code.is_launcher(each.file) or holding.PREFIX in each.reason:
        return True
    return each.category in ("compile error", BACKEND_FAILED) or each.reason == "Observed exception"


def own_model(target: Target, case: Case) -> nn.Module:
    """A model with the target's weights that no other step disturbs; made anew where it cannot be copied."""
    try:
        return copy.deepcopy(target.model)
    except Exception:  # a lock, an open file, whatever deepcopy raises for what the model holds
        return load_case(case).model


def lost_graphs(case: Case) -> list[SilentEager]:
    """Why CUDA graphs are left out of a case when they are asked for, each with the line that PyTorch names."""
    target = load_case(case)
    compiled = cast(nn.Module, torch.compile(own_model(target, case), mode="reduce-overhead", dynamic=case.dynamic))
    step = target.step(compiled, train=case.train)
    with CudaGraphSkips() as skips:
        for _ in range(_STEADY_CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            step()
    return read_lost_graphs(skips, user_code_filter())


def read_lost_graphs(skips: CudaGraphSkips, user_code: UserCodeFilter) -> list[SilentEager]:
    """The reasons that were collected, as findings."""
    found = []
    for reason, message in zip(skips.reasons, skips.messages, strict=True):
        place = user_code.innermost(frames_in(message)) or Frame("?", 0, "?")
        found.append(SilentEager("CUDA graph lost", place, place.function, f"CUDA graphs are left out: {reason}"))
    return found


def unexplained(frames: Iterable[EagerFrame], trace: CompileTrace) -> list[SilentEager]:
    """The eager functions that no break explains."""
    places = {(each.file, each.line) for each in trace.breaks}
    places |= {(frame.file, frame.line) for each in trace.breaks for frame in each.stack}
    skipped = {(each.file, each.function) for each in trace.breaks if each.whole_frame}
    skipped |= {(each.stack[-1].file, each.stack[-1].function) for each in trace.breaks if each.stack}
    # A break in a function that Dynamo was following into gives up the function that it came from.
    skipped |= {
        (frame.file, plain_function(frame.function))
        for each in trace.breaks
        if each.whole_frame
        for frame in each.stack
    }
    empty = {(each.file, each.line) for each in trace.empty}
    found: list[SilentEager] = []
    for each in frames:
        chain = [*each.callers, each.frame]
        name = plain_function(each.frame.function)
        if (each.frame.file, name) in skipped or any((f.file, f.line) in places for f in chain):
            continue
        if each.generator and each.callers and (each.callers[-1].file, each.callers[-1].function) in skipped:
            continue  # Dynamo would have followed into it
        if any((known.frame.file, known.function) in {(f.file, f.function) for f in each.callers} for known in found):
            continue  # called by a function that is on the list
        found.append(_silent_kind(each, (each.frame.file, each.frame.line) in empty))
    return found


def _silent_kind(each: EagerFrame, empty: bool) -> SilentEager:
    name = plain_function(each.frame.function)
    if empty:
        reason = (
            f"{name} did nothing with tensors when it was first called; Dynamo leaves it alone from then on, "
            "and later calls compute eagerly"
        )
        return SilentEager("silent eager", each.frame, name, reason)
    if each.method_of and name != "forward":
        reason = (
            f"torch.compile(model) compiles forward; {each.method_of}.{name}, called by itself, runs as it was written"
        )
        return SilentEager("method not compiled", each.callers[-1] if each.callers else each.frame, name, reason)
    return SilentEager("silent eager", each.frame, name, f"{name} computes outside any graph, and Dynamo says nothing")


def _seeds_of(each: Break, breaks: Sequence[tuple[int, Break]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(seed for seed, other in breaks if other.identity == each.identity))


def _distinct(recompiles: Iterable[Recompile]) -> tuple[Recompile, ...]:
    found: dict[tuple[str, int, str, str], Recompile] = {}
    for each in recompiles:
        found.setdefault((each.file, each.line, re.sub(r"\d+", "N", each.guard), each.called_from), each)
    return tuple(found.values())


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"

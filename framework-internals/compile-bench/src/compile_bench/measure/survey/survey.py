"""Survey a target: trace it without generating code, in a process of its own, and report what stays out of graphs.

Dynamo splits a function at a graph break and resumes it behind the break. Inside a loop, a ``try`` or an unsupported
context manager it cannot resume: it skips the whole frame, and nothing that follows in the function is traced. So the
model is traced again, with Dynamo allowed to resume in loops and the statements around such a break changed
(:mod:`compile_bench.targets.overlay`). Everything else runs as it is written, with the model's own values. This is
repeated until no such statement surrounds a skipped frame.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchkit import UserError
from benchkit.errors import first_line
from compile_bench.capture.collector import CudaGraphSkips, resuming_in_loops, settings, user_code_filter
from compile_bench.capture.eager_frames import lost_cuda_graphs
from compile_bench.capture.frames import Frame, UserCodeFilter, plain_function
from compile_bench.capture.parsing import merge_breaks
from compile_bench.capture.text import distinct
from compile_bench.capture.trace import Break, Recompile, SilentEager
from compile_bench.capture.wording import BACKEND_FAILED, ITERATOR_IN_USE, RECOMPILE_LIMIT
from compile_bench.measure.records import Triage
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey.tracing import STEADY_CALLS, TracingPass, own_model, raised_at, trace_target
from compile_bench.measure.survey.types import Survey, place_of
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
from compile_bench.targets.regional import OwnRegions, compile_case


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
            failure = "" if pending else f"; with the statements there changed, the model raises {first_line(error)}"
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
    user_code = user_code_filter()
    # An RNN makes Dynamo skip the frame too, unless this setting lets it trace one.
    with overlaid(resumable(blocks.changed)), resuming_in_loops(), settings({"allow_rnn": True}):
        forget_user_modules(user_code)
        target = load_case(case)
        target.step(own_model(target, case), train=case.train)()
        forget_user_modules(user_code)
        return trace_target(load_case(case), case, seeds)


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
        notes=(*([f"the model {seen.eager_failure}"] if seen.eager_failure else ()), *hidden.notes),
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

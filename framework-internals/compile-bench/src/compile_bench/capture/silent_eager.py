"""Code that runs eagerly although Dynamo reports nothing about it. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compile_bench.capture.frames import Frame, UserCodeFilter, frames_in, plain_function
from compile_bench.capture.trace import CompileTrace
from compile_bench.capture.wording import RECOMPILE_LIMIT

if TYPE_CHECKING:
    from compile_bench.capture.eager_frames import EagerFrame  # imports torch

SilentKind = Literal["silent eager", "method not compiled", "CUDA graph lost"]


@dataclass(frozen=True)
class SilentEager:
    """A function that runs eagerly, or a graph that runs without CUDA graphs, without a message from Dynamo."""

    kind: SilentKind  # what happened
    frame: Frame  # first line of the function; for a method, the line that calls it; for a CUDA graph, the model's line
    function: str  # name of the function
    reason: str  # explanation in one sentence


def silent_functions(eager: Iterable[EagerFrame], trace: CompileTrace) -> list[SilentEager]:
    """The functions that computed outside any graph and that no graph break explains."""
    places = {(met.file, met.line) for met in trace.breaks}
    places |= {(frame.file, frame.line) for met in trace.breaks for frame in met.stack}
    broken = {(met.file, met.function) for met in trace.breaks if met.whole_frame}
    broken |= {(met.stack[-1].file, met.stack[-1].function) for met in trace.breaks if met.stack}
    # Dynamo inlines calls: a break in a callee can skip the frame of every caller in its stack.
    broken |= {
        (frame.file, plain_function(frame.function)) for met in trace.breaks if met.whole_frame for frame in met.stack
    }
    # After the recompile limit, Dynamo compiles nothing that the function calls either. The outermost line is its own.
    limited = {
        (frame.file, plain_function(frame.function))
        for met in trace.breaks
        if met.category == RECOMPILE_LIMIT
        for frame in met.frames[:1]
    }
    without_tensors = {(function.file, function.line) for function in trace.empty}
    silent: list[SilentEager] = []
    for eager_frame in eager:
        stack = [*eager_frame.callers, eager_frame.frame]
        callers = {(frame.file, frame.function) for frame in eager_frame.callers}
        if (eager_frame.frame.file, plain_function(eager_frame.frame.function)) in broken:
            continue
        if callers & limited or any((frame.file, frame.line) in places for frame in stack):
            continue
        if (
            eager_frame.generator
            and eager_frame.callers
            and (eager_frame.callers[-1].file, eager_frame.callers[-1].function) in broken
        ):
            continue  # Dynamo inlines a generator into its caller, which it skipped.
        if any((known.frame.file, known.function) in callers for known in silent):
            continue  # The caller is already in the list.
        silent.append(
            _silent_function(
                eager_frame, without_tensors=(eager_frame.frame.file, eager_frame.frame.line) in without_tensors
            )
        )
    return silent


def _silent_function(eager: EagerFrame, *, without_tensors: bool) -> SilentEager:
    name = plain_function(eager.frame.function)
    if without_tensors:
        reason = (
            f"{name} used no tensors in its first call, so Dynamo compiled nothing for it; "
            "its later calls compute eagerly"
        )
        return SilentEager("silent eager", eager.frame, name, reason)
    if eager.method_of and name != "forward":
        reason = f"torch.compile(model) compiles forward only; a direct call of {eager.method_of}.{name} runs eagerly"
        return SilentEager("method not compiled", eager.callers[-1] if eager.callers else eager.frame, name, reason)
    reason = f"{name} computes outside any graph, and Dynamo reports nothing about it"
    return SilentEager("silent eager", eager.frame, name, reason)


def lost_cuda_graphs(reasons: Sequence[str], messages: Sequence[str], user_code: UserCodeFilter) -> list[SilentEager]:
    """The reasons why Inductor did not use CUDA graphs.

    A message is the whole text behind a reason, with the model's lines.
    """
    lost = []
    for reason, message in zip(reasons, messages, strict=True):
        place = user_code.innermost(frames_in(message)) or Frame("?", 0, "?")
        lost.append(SilentEager("CUDA graph lost", place, place.function, f"CUDA graphs are not used: {reason}"))
    return lost

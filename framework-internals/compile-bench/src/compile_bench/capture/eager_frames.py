"""Finds what runs eagerly although the model is compiled, and about which Dynamo reports nothing.

That is a method other than ``forward``, or a function that did nothing with tensors in its first call. Such a function
runs its original code object. A compiled function runs another code object, which calls ``__compiled_fn_N``, and
operations inside a graph run no Python code of the user at all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.capture.frames import Frame, UserCodeFilter, frames_in, plain_function
from compile_bench.capture.trace import RECOMPILE_LIMIT, CompileTrace, SilentEager

_COMPILED_NAME = "__compiled_fn"
_BACKWARD = "/torch/autograd/graph.py"  # calls the hooks of tensors in a backward pass
# Code objects that belong to the function around them.
_INNER_BODIES = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))


@dataclass(frozen=True)
class EagerFrame:
    """A function of the model that computed with tensors outside any graph."""

    frame: Frame  # first line and name of the function
    callers: tuple[Frame, ...]  # the user's lines that led to it, outermost first
    # Name of the module's class, if the function is a method of a module of the model; otherwise empty.
    method_of: str = ""
    generator: bool = False  # whether it is a generator. Dynamo inlines generators and never compiles one by itself


@dataclass
class _Call:
    """A Python call in progress."""

    watched: bool  # whether it runs an original code object of the user, inside the model
    inside: bool  # whether it is inside the model
    known: list[Tensor]  # tensors that it received: its arguments and the results of the calls that it made
    computed: bool = False  # whether it called an operator
    callers: tuple[Frame, ...] = ()  # as in :class:`EagerFrame`
    method_of: str = ""  # as in :class:`EagerFrame`


class EagerWatch:
    """Watches a step for functions of the model that run eagerly and compute with tensors."""

    def __init__(self, modules: Iterable[nn.Module], user_code: UserCodeFilter) -> None:
        self._modules = {id(module) for module in modules}
        self._user_code = user_code
        self._calls: list[_Call] = []
        self._found: dict[Frame, EagerFrame] = {}

    def run(self, step: Callable[[], Any]) -> tuple[EagerFrame, ...]:
        """Run a step of a model that has been compiled before. Each function is listed once."""
        before = sys.getprofile()
        # Dynamo would compile this function where a frame that it skips calls another, and count its breaks.
        sys.setprofile(torch.compiler.disable(self._event))
        try:
            step()
        finally:
            sys.setprofile(before)
        return tuple(self._found.values())

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._calls.append(self._entered(frame))
        elif event == "return" and self._calls:
            self._left(frame, argument, self._calls.pop())
        elif event == "c_call" and self._calls and self._calls[-1].watched and _is_operator(argument):
            self._calls[-1].computed = True

    def _entered(self, frame: FrameType) -> _Call:
        code = frame.f_code
        parent = self._calls[-1] if self._calls else None
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        module = owner if isinstance(owner, nn.Module) and id(owner) in self._modules else None
        compiles = code.co_filename.endswith("/torch/_dynamo/convert_frame.py")
        is_user, caller = self._user_code.is_user, frame.f_back
        is_hook = caller is not None and caller.f_code.co_filename.endswith(_BACKWARD) and is_user(code.co_filename)
        inside = module is not None or is_hook or (parent is not None and parent.inside and not compiles)
        watched = inside and is_user(code.co_filename) and not _is_compiled(code)
        if not watched:
            return _Call(False, inside, [])
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        # A hook takes a module first, too.
        is_method = module is not None and hasattr(type(module), plain_function(code.co_name))
        method = type(module).__name__ if is_method else ""
        return _Call(True, True, _tensors(arguments), callers=self._callers(frame), method_of=method)

    def _callers(self, frame: FrameType) -> tuple[Frame, ...]:
        callers = []
        back = frame.f_back
        while back is not None:
            code = back.f_code
            if self._user_code.is_user(code.co_filename):
                callers.append(Frame(code.co_filename, back.f_lineno, plain_function(code.co_name)))
            back = back.f_back
        return tuple(reversed(callers))

    def _left(self, frame: FrameType, value: Any, call: _Call) -> None:
        if not call.inside:
            return
        results = _tensors(value)
        if call.watched and (
            call.computed or any(all(result is not known for known in call.known) for result in results)
        ):
            # The key is the place. Code that Dynamo wrote cannot always be hashed: its constants may be dicts.
            code = frame.f_code
            place = Frame(code.co_filename, code.co_firstlineno, code.co_name)
            generator = bool(code.co_flags & inspect.CO_GENERATOR)
            self._found.setdefault(place, EagerFrame(place, call.callers, call.method_of, generator))
        if self._calls:
            self._calls[-1].known += results


def _is_compiled(code: CodeType) -> bool:
    return code.co_name in _INNER_BODIES or any(name.startswith(_COMPILED_NAME) for name in code.co_names)


def _is_operator(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return isinstance(getattr(function, "__self__", None), Tensor) or module.startswith(("torch._C._nn", "torch._VF"))


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in a value and in its containers. The depth is limited, because a container may contain itself."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or not isinstance(value, (tuple, list, dict)):
        return []
    return [
        leaf
        for member in (value.values() if isinstance(value, dict) else value)
        for leaf in _tensors(member, depth - 1)
    ]


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

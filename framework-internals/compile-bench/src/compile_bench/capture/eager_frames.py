"""Which of the user's functions ran eagerly, although the model is compiled.

Dynamo says nothing about a function that it never looks at: a method other than ``forward``, or a function whose first
call did nothing with tensors. What gives them away is that their own code object runs. A compiled function runs as
another code object, which calls ``__compiled_fn_N``; what runs inside a graph does not run as Python of the user's at
all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter

_COMPILED_NAME = "__compiled_fn"
# Bodies that belong to the function around them.
_INNER_BODIES = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))


@dataclass(frozen=True)
class EagerFrame:
    """A function of the model that computed with tensors outside any graph.

    Attributes:
        frame: its first line and name.
        callers: the user's lines that led to it, outermost first.
        method_of: class of the compiled model's module that it is a method of; empty if of none.
        generator: whether it yields; Dynamo follows into a generator and never compiles one by itself.
    """

    frame: Frame
    callers: tuple[Frame, ...]
    method_of: str = ""
    generator: bool = False


@dataclass
class _Call:
    """A Python call that is in progress."""

    watched: bool
    inside: bool
    known: list[Tensor]
    computed: bool = False
    callers: tuple[Frame, ...] = ()
    method_of: str = ""
    returned: list[Tensor] = field(default_factory=list)


class EagerWatch:
    """Watches a step for the model's functions that run eagerly and compute.

    Args:
        modules: of the compiled model.
        user_code: whose code a file is.
    """

    def __init__(self, modules: Iterable[nn.Module], user_code: UserCodeFilter) -> None:
        self._modules = {id(module) for module in modules}
        self._user_code = user_code
        self._calls: list[_Call] = []
        self._found: dict[Frame, EagerFrame] = {}

    def run(self, step: Callable[[], Any]) -> tuple[EagerFrame, ...]:
        """Do a step, after everything has been compiled.

        Returns:
            One entry a function; empty where all that the model computes is in graphs.
        """
        before = sys.getprofile()
        sys.setprofile(self._event)
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
        inside = module is not None or (parent is not None and parent.inside and not _compiles(code))
        watched = inside and self._user_code.of_user(code.co_filename) and not _is_compiled(code)
        if not watched:
            return _Call(False, inside, [])
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        method = type(module).__name__ if module is not None else ""
        return _Call(True, True, _tensors(arguments), callers=self._callers(frame), method_of=method)

    def _callers(self, frame: FrameType) -> tuple[Frame, ...]:
        callers = []
        back = frame.f_back
        while back is not None:
            if self._user_code.of_user(back.f_code.co_filename):
                callers.append(Frame(back.f_code.co_filename, back.f_lineno, _plain_name(back.f_code)))
            back = back.f_back
        return tuple(reversed(callers))

    def _left(self, frame: FrameType, value: Any, call: _Call) -> None:
        if not call.inside:
            return
        results = _tensors(value)
        if call.watched:
            made_here = any(all(result is not known for known in call.known) for result in results)
            if call.computed or made_here:
                self._report(frame.f_code, call)
        if self._calls:
            self._calls[-1].known += results

    def _report(self, code: CodeType, call: _Call) -> None:
        # By place: code that Dynamo wrote cannot always be hashed, since its constants may be dictionaries.
        place = Frame(code.co_filename, code.co_firstlineno, code.co_name)
        generator = bool(code.co_flags & inspect.CO_GENERATOR)
        self._found.setdefault(place, EagerFrame(place, call.callers, call.method_of, generator))


def _is_compiled(code: CodeType) -> bool:
    return code.co_name in _INNER_BODIES or any(name.startswith(_COMPILED_NAME) for name in code.co_names)


def _compiles(code: CodeType) -> bool:
    return code.co_filename.endswith("/torch/_dynamo/convert_frame.py")


def _plain_name(code: CodeType) -> str:
    """A function's name, of its resumed parts too."""
    name = code.co_name
    return name.removeprefix(RESUMED).rpartition("_at_")[0] if name.startswith(RESUMED) else name


def _is_operator(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return isinstance(getattr(function, "__self__", None), Tensor) or module.startswith(("torch._C._nn", "torch._VF"))


def _tensors(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in a value and in the containers that it is made of, not too deep: containers may hold themselves."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or not isinstance(value, (tuple, list, dict)):
        return []
    return [
        leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in _tensors(each, depth - 1)
    ]

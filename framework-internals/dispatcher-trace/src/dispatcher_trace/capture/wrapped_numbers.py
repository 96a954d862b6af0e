"""Tensors that stand for Python numbers ("wrapped numbers" in torch's C++): zero-dimensional, weak in type promotion.

A Python kernel gets such an argument as a plain number, and ``call_boxed`` refuses a number where the schema says
Tensor. No other tensor gives the same results: ``x / 2.0`` with a zero-dimensional float32 ``x`` stays float32 only
because the wrapped 2.0 is weak. So a shim passes on the tensor that torch made the number of. Torch asks it for
``_wrapped_number`` just before.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from dispatcher_trace.capture.key_sets import bits_of, key_set

Symbol = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Number = complex | Symbol
ASKED_FOR = "_wrapped_number"
"""The attribute of a tensor that torch asks for the number to give Python in its place."""
_TEXT = "_dispatcher_trace_text"


def wrapped_number() -> torch.Tensor:
    """A tensor that torch made of a number: a multiplication saves it for its backward. No shim may be there."""
    outside = torch._C._ForceDispatchKeyGuard(key_set(bits_of("BackendSelect", "ADInplaceOrView")), key_set(0))
    with outside, torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        return (torch.ones((), device="cpu", requires_grad=True) * 0.5).grad_fn._saved_other  # type: ignore[union-attr]


def forward_mode() -> bool:
    """Whether this code runs under forward-mode differentiation: ``torch.func.jvp`` or ``forward_ad.dual_level``."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    jvp = any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)
    return jvp or torch.autograd.forward_ad._current_level >= 0


def inside_transform(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a wrapper of functorch's."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all of functorch's wrappers."""
    while inside_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def text_of(tensor: torch.Tensor) -> str:
    """The number that a tensor stands for; empty for one that stands for none."""
    text: str = vars(innermost(tensor)).get(_TEXT, "")
    return text


class _Conversions(threading.local):
    """The tensors that torch turned into numbers on this thread, latest last: into plain ones and into symbols."""

    def __init__(self) -> None:
        self.plain: deque[torch.Tensor] = deque(maxlen=8)  # more than one call has
        self.symbolic: deque[torch.Tensor] = deque(maxlen=8)


class _OnConversion:
    """What torch asks a wrapped number for before it turns it into a number for Python: the number to use instead.

    C++ sets it for a symbolic size. Without an answer torch reads the tensor's memory, which raises for functorch's
    wrapper: it has none. So that one passes as the tensor that it is.
    """

    def __init__(self) -> None:
        self._conversions = _Conversions()

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        if inside_transform(tensor):
            return tensor
        facts = vars(tensor)
        if ASKED_FOR in facts:
            self._conversions.symbolic.append(tensor)
            return facts[ASKED_FOR]
        self._conversions.plain.append(tensor)
        raise AttributeError(ASKED_FOR)

    def __set__(self, tensor: torch.Tensor, symbol: Symbol) -> None:
        vars(tensor)[ASKED_FOR] = symbol

    def tensor_of(self, number: Number) -> torch.Tensor | None:
        if isinstance(number, SYMBOLS):
            made_of = (tensor for tensor in reversed(self._conversions.symbolic) if vars(tensor)[ASKED_FOR] is number)
            tensor = next(made_of, None)
        else:
            tensor = self._conversions.plain.pop() if self._conversions.plain else None
        if tensor is not None:
            vars(tensor)[_TEXT] = repr(number)
        return tensor

    def forget(self) -> None:
        self._conversions.plain.clear()
        self._conversions.symbolic.clear()


_on_conversion = _OnConversion()
_waiting: list[int] = []  # signals that arrived there
CONVERTING = (_OnConversion.__get__.__code__, _Conversions.__init__.__code__, inside_transform.__code__)
"""What runs in Python while torch converts a number."""


def watch_conversions() -> None:
    """Let shims get the tensors of numbers."""
    setattr(torch.Tensor, ASKED_FOR, _on_conversion)


def stop_watching() -> None:
    """The end of :func:`watch_conversions`."""
    if ASKED_FOR in vars(torch.Tensor):
        delattr(torch.Tensor, ASKED_FOR)
    _on_conversion.forget()


def tensors_of(numbers: Sequence[Number]) -> list[torch.Tensor | None]:
    """The tensors that torch made these numbers of, for the call that runs now; None for a number from elsewhere.

    Args:
        numbers: All numbers of the call that stand for tensors, in order.
    """
    if _waiting and threading.current_thread() is threading.main_thread():
        signal.raise_signal(_waiting.pop())
    return [_on_conversion.tensor_of(number) for number in reversed(numbers)][::-1]


@contextmanager
def signals_between_conversions() -> Iterator[None]:
    """A block in which a signal that arrives while torch converts a number is handled in the shim that takes it.

    Torch clears what the handler raises there: it takes any exception for the lack of the attribute. Most signals that
    arrive while C++ runs get there, because it is the next Python code; a number that no shim takes leaves them to a
    thread. The program's handlers, those that it sets in the block too, are called by one that it does not see.
    """
    handlers = python_handlers()
    set_handler, get_handler = signal.signal, signal.getsignal

    def again(number: int) -> None:
        time.sleep(0.001)
        with suppress(ValueError):  # a shim has raised it
            _waiting.remove(number)
            signal.raise_signal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is handle.__code__:  # still handling it
            frame = frame.f_back
        if frame is not None and frame.f_code in CONVERTING:
            _waiting.append(number)
            _thread.start_new_thread(again, (number,))  # a Thread's start would wait for it
        else:
            handlers[number](number, frame)

    def seen_handler(signalnum: int) -> Any:
        handler = get_handler(signalnum)
        return handlers[signalnum] if handler is handle else handler

    def set_seen_handler(signalnum: int, handler: Any) -> Any:
        before = seen_handler(signalnum)
        handlers.setdefault(signalnum, handler)
        set_handler(signalnum, handle if callable(handler) else handler)
        handlers[signalnum] = handler
        return before

    for number in handlers:
        set_handler(number, handle)
    if threading.current_thread() is threading.main_thread():  # another one could not take them back
        signal.signal, signal.getsignal = set_seen_handler, seen_handler
    try:
        yield
    finally:
        signal.signal, signal.getsignal = set_handler, get_handler
        # Another thread, such as one that closes a suspended generator, cannot set them; they then go on as they are.
        for number in python_handlers():
            if get_handler(number) is handle:
                set_handler(number, handlers[number])


def python_handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """The handlers from which an exception can come on this thread, by the signal."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if callable(handler)}

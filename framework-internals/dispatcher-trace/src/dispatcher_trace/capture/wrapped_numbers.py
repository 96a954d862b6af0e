"""Tensors that stand for Python numbers ("wrapped numbers" in torch's C++).

A Python kernel gets such an argument as a plain number, and ``call_boxed`` refuses a number where the schema says
Tensor. So a shim has to make the tensor again.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch

from dispatcher_trace.capture.key_sets import bits_of, key_set

# The operators that making a wrapped number calls with that very number.
WRAPPING_OPERATORS = ("aten::mul.Tensor", "aten::to.dtype", "aten::_to_copy", "aten::copy_")

Symbol = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Number = complex | Symbol


def wrapped_number(value: complex) -> torch.Tensor:
    """The tensor that torch's C++ makes of a Python number: zero-dimensional, and weak in type promotion.

    An ordinary zero-dimensional tensor would change results: ``x / 2.0`` with a zero-dimensional float32 ``x`` stays
    float32 only because the wrapped 2.0 is weak. Torch has no public function for it. A multiplication saves such a
    tensor for its backward, and this returns that one. :data:`WRAPPING_OPERATORS` must not be shimmed meanwhile.

    Args:
        value: An int, float, bool or complex.
    """
    with _outside_transforms(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        factor = torch.ones((), dtype=torch.float64, device="cpu", requires_grad=True)
        return (factor * value).grad_fn._saved_other  # type: ignore[union-attr]


def wrapped_symbol(symbol: Symbol) -> torch.Tensor:
    """The tensor that torch's C++ makes of a symbolic size (``x * x.shape[0]`` under symbolic tracing).

    It is a wrapped number of the symbol's kind. Nobody reads its value: code that unwraps it takes the symbol from an
    attribute of the Python object. :data:`WRAPPING_OPERATORS` must not be shimmed meanwhile.

    Args:
        symbol: The symbolic number.
    """
    placeholder = {torch.SymInt: 7777777, torch.SymFloat: float("nan"), torch.SymBool: True}[type(symbol)]
    number = wrapped_number(placeholder)
    number._wrapped_number = symbol  # type: ignore[attr-defined]
    return number


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


class _Conversions(threading.local):
    """The wrapped numbers that torch turned into plain ones on this thread, latest last.

    A zero tangent is kept as the tensor that it is. Other wrapped numbers are None: they are made again by value.
    """

    def __init__(self) -> None:
        self.latest: deque[torch.Tensor | None] = deque(maxlen=8)  # more than one call has


class _OnConversion:
    """What torch asks a wrapped number for before it turns it into a plain one for Python: the number to use instead.

    Without an answer torch reads the tensor's memory, which raises for functorch's wrapper: it has none. So that one
    passes as the tensor that it is. The tangent of a number is an efficient zero tensor, which no ordinary tensor can
    replace: its kernels give another dtype. It becomes a plain zero, for Python kernels that expect one, and is kept
    for the shim that runs next.
    """

    def __init__(self) -> None:
        self._conversions = _Conversions()

    def __get__(self, tensor: torch.Tensor | None, owner: type) -> Any:
        if tensor is None:
            return self
        if inside_transform(tensor):
            return tensor
        with torch._C.DisableTorchFunction():  # a mode of the user would see the question
            self._conversions.latest.append(tensor if torch._is_zerotensor(tensor) else None)
        raise AttributeError("_wrapped_number")

    def zero_tangents(self, count: int) -> list[torch.Tensor | None]:
        latest = self._conversions.latest
        tangents = [latest.pop() if latest else None for _ in range(count)][::-1]
        latest.clear()
        return tangents


_on_conversion = _OnConversion()


def watch_conversions() -> None:
    """Let shims get the numbers of ``torch.func.grad`` and jvp as tensors, and see which ones were zero tangents."""
    torch.Tensor._wrapped_number = _on_conversion  # type: ignore[attr-defined]


def stop_watching() -> None:
    """The end of :func:`watch_conversions`."""
    if "_wrapped_number" in vars(torch.Tensor):
        del torch.Tensor._wrapped_number  # type: ignore[attr-defined]


@contextmanager
def signals_between_conversions() -> Iterator[None]:
    """A block in which a signal that arrives while torch converts a number is handled a millisecond later.

    Torch clears what the handler raises there: it takes any exception for the lack of the attribute. Most signals that
    arrive while C++ runs get there, because it is the next Python code.
    """
    handlers = python_handlers()
    codes = (_OnConversion.__get__.__code__, inside_transform.__code__)

    def again(number: int) -> None:
        time.sleep(0.001)
        signal.raise_signal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is handle.__code__:  # still handling it
            frame = frame.f_back
        if frame is not None and frame.f_code in codes:
            _thread.start_new_thread(again, (number,))  # a Thread's start would wait for it
        else:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        # Another thread, such as one that closes a suspended generator, cannot set them; they then go on as they are.
        for number, handler in handlers.items() if python_handlers() else ():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def python_handlers() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """The handlers from which an exception can come on this thread, by the signal."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {number: handler for number, handler in handlers.items() if callable(handler)}


def zero_tangents(count: int) -> list[torch.Tensor | None]:
    """The tensors of the last conversions on this thread; None for those that were no zero tangent.

    Args:
        count: Number of plain, not symbolic, numbers that torch made of wrapped ones for the call that runs now.
    """
    return _on_conversion.zero_tangents(count)


def _outside_transforms() -> AbstractContextManager[None]:
    """A context with the thread state of ordinary code: nothing that functorch or a mode includes or excludes."""
    guard: Callable[..., Any] = torch._C._ForceDispatchKeyGuard
    return guard(key_set(bits_of("BackendSelect", "ADInplaceOrView")), key_set(0))

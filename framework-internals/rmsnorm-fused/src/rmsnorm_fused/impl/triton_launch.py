"""Launches of Triton's kernels; one that was compiled for the same kind of arguments is launched without asking again.

``kernel[grid](...)`` finds out at each call how Triton specialises every argument, and takes longer than a small kernel
runs. Here the exact numbers, the dtypes and the alignment of the addresses are the key of a compiled kernel, which is
launched as Triton's tutorials do: ``compiled[grid](...)``, with all arguments in the order of the signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton

_MOST = 4096  # kinds of calls, each with its number of rows; then the table starts anew
_ALIGNMENT = 16  # bytes; what Triton distinguishes about an address
_TAKES_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)  # compiled[grid] does, since then

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_recorded = ContextVar("recorded", default=False)


@contextmanager
def recorded() -> Iterator[None]:
    """Inside the block a launch becomes a node of the graph that torch traces, which a compiler launches itself."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Launch a kernel on the current device."""
    if _recorded.get():
        torch.library.wrap_triton(kernel)[grid](*arguments, **constants, num_warps=num_warps)
        return
    key = (
        id(kernel),
        _device(arguments),
        num_warps,
        tuple([
            (argument.dtype, argument.data_ptr() % _ALIGNMENT == 0) if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]),
        tuple(constants.values()),
    )  # fmt: skip
    known = _compiled.get(key)
    if known is not None:
        compiled, in_order = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *in_order)
        return
    compiled = kernel[grid](*arguments, **constants, num_warps=num_warps)
    if compiled is not None and _TAKES_CONSTANTS:  # Triton's interpreter returns None
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _device(arguments: tuple[Any, ...]) -> int:
    return next(argument.get_device() for argument in arguments if isinstance(argument, torch.Tensor))

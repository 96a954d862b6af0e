"""The smallest program that shows each cause, and the same program with a fix. The modules here import torch."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Repro:
    """The smallest program that shows a cause, and the same program with a fix."""

    broken: Callable[..., Any]  # function or module that shows the cause
    fixed: Callable[..., Any]  # one that computes the same in one graph
    calls: Sequence[tuple[Any, ...]]  # positional arguments of each call
    fixed_calls: Sequence[tuple[Any, ...]] | None = None  # those of ``fixed``, if they differ
    around: Callable[[int], AbstractContextManager[Any]] | None = (
        None  # context of the n-th call; may change state, too
    )
    method: str = ""  # name of the method to call; empty to call ``broken`` itself

    def context(self, index: int) -> AbstractContextManager[Any]:
        """The context manager of the call with this index."""
        return nullcontext() if self.around is None else self.around(index)


# Makes both programs, new ones in each call.
Maker = Callable[[], Repro]

_MAKERS: dict[str, Maker] = {}


def program(name: str) -> Callable[[Maker], Maker]:
    """Make the decorated function the maker of a cause's programs, for programs that keep something."""

    def register(make: Maker) -> Maker:
        assert name not in _MAKERS, name
        _MAKERS[name] = make
        return make

    return register


def broken(
    name: str,
    *,
    fixed: Callable[..., Any] | None = None,
    calls: Sequence[tuple[Any, ...]] | None = None,
    fixed_calls: Sequence[tuple[Any, ...]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function the program that shows a cause; see :class:`Repro`.

    Without ``fixed`` a setting fixes it; without ``calls`` it is called with a vector of ones.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @program(name)
        @wraps(function)
        def make() -> Repro:
            from compile_bench.catalogue.programs.shared import VECTOR

            return Repro(function, fixed or function, [VECTOR] if calls is None else calls, fixed_calls)

        return function

    return register


def makers() -> dict[str, Maker]:
    """The makers of all programs by cause. The first call imports torch."""
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return _MAKERS

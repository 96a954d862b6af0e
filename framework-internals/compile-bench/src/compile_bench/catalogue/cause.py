"""An entry of the catalogue, and how a break or a guard is matched with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["break", "recompile", "silent"]


@dataclass(frozen=True)
class Repro:
    """The smallest program that shows a cause, and the same program with a fix.

    Attributes:
        broken: Function or module that shows the cause.
        fixed: Function or module that computes the same in one graph.
        calls: Positional arguments of each call.
        fixed_calls: Positional arguments of each call of ``fixed``, if they differ from ``calls``.
        around: Returns the context manager of the n-th call. It may change state, too.
        method: Name of the method to call; empty to call ``broken`` itself.
    """

    broken: Callable[..., Any]
    fixed: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    fixed_calls: Sequence[tuple[Any, ...]] | None = None
    around: Callable[[int], AbstractContextManager[Any]] | None = None
    method: str = ""

    def context(self, index: int) -> AbstractContextManager[Any]:
        """The context manager of the call with this index."""
        return nullcontext() if self.around is None else self.around(index)


@dataclass(frozen=True)
class Cause:
    """A cause of graph breaks, recompilations or silent eager execution.

    Attributes:
        name: Name on the command line and in reports.
        title: What the code does, in a phrase.
        theme: Title of the group that lists it.
        kind: Its effect: a break, a recompilation, or silent eager execution.
        pattern: Regular expression for PyTorch's reason, or for the guard that failed.
        why: One or two sentences about why it happens.
        advice: What to do instead.
        make: Makes both programs, new ones in each call.
        code: Regular expression for source lines with this cause; empty for any line.
        settings: Values for ``torch._dynamo.config`` that the fixed program needs.
        options: Options of ``torch.compile`` for the broken program.
        equal: Whether both programs give the same outputs. Programs that draw random numbers do not.
    """

    name: str
    title: str
    theme: str
    kind: Kind
    pattern: str
    why: str
    advice: str
    make: Callable[[], Repro]
    code: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    equal: bool = True


CAUSES: dict[str, Cause] = {}

# PyTorch's reason alone identifies these causes. Other causes share their reasons.
_KNOWN_BY_REASON = frozenset(("disabled-function", "dynamic-shape-captured", "parameter-made-inside", "rnn-allowed"))


def match(reason: str, source: str, columns: tuple[int, int] | None = None) -> Cause | None:
    """The cause of a break, or None if reason and source line match no entry.

    Args:
        reason: PyTorch's reason for the break.
        source: Text of the line, without its indentation.
        columns: Begin and end of the expression that broke. Entries that match this part of the line come first.
    """
    fitting = [each for each in CAUSES.values() if each.kind == "break" and re.search(each.pattern, reason)]
    found = [(each.name, part.span()) for each in fitting if each.code for part in re.finditer(each.code, source)]
    if columns is not None:
        found = [each for each in found if each[1][0] < columns[1] and each[1][1] > columns[0]] or found
    if found:
        # The entry that matches the longest part of the line fits best.
        return CAUSES[max(found, key=lambda each: each[1][1] - each[1][0])[0]]
    return next((each for each in fitting if each.name in _KNOWN_BY_REASON), None)


def match_recompile(guard: str, source: str = "") -> Cause | None:
    """The cause of a recompilation, or None if the guard matches no entry.

    Args:
        guard: The guard that failed, as PyTorch prints it.
        source: Text of the line that made the guard; empty if it is not known.
    """
    fitting = [each for each in CAUSES.values() if each.kind == "recompile" and re.search(each.pattern, guard)]
    of_line = (each for each in fitting if each.code and re.search(each.code, source))
    return next(of_line, next((each for each in fitting if not each.code), None))


def match_limit(source: str) -> Cause:
    """The cause of reaching the recompile limit.

    Args:
        source: Text of the line that made the failing guard.
    """
    counter = CAUSES["counter"]
    return counter if re.search(counter.code, source) else CAUSES["recompile-limit-reached"]


class Theme:
    """A group of causes.

    Args:
        title: Title of the group.
        kind: Effect of its causes.
    """

    def __init__(self, title: str, kind: Kind = "break") -> None:
        self.title = title
        self.kind: Kind = kind

    def cause(
        self, name: str, title: str, *, pattern: str, why: str, advice: str, **more: Any
    ) -> Callable[[Callable[[], Repro]], Callable[[], Repro]]:
        """Register the decorated function as the repro of a new cause. The arguments are those of :class:`Cause`."""

        def register(make: Callable[[], Repro]) -> Callable[[], Repro]:
            assert name not in CAUSES, name
            CAUSES[name] = Cause(name, title, self.title, self.kind, pattern, why, advice, make, **more)
            return make

        return register

"""An entry of the catalogue, and how a break or a guard is matched with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from compile_bench.catalogue.conditions.condition import Condition
from compile_bench.catalogue.use import Use

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
class Advice:
    """What to do about a cause, and where that is known to be safe.

    Attributes:
        text: What to do. ``{value}`` stands for what a guard checked.
        when: When it may be followed.
    """

    text: str
    when: Condition

    def named(self, value: str = "") -> str:
        """The text with the name of the value."""
        return self.text.replace("{value}", value or "self.value")


@dataclass(frozen=True)
class Advised:
    """Advice for one line.

    Attributes:
        case: Name of the catalogue's entry.
        text: What to do.
    """

    case: str
    text: str


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
        advices: What to do instead, each with its condition. The first whose condition holds is given.
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
    advices: tuple[Advice, ...]
    make: Callable[[], Repro]
    code: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    equal: bool = True


CAUSES: dict[str, Cause] = {}

# PyTorch's reason alone identifies these causes. Other causes share their reasons.
_KNOWN_BY_REASON = frozenset(("disabled-function", "dynamic-shape-captured", "parameter-made-inside", "rnn-allowed"))


def match(reason: str, source: str, columns: tuple[int, int] | None = None) -> list[Cause]:
    """The causes that a break may have, the likeliest first.

    Args:
        reason: PyTorch's reason for the break.
        source: Text of the line, without its indentation.
        columns: Begin and end of the expression that broke. Entries that match this part of the line come first.
    """
    fitting = [cause for cause in CAUSES.values() if cause.kind == "break" and re.search(cause.pattern, reason)]
    spans = [(cause, part.span()) for cause in fitting if cause.code for part in re.finditer(cause.code, source)]
    begin, end = columns or (0, len(source))
    # The entry that matches the longest part of the line fits best.
    spans.sort(key=lambda each: (not (each[1][0] < end and each[1][1] > begin), each[1][0] - each[1][1]))
    by_reason = [cause for cause in fitting if cause.name in _KNOWN_BY_REASON]
    return list({cause.name: cause for cause in (*(cause for cause, _ in spans), *by_reason)}.values())


def match_recompile(guard: str, source: str = "") -> list[Cause]:
    """The causes that a recompilation may have, the likeliest first.

    Args:
        guard: The guard that failed, as PyTorch prints it.
        source: Text of the line that made the guard, or of the lines that use its value; empty if they are not known.
    """
    fitting = [cause for cause in CAUSES.values() if cause.kind == "recompile" and re.search(cause.pattern, guard)]
    of_code = [cause for cause in fitting if cause.code and re.search(cause.code, source)]
    return [*of_code, *(cause for cause in fitting if not cause.code)]


def advise(
    causes: Sequence[Cause], use: Use | None, without: Collection[str] = (), *, value: str = ""
) -> list[Advised]:
    """The advice whose condition holds, the advice of the likeliest cause first.

    Args:
        causes: What the cause may be, the likeliest first.
        use: The code; None if it is not known. Then the likeliest cause's advice is given with its condition in words.
        without: Names of causes whose advice was tried and refuted.
        value: What the guard checked, where ``use`` does not say.
    """
    kept = [cause for cause in causes if cause.name not in without]
    if use is None:
        return [
            Advised(cause.name, f"{each.named(value)} (Where {each.when.text}.)")
            for cause in kept[:1]
            for each in cause.advices[:1]
        ]
    return [
        Advised(cause.name, each.named(use.own_value))
        for cause in kept
        for each in cause.advices
        if each.when.holds(use)
    ]


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
        self,
        name: str,
        title: str,
        *,
        pattern: str,
        why: str,
        advice: str,
        when: Condition,
        others: tuple[Advice, ...] = (),
        **more: Any,
    ) -> Callable[[Callable[[], Repro]], Callable[[], Repro]]:
        """Register the decorated function as the repro of a new cause.

        Args:
            name: See :class:`Cause`, as for all arguments that are not named here.
            title: Likewise.
            pattern: Likewise.
            why: Likewise.
            advice: What to do instead.
            when: When that may be done.
            others: Advice for other uses.
            more: Further fields of :class:`Cause`.
        """
        advices = (Advice(advice, when), *others)

        def register(make: Callable[[], Repro]) -> Callable[[], Repro]:
            assert name not in CAUSES, name
            CAUSES[name] = Cause(name, title, self.title, self.kind, pattern, why, advices, make, **more)
            return make

        return register

"""A cause of breaks, recompilations or silent eager execution, as the catalogue holds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["break", "recompile", "silent"]


@dataclass(frozen=True)
class Repro:
    """The smallest program that shows a cause, and the same program without it.

    Attributes:
        broken: a function or module.
        mended: computes the same in one graph.
        calls: arguments, call by call.
        mended_calls: where ``mended`` takes its arguments in another form.
        around: what the n-th call happens in, and what changes before it.
        method: name of the method that is called; empty to call the object itself.
    """

    broken: Callable[..., Any]
    fixed: Callable[..., Any]
    calls: Sequence[tuple[Any, ...]]
    fixed_calls: Sequence[tuple[Any, ...]] | None = None
    around: Callable[[int], AbstractContextManager[Any]] | None = None
    method: str = ""


@dataclass(frozen=True)
class Cause:
    """One entry.

    Attributes:
        name: what the command line and reports call it.
        title: what the code does, in a phrase.
        theme: the family that it is listed in.
        kind: what comes of it.
        pattern: regular expression that PyTorch's reason matches, and of a recompilation the guard that failed.
        why: one or two sentences.
        advice: what to do instead.
        make: makes the programs, fresh with every call.
        code: regular expression of source lines that the entry is about; empty for any.
        settings: of ``torch._dynamo.config``, for the mended program.
        options: of ``torch.compile``, for the broken program.
        equal: whether both programs give the same outputs (a repro that draws random numbers does not).
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


def match(reason: str, source: str, columns: tuple[int, int] | None = None) -> Cause | None:
    """The cause that a break is an instance of, as far as reason and source line tell; None if they do not.

    Args:
        reason: in PyTorch's words.
        source: the line's text, without its indentation.
        columns: of what broke in it: an entry about another part of the line is none that fits as long as there is one
            about this.
    """
    fitting = [each for each in CAUSES.values() if each.kind == "break" and re.search(each.pattern, reason)]
    found = [(each.name, part.span()) for each in fitting if each.code for part in re.finditer(each.code, source)]
    if columns is not None:
        found = [each for each in found if each[1][0] < columns[1] and each[1][1] > columns[0]] or found
    if found:
        # The more of the line an entry is about, the closer it is.
        return CAUSES[max(found, key=lambda each: each[1][1] - each[1][0])[0]]
    # A reason that many causes share says nothing without the line.
    return next((each for each in fitting if each.name in _TOLD_BY_REASON), None)


def match_recompile(guard: str, source: str = "") -> Cause | None:
    """The cause of a recompilation; None if nothing in the catalogue has such a guard.

    Args:
        guard: the condition that no longer held, in PyTorch's words.
        source: text of the line that made it; empty if it is not known.
    """
    fitting = [each for each in CAUSES.values() if each.kind == "recompile" and re.search(each.pattern, guard)]
    of_line = (each for each in fitting if each.code and re.search(each.code, source))
    return next(of_line, next((each for each in fitting if not each.code), None))


def match_limit(source: str) -> Cause:
    """The cause of a function's being past the recompile limit, from the line whose guard kept failing."""
    counter = CAUSES["counter"]
    return counter if re.search(counter.code, source) else CAUSES["given-up-after-limit"]


_TOLD_BY_REASON = frozenset(("disabled-function", "dynamic-shape-captured", "parameter-made-inside", "rnn-allowed"))


class Theme:
    """Registers the causes of one family.

    Args:
        title: of the family.
        kind: of its causes, unless one says otherwise.
    """

    def __init__(self, title: str, kind: Kind = "break") -> None:
        self.title = title
        self.kind: Kind = kind

    def cause(
        self, name: str, title: str, *, pattern: str, why: str, advice: str, kind: Kind | None = None, **more: Any
    ) -> Callable[[Callable[[], Repro]], Callable[[], Repro]]:
        """Make the decorated function the repro of a new cause; arguments as for :class:`Cause`."""

        def register(make: Callable[[], Repro]) -> Callable[[], Repro]:
            assert name not in CAUSES, name
            CAUSES[name] = Cause(name, title, self.title, kind or self.kind, pattern, why, advice, make, **more)
            return make

        return register

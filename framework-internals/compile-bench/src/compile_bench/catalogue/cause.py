"""The entries of the catalogue, read from ``causes.toml``, and how a break or a guard is matched with one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from compile_bench.catalogue.conditions.condition import Condition, condition_of
from compile_bench.catalogue.programs import Maker, makers
from compile_bench.catalogue.use import Use

Kind = Literal["break", "recompile", "silent"]


@dataclass(frozen=True)
class Advice:
    """What to do about a cause, and where that is known to be safe."""

    text: str  # ``{value}`` stands for what a guard checked
    when: Condition

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Advice:
        """The advice of an entry of the file."""
        return cls(entry["advice"], condition_of(entry["when"]))

    def named(self, value: str = "") -> str:
        """The text with the name of the value."""
        return self.text.replace("{value}", value or "self.value")


@dataclass(frozen=True)
class Advised:
    """Advice for one line, and the catalogue's entry that it is from."""

    case: str
    text: str


@dataclass(frozen=True)
class Cause:
    """A cause of graph breaks, recompilations or silent eager execution."""

    name: str  # name on the command line and in reports
    title: str  # what the code does, in a phrase
    theme: str  # title of the group that lists it
    kind: Kind  # its effect: a break, a recompilation, or silent eager execution
    pattern: str  # regular expression for PyTorch's reason, or for the guard that failed
    why: str  # one or two sentences about why it happens
    advices: tuple[Advice, ...]  # what to do instead, each with its condition. The first whose condition holds is given
    code: str = ""  # regular expression for source lines with this cause; empty for any line
    # Values for ``torch._dynamo.config`` that the fixed program needs.
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # options of ``torch.compile`` for the broken program
    equal: bool = True  # whether both programs give the same outputs. Programs that draw random numbers do not

    @property
    def make(self) -> Maker:
        """Makes both programs, new ones in each call; imports torch."""
        return makers()[self.name]


def _read() -> Iterator[Cause]:
    for theme in tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8")).values():
        group, kind = theme.pop("title"), theme.pop("kind", "break")
        for name, entry in theme.items():
            advices = tuple(map(Advice.of, (entry, *entry.pop("others", ()))))
            rest = {key: value for key, value in entry.items() if key not in ("advice", "when")}
            yield Cause(name, theme=group, kind=kind, advices=advices, **rest)


CAUSES = {cause.name: cause for cause in _read()}

# PyTorch's reason alone identifies these causes. Other causes share their reasons.
_KNOWN_BY_REASON = frozenset(("disabled-function", "dynamic-shape-captured", "parameter-made-inside", "rnn-allowed"))


def match(reason: str, source: str, columns: tuple[int, int] | None = None) -> list[Cause]:
    """The causes that a break with PyTorch's ``reason`` may have, the likeliest first.

    ``source`` is the line without its indentation. Entries that match the part that broke (``columns``) come first.
    """
    fitting = [cause for cause in CAUSES.values() if cause.kind == "break" and re.search(cause.pattern, reason)]
    spans = [(cause, part.span()) for cause in fitting if cause.code for part in re.finditer(cause.code, source)]
    begin, end = columns or (0, len(source))

    def rank(matched: tuple[Cause, tuple[int, int]]) -> tuple[bool, int]:
        first, last = matched[1]
        return not (first < end and last > begin), first - last  # the longest part of the line fits best

    by_reason = [cause for cause in fitting if cause.name in _KNOWN_BY_REASON]
    ranked = [cause for cause, _ in sorted(spans, key=rank)]
    return list({cause.name: cause for cause in (*ranked, *by_reason)}.values())


def match_recompile(guard: str, source: str = "") -> list[Cause]:
    """The causes that a recompilation may have, the likeliest first.

    ``source`` is the line that made the guard, or the lines that use its value; empty if they are not known.
    """
    fitting = [cause for cause in CAUSES.values() if cause.kind == "recompile" and re.search(cause.pattern, guard)]
    of_code = [cause for cause in fitting if cause.code and re.search(cause.code, source)]
    return [*of_code, *(cause for cause in fitting if not cause.code)]


def advise(causes: Sequence[Cause], use: Use | None, *, value: str = "") -> list[Advised]:
    """The advice whose condition holds, the advice of the likeliest cause first.

    Without a use, the likeliest cause's advice comes with its condition in words; ``value`` is what the guard checked.
    """
    if use is None:
        return [
            Advised(cause.name, f"{advice.named(value)} (Where {advice.when.text}.)")
            for cause in causes[:1]
            for advice in cause.advices[:1]
        ]
    return [
        Advised(cause.name, advice.named(use.own_value))
        for cause in causes
        for advice in cause.advices
        if advice.when.holds(use)
    ]

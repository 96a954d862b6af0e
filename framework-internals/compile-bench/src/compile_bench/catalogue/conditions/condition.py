"""What a condition is, and the conditions by name. Nothing here imports torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compile_bench.catalogue.use import Use


@dataclass(frozen=True)
class Condition:
    """When an advice may be followed."""

    text: str  # a clause that follows "where"
    holds: Callable[[Use], bool]

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.text}, and {other.text}", lambda use: self.holds(use) and other.holds(use))


# The conditions that causes.toml names, and the functions that make one from the names of calls and the like.
_KNOWN: dict[str, Condition | Callable[..., Condition]] = {}


def condition(text: str) -> Callable[[Callable[[Use], bool]], Condition]:
    """Make the decorated function a condition with its name."""

    def register(holds: Callable[[Use], bool]) -> Condition:
        known = _KNOWN[holds.__name__] = Condition(text, holds)
        return known

    return register


def on_calls(*names: str, text: str) -> Callable[[Callable[[Use, ast.Call], bool]], Condition]:
    """Make the decorated function a condition: there are calls with these names, and it accepts all of them."""

    def register(accepts: Callable[[Use, ast.Call], bool]) -> Condition:
        def holds(use: Use) -> bool:
            calls = use.calls(*names)
            return bool(calls) and all(accepts(use, call) for call in calls)

        known = _KNOWN[accepts.__name__] = Condition(text, holds)
        return known

    return register


def with_arguments(make: Callable[..., Condition]) -> Callable[..., Condition]:
    """Make the decorated function a condition that causes.toml names with arguments."""
    _KNOWN[make.__name__] = make
    return make


def condition_of(entry: str | Mapping[str, Any] | Sequence[Any]) -> Condition:
    """The condition that an entry of causes.toml names.

    ``"unused"`` is a condition, ``{ only = ["length"], of = ["unique"] }`` one with arguments; of several, all hold.
    """
    if isinstance(entry, str):
        known = _KNOWN[entry]
        return known if isinstance(known, Condition) else known()
    if isinstance(entry, Mapping):
        (name, arguments), *options = entry.items()
        known = _KNOWN[name]
        assert not isinstance(known, Condition), name
        return known(*arguments, **dict(options))
    first, *others = map(condition_of, entry)
    for other in others:
        first = first & other
    return first


@with_arguments
def all_of(*entries: str | Mapping[str, Any], text: str) -> Condition:
    """All of these conditions, as one clause."""
    return Condition(text, condition_of(entries).holds)

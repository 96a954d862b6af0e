"""Counts and lists in words, for every message and report of the package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchkit import numbers

# How many items a list names.
_NAMED = 5


def plural(count: int, noun: str) -> str:
    """``1 break``, ``2 breaks``."""
    return f"{numbers.count(count)} {noun}{'' if count == 1 else 's'}"


def some(items: Sequence[str]) -> str:
    """The first items and how many follow."""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join(items[:_NAMED]) + more


def distinct(items: Iterable[str]) -> str:
    """The items that are not empty, each once, joined by commas."""
    return ", ".join(dict.fromkeys(item for item in items if item))

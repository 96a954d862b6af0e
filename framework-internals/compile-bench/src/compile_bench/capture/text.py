"""Counts, lists, places and breaks in words, for every message and report of the package."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from benchkit import numbers
from compile_bench.capture.frames import Frame, has_packages
from compile_bench.capture.trace import RECOMPILE_LIMIT, Break, Recompile

# How many items a list names.
_NAMED = 5

# PyTorch's name and value of the limit, in its explanation.
_LIMIT = re.compile(r"exceeding the (\w+) cache size limit \(currently set to (\d+)\)")

_PYTHONS_OWN = re.compile(r"/lib/(python3\.\d+/.+)")
_PYTHON_FILE = re.compile(r"(?<![\w.\-])/[^\s'\":,()\[\]]+\.py\b")


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


def shorten(file: str, root: Path | None = None) -> str:
    """A file's name for a reader: relative to ``root``, within its package or Python's library, or its last part.

    Without a root it is the working directory.
    """
    root = root or Path.cwd()
    path = Path(file)
    around = path.parents if path.is_absolute() else ()
    if installed := next((folder for folder in around if folder == root or has_packages(folder)), None):
        return str(path.relative_to(installed))
    if library := _PYTHONS_OWN.search(file):
        return library[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def short_place(place: str, root: Path | None = None) -> str:
    """``file.py:LINE`` with the file's short name."""
    file, _, line = place.rpartition(":")
    return f"{shorten(file, root)}:{line}"


def neutral(value: Any, root: Path) -> Any:
    """Apply :func:`shorten` to every absolute path of a Python file in the texts of ``value``.

    Dataclasses keep their type; other sequences become lists.
    """
    if isinstance(value, str):
        return _PYTHON_FILE.sub(lambda path: shorten(path[0], root), value)
    if isinstance(value, dict):
        return {key: neutral(member, root) for key, member in value.items()}
    if is_dataclass(value):
        members = {field.name: neutral(getattr(value, field.name), root) for field in fields(value)}
        tuples = {name: tuple(member) if isinstance(member, list) else member for name, member in members.items()}
        return replace(cast(Any, value), **tuples)
    return [neutral(member, root) for member in value] if isinstance(value, (list, tuple)) else value


def neutral_files(entries: tuple[Any, ...], root: Path) -> tuple[Any, ...]:
    """Breaks or recompilations without paths of this machine."""
    return tuple(replace(neutral(entry, root), file=shorten(entry.file, root)) for entry in entries)


def break_lines(breaks: Sequence[Break], root: Path | None = None) -> list[str]:
    """One line for every cause of breaks, with the user's lines and the library's lines that they call."""
    causes: dict[str, dict[str, dict[str, None]]] = {}
    for met in breaks:
        reason = "; ".join(filter(None, (met.reason, no_longer_compiled(met))))
        called = causes.setdefault(reason, {}).setdefault(short_place(met.place, root), {})
        if met.library:
            called[short_place(met.library, root)] = None
    return [
        _with_places(
            [place + (f" (in {some(list(called))})" if called else "") for place, called in places.items()], reason
        )
        for reason, places in causes.items()
    ]


def no_longer_compiled(met: Break, name: Callable[[Frame], str] = attrgetter("function")) -> str:
    """The functions, named by ``name``, that reached the recompile limit, with the limit; empty for any other break."""
    if met.category != RECOMPILE_LIMIT:
        return ""
    functions = distinct(f"{name(frame)} ({Path(frame.file).name}:{frame.line})" for frame in met.compiled)
    setting = _LIMIT.search(met.explanation)
    limit = f": {setting[1]} = {setting[2]}" if setting else ""
    return f"no longer compiled: {functions}{limit}" if functions else ""


def recompile_lines(recompiles: Sequence[Recompile], root: Path | None = None) -> list[str]:
    """One line for everything that changed, with the lines where it did and how often a function was compiled again."""
    times = Counter(again.identity for again in recompiles)
    causes: dict[str, list[tuple[str, str]]] = {}
    for again in {again.identity: again for again in reversed(recompiles)}.values():
        often = f" ({times[again.identity]} times)" if times[again.identity] > 1 else ""
        causes.setdefault(again.what_changed, []).insert(0, (recompiled(again, root), often))
    return [
        _with_places([f"{place}{often}" for place, often in places], what)
        if len(places) > 1
        else f"{places[0][0]}: {what}{places[0][1]}"
        for what, places in reversed(causes.items())
    ]


def recompiled(again: Recompile, root: Path | None = None) -> str:
    """Where a guard failed; for a library's line, the user's line that called it comes first."""
    place = short_place(again.place, root)
    return f"{short_place(again.called_from, root)} (in {place})" if again.called_from else place


def _with_places(places: Sequence[str], what: str) -> str:
    return f"{places[0]}: {what}" if len(places) == 1 else f"{what}, {len(places)} lines: {some(places)}"

"""What two compilers made of one region, in sentences: every name and number is taken from the comparison."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchkit import numbers
from benchkit.markdown import block, code

_QUOTED_LINES = 16
_QUOTED_COLUMNS = 180


def explain(region: Mapping[str, Any], *, quotes: bool) -> str:
    """Tell the differences of a region, most bytes first.

    Args:
        region: :meth:`jax_baseline.diff.region_diff.Region.as_plain`.
        quotes: put both compilers' sources behind it.

    Returns:
        Markdown: a heading, the totals, a list of what differs, and the sources as code.
    """
    names = list(region["sides"])
    pairs = (names, names[::-1])
    points = [text for name, other in pairs for text in _written(region["only"][name], name, other)]
    points += [text for name in names for text in _copied(region["again"][name], name)]
    points += [text for name, other in pairs for text in _fused(region["fusions"][name], name, other)]
    points += [text for name in names for text in _hosted(region["hosts"][name], region["sides"][name], name)]
    points += [text for name in names for text in _libraries(region["sides"][name], name)]
    summary = " ".join([_totals(region, names), *_accounted(region, names)])
    text = f"#### `{region['name'] or 'not placed'}`, {region['phase']}\n\n{summary}\n\n"
    text += "\n".join(f"- {point}" for point in points)
    if quotes:
        text += "".join(_quote(name, quote) for name, quote in region["quotes"].items())
    return text


def _totals(region: Mapping[str, Any], names: list[str]) -> str:
    def one(name: str) -> str:
        side = region["sides"][name]
        time = "" if side["seconds"] is None else f" in {numbers.with_unit(side['seconds'], 's')}"
        plural = "" if side["kernels"] == 1 else "s"
        return f"{name} runs {side['kernels']} kernel{plural}, moving {numbers.with_unit(side['bytes'], 'B')}{time}"

    sizes = {name: region["sides"][name]["bytes"] for name in names}
    more, less = sorted(names, key=lambda name: -sizes[name])
    ratio = (
        f": {numbers.significant(sizes[more] / sizes[less])} times the bytes on {more}'s side" if sizes[less] else ""
    )
    return f"{one(names[0])}; {one(names[1])}{ratio}."


def _accounted(region: Mapping[str, Any], names: list[str]) -> list[str]:
    """How much of a difference in bytes the tensors are that only one side writes."""
    sizes = {name: region["sides"][name]["bytes"] for name in names}
    more, less = sorted(names, key=lambda name: -sizes[name])
    extra = {name: sum(one["bytes"] for key in ("only", "again") for one in region[key][name]) for name in (more, less)}
    if extra[more] <= extra[less]:
        return []
    return [
        f"Writing what the other does not, or a second time, is {numbers.with_unit(extra[more], 'B')} of {more}'s and "
        f"{numbers.with_unit(extra[less], 'B')} of {less}'s; each such tensor is then read again."
    ]


def _written(tensors: Sequence[Mapping[str, Any]], name: str, other: str) -> list[str]:
    """The tensors one leaves in memory and the other never does."""
    shown = _worth_showing(tensors)
    if not shown:
        return []
    return [
        f"Only {name} writes {_list([_tensor(one) for one in shown])} to memory; {other} never has these values there."
    ]


def _copied(tensors: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """What one writes a second time."""
    shown = _worth_showing(tensors)
    if not shown:
        return []
    total = numbers.with_unit(sum(one["bytes"] for one in tensors), "B")
    return [
        f"{name} writes {total} a second time, in another order or shape: {_list([_tensor(one) for one in shown])}."
    ]


def _worth_showing(tensors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The largest three, none of them tiny beside the first."""
    return [one for one in tensors[:3] if one["bytes"] >= max(tensors[0]["bytes"] / 50, 1024)]


def _tensor(one: Mapping[str, Any]) -> str:
    """``2 × float32[8,128] (8 KiB, by kernel for model.py:77)``."""
    place = f" for `{one['place']}`" if one["place"] else ""
    size = numbers.with_unit(one["bytes"], "B")
    return f"{one['count']} × `{one['tensor']}` ({size}, by `{_symbol(one['kernel'])}`{place})"


def _fused(fusions: Iterable[Mapping[str, Any]], name: str, other: str) -> list[str]:
    sentences = []
    for fusion in list(fusions)[:2]:
        parts = _list([f"`{part}`" for part in fusion["parts"]])
        again = "" if fusion["kernels"] == 1 else f" (and {fusion['kernels'] - 1} more like it)"
        sentences.append(
            f"{name} computes {parts} in one kernel, `{_symbol(fusion['kernel'])}`{again}; {other} never does."
        )
    return sentences


def _hosted(hosts: list[str], side: Mapping[str, Any], name: str) -> list[str]:
    """Where the work of a region without a kernel of its own went."""
    if side["kernels"] or not hosts:
        return []
    return [f"{name} has no kernel of its own for it: the work is inside `{_symbol(hosts[0])}`."]


def _libraries(side: Mapping[str, Any], name: str) -> list[str]:
    calls = [f"`{library}` {count} ×" for library, count in side["libraries"].items()]
    return [f"{name} calls {_list(calls)}."] if calls else []


def _quote(name: str, quote: Mapping[str, Any]) -> str:
    lines = [_shorten(line) for line in quote["source"].splitlines()]
    left_out = len(lines) - _QUOTED_LINES + quote.get("left_out", 0)
    if left_out > 0:
        lines = [*lines[:_QUOTED_LINES], f"… {left_out} more lines"]
    body = "\n".join(lines)
    return f"\n\n{name}, {code(_symbol(quote['kernel']))} ({quote['kind']}):\n\n{block(body, quote['language'])}"


def _shorten(line: str) -> str:
    return line if len(line) <= _QUOTED_COLUMNS else f"{line[: _QUOTED_COLUMNS - 1]}…"


def _symbol(kernel: str) -> str:
    """The name in the compiler's source: Inductor's steps carry the numbers of graph and launch around it."""
    return re.sub(r"^\d+:(.*):\d+$", r"\1", kernel)


def _list(parts: list[str]) -> str:
    """One, one and two, one, two and three."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

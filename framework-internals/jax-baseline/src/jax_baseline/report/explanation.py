"""Explains the differences between two compilers in one region. All names and numbers come from the comparison."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchkit import numbers
from benchkit.markdown import block, code
from jax_baseline.diff.region_diff import CompiledRegion, Fusion, Quote, Region, WrittenTensors

_QUOTED_LINES = 16
_QUOTED_COLUMNS = 180


def summary(region: Region) -> str:
    """Name a region, and say in one sentence how much the two compilers differ in it."""
    return f"`{region.name or 'not assigned'}`, {region.phase}: {_totals(region, list(region.compiled))}"


def explain(region: Region) -> str:
    """Describe the differences in a region, most bytes first.

    Returns Markdown: a heading, a list of differences, and the quoted sources.
    """
    names = list(region.compiled)
    pairs = (names, names[::-1])
    points = [text for name, other in pairs for text in _written(region.only[name], name, other)]
    points += [text for name in names for text in _copied(region.copies[name], name)]
    points += [text for name, other in pairs for text in _fused(region.fusions[name], name, other)]
    points += [
        f"{name} has no separate kernel for it: the work is inside `{_symbol(region.fused_into[name][0])}`."
        for name in names
        if region.fused_into[name] and not region.compiled[name].kernels
    ]
    points += [
        f"{name} calls {_list([f'`{library}` {count} ×' for library, count in libraries.items()])}."
        for name in names
        if (libraries := region.compiled[name].libraries)
    ]
    text = f"#### `{region.name or 'not assigned'}`, {region.phase}\n\n" + "\n".join(f"- {point}" for point in points)
    return text + "".join(_quote(name, quote) for name, quote in region.quotes.items())


def _totals(region: Region, names: Sequence[str]) -> str:
    def side(name: str, compiled: CompiledRegion) -> str:
        time = "" if compiled.seconds is None else f" in {numbers.with_unit(compiled.seconds, 's')}"
        plural = "" if compiled.kernels == 1 else "s"
        return f"{name} runs {compiled.kernels} kernel{plural}, moving {numbers.with_unit(compiled.bytes, 'B')}{time}"

    more, less = sorted(names, key=lambda name: -region.compiled[name].bytes)
    ratio = ""
    if region.compiled[less].bytes:
        times = numbers.significant(region.compiled[more].bytes / region.compiled[less].bytes)
        ratio = f": {more} moves {times} times the bytes"
    return "; ".join(side(name, region.compiled[name]) for name in names) + f"{ratio}."


def _written(tensors: Sequence[WrittenTensors], name: str, other: str) -> list[str]:
    shown = _worth_showing(tensors)
    if not shown:
        return []
    return [f"Only {name} writes {_list(list(map(_tensor, shown)))} to memory; {other} never writes these values."]


def _copied(tensors: Sequence[WrittenTensors], name: str) -> list[str]:
    shown = _worth_showing(tensors)
    if not shown:
        return []
    total = numbers.with_unit(sum(written.bytes for written in tensors), "B")
    return [f"{name} writes {total} a second time, in another order or shape: {_list(list(map(_tensor, shown)))}."]


def _worth_showing(tensors: Sequence[WrittenTensors]) -> list[WrittenTensors]:
    """Return the three largest, without tensors that are tiny compared to the first."""
    return [written for written in tensors[:3] if written.bytes >= max(tensors[0].bytes / 50, 1024)]


def _tensor(written: WrittenTensors) -> str:
    """Format tensors as ``2 × float32[8,128] (8 KiB, by kernel for model.py:77)``."""
    location = f" for `{written.location}`" if written.location else ""
    size = numbers.with_unit(written.bytes, "B")
    return f"{written.count} × `{written.tensor}` ({size}, by `{_symbol(written.kernel)}`{location})"


def _fused(fusions: Sequence[Fusion], name: str, other: str) -> list[str]:
    sentences = []
    for fusion in fusions[:2]:
        parts = _list([f"`{part}`" for part in fusion.parts])
        again = "" if fusion.kernels == 1 else f" (and {fusion.kernels - 1} more like it)"
        sentences.append(
            f"{name} computes {parts} in one kernel, `{_symbol(fusion.kernel)}`{again}; {other} never does."
        )
    return sentences


def _quote(name: str, quote: Quote) -> str:
    lines = [
        line if len(line) <= _QUOTED_COLUMNS else f"{line[: _QUOTED_COLUMNS - 1]}…"
        for line in quote.source.splitlines()
    ]
    left_out = len(lines) - _QUOTED_LINES + quote.left_out
    if left_out > 0:
        lines = [*lines[:_QUOTED_LINES], f"… {left_out} more lines"]
    body = block("\n".join(lines), quote.language)
    return f"\n\n{name}, {code(_symbol(quote.kernel))} ({quote.kind}):\n\n{body}"


def _symbol(kernel: str) -> str:
    """Return the name in the generated source, without the numbers of graph and launch in Inductor's names."""
    return re.sub(r"^\d+:(.*):\d+$", r"\1", kernel)


def _list(parts: Sequence[str]) -> str:
    """Join phrases: one; one and two; one, two and three."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

"""Walks and tables as text."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from benchkit import numbers
from dispatcher_trace.dispatcher import Table
from dispatcher_trace.native import native_function
from dispatcher_trace.records import Call, Hop, Kernel


def walk(calls: Sequence[Call], notes: Iterable[str] = ()) -> str:
    """A walk as Markdown: the tree of calls and hops, then why each hop happened.

    Args:
        calls: top-level calls.
        notes: sentences on what the walk does not show.
    """
    hops = sorted((hop for top in calls for call in top.walk() for hop in call.hops), key=lambda hop: hop.number)
    reasons = [f"{hop.number}. `{hop.operator}` at {hop.key}: {hop.why}" for hop in hops]
    return "\n".join(["```", tree(calls), "```", "", *reasons, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def tree(calls: Sequence[Call]) -> str:
    """The indented tree: a call's title, its hops numbered, and under a hop what its kernel called."""
    return "\n".join(line for call in calls for line in _call_lines(call, 0))


def _call_lines(call: Call, depth: int) -> list[str]:
    indent = "    " * depth
    node = f"   [in {call.hops[0].node}]" if call.hops[0].node else ""
    lines = [f"{indent}{call.title}{node}"]
    for hop in call.hops:
        lines.append(f"{indent}{hop.number:>3} {hop.key:<16} {kernel_text(hop)}")
        for inner in hop.calls:
            lines += _call_lines(inner, depth + 1)
    lines += [f"{indent}      {missed:<14} predicted, not seen" for missed in call.missed]
    lines += [f"{indent}      on the device: {device_kernel(kernel)}" for kernel in call.kernels]
    return lines


def kernel_text(hop: Hop) -> str:
    """What ran at a hop: kind, place of registration, native function."""
    native = f", at::native::{hop.native}" if hop.native else ""
    error = f"   raised {hop.error}" if hop.error else ""
    verdict = "" if hop.predicted == hop.key else f"   (predicted {hop.predicted or 'no hop'})"
    return f"{hop.kind}, {hop.where}{native}{verdict}{error}"


def device_kernel(kernel: Kernel) -> str:
    """Name, launch shape and time of a device kernel."""
    grid = f" grid {'×'.join(map(str, kernel.grid))}" if kernel.grid else ""
    block = f" block {'×'.join(map(str, kernel.block))}" if kernel.block else ""
    return f"{kernel.name}{grid}{block} {numbers.with_unit(kernel.seconds, 's')}"


def dispatch_table(operator: str, table: Table, only: Collection[str] | None = None) -> str:
    """An operator's dispatch table as aligned text, highest priority first.

    Args:
        operator: its name.
        table: of the operator.
        only: leave out other keys; None for all.
    """
    shown = [key for key in reversed(list(table)) if only is None or key in only]
    rows = []
    for key in shown:
        cell = table[key]
        kind = "fallthrough" if cell.fallthrough else cell.kind
        native = "" if cell.fallthrough else native_function(operator, key, cell.kind)
        rows.append((key, kind, cell.where, f"at::native::{native}" if native else ""))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    hidden = len(table) - len(shown)
    tail = f"\n{hidden} keys of other machines and modes are left out; --all shows them" if hidden else ""
    return "\n".join([operator, *(line.rstrip() for line in lines)]) + tail + "\n"


def near_names(wanted: str, known: Sequence[str]) -> str:
    """``; near names: a, b`` or nothing, for an error message.

    Names are compared without namespace too, so that ``add.tensor`` finds ``aten::add.Tensor``.
    """
    folded: dict[str, str] = {}
    for name in known:
        folded[name.lower()] = name
        folded.setdefault(name.partition("::")[2].lower(), name)
    close = difflib.get_close_matches(wanted.lower(), folded, n=5, cutoff=0.6)
    names = list(dict.fromkeys(folded[match] for match in close))
    return f"; near names: {', '.join(names)}" if names else ""

"""Traces and dispatch tables as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchkit import numbers
from benchkit.markdown import block, code, inert
from dispatcher_trace.capture.dispatcher import table_of
from dispatcher_trace.capture.key_sets import watched_keys
from dispatcher_trace.capture.types import EVIDENCE, Call, Hop
from dispatcher_trace.explain.findings import findings, grouped
from dispatcher_trace.explain.native_functions import native_function
from dispatcher_trace.render.outline import EVERYTHING, Line, Shown, outline

_FRAME = 11  # lines of a page beside the tree, the reasons, the findings and the notes


def markdown(
    calls: Sequence[Call], notes: Iterable[str] = (), shown: Shown = EVERYTHING, *, failed: bool = False
) -> str:
    """A trace as Markdown: the tree of calls and hops, then the reason for each hop, then findings and notes.

    Args:
        calls: Top-level calls.
        notes: Sentences on what the trace does not show.
        shown: The part that is printed. Where lines are few, findings get at most a quarter of them, the tree half of
            the others, and the reasons the rest.
        failed: Whether the traced code raised: the end is then printed, and the middle left out.
    """
    notes = [f"- {note}" for note in notes]
    bullets = [f"- {finding.text(code, count)}" for finding, count in grouped(findings(calls))]
    free = max(shown.max_lines - len(notes) - _FRAME, 8) if shown.max_lines else 0
    bullets = _limited(bullets, free // 4)
    lines = _kept(outline(calls, shown), (free - len(bullets)) // 2 if free else 0, ends=failed)
    hops = sorted((line.hop for line in lines if line.hop), key=lambda hop: hop.number)
    usual = _usual_thread(hops)
    reasons = [
        part
        for hop in hops
        for part in (f"{hop.number}. {code(hop.operator)} at {hop.key}: {hop.why}", key_line(hop, usual))
    ]
    parts = [block("\n".join(line.text for line in lines)), ""] if lines else []
    if usual is not None:
        parts += [f"Unless a line says otherwise, its thread adds {_set(usual[0])} and removes {_set(usual[1])}.", ""]
    left = free and free - len(bullets) - len(lines)
    parts += [*_limited(reasons, left, ends=failed), ""] if reasons else []
    parts += ["Findings:", "", *bullets, ""] if bullets else []
    parts += notes
    parts.append(f"- Evidence: {'; '.join(f'{fact}: {source}' for fact, source in EVIDENCE.items())}.")
    return inert("\n".join(parts).rstrip() + "\n")


def tree(calls: Sequence[Call], shown: Shown = EVERYTHING, *, failed: bool = False) -> str:
    """The indented tree: the title of a call, its numbered hops, and under each hop the calls of its kernel."""
    return "\n".join(line.text for line in _kept(outline(calls, shown), shown.max_lines, ends=failed))


def found_text(calls: Sequence[Call], shown: Shown = EVERYTHING) -> str:
    """The findings, one line for those that repeat."""
    lines = [finding.text(str, count) for finding, count in grouped(findings(calls))]
    return "\n".join(_limited(lines, shown.max_lines)) or "no findings"


def _limited(lines: Sequence[str], limit: int, *, ends: bool = False) -> list[str]:
    """The lines of :func:`_kept`, as text."""
    return [line.text for line in _kept([Line(text) for text in lines], limit, ends=ends)]


def _kept(lines: Sequence[Line], limit: int, *, ends: bool) -> list[Line]:
    """The lines that fit, and one that says how many are left out; all for a limit of 0.

    Args:
        lines: All lines.
        limit: How many fit.
        ends: Whether the end matters: a third of the lines are then the first ones, and the others the last.
    """
    if not limit or len(lines) <= limit:
        return list(lines)
    first = limit // 3 if ends else limit - 1
    left = numbers.count(len(lines) - limit + 1)
    cut = Line(f"… {left} lines more (--max-lines 0 prints them, --depth and --only choose)")
    return [*lines[:first], cut, *lines[len(lines) - (limit - 1 - first) :]]


_ThreadSets = tuple[tuple[str, ...], tuple[str, ...]]


def _usual_thread(hops: Sequence[Hop]) -> _ThreadSets | None:
    """The include and exclude sets of the thread at most calls; None without calls."""
    most_common = Counter((hop.included, hop.excluded) for hop in hops if hop.how == "call").most_common(1)
    return most_common[0][0] if most_common else None


def key_line(hop: Hop, usual: _ThreadSets | None = None) -> str:
    """The key set as an equation with the keys of the arguments, then the verdict on the prediction; indented.

    Arguments with the same keys share a set. If their keys differ, those that all arguments have stand first, once.

    Args:
        hop: The hop.
        usual: Include and exclude set of the thread that the text names elsewhere; the line leaves them out.
    """
    effects = f"; {'; '.join(hop.effects)}" if hop.effects else ""
    if hop.how == "redispatch":
        return f"   keys {_set(hop.keys)} from the redispatch; {hop.verdict}{effects}"
    names_of: dict[tuple[str, ...], list[str]] = {}
    for argument in hop.arguments:
        for tensor in argument.tensors:
            names = names_of.setdefault(tensor.keys, [])
            if argument.name not in names:
                names.append(argument.name)
    shared = [key for key in next(iter(names_of), ()) if all(key in keys for keys in names_of)]
    terms = [f"all arguments {_set(shared)}"] if shared and len(names_of) > 1 else []
    for keys, names in names_of.items():
        rest = [key for key in keys if key not in shared or len(names_of) == 1]
        if rest:
            terms.append(f"{', '.join(names)} {_set(rest)}")
    arguments = " ∪ ".join(terms) or "no tensors"
    present = dict.fromkeys([*(key for keys in names_of for key in keys), *hop.included])
    fell = [key for key in present if key not in (*hop.keys, *hop.removed, *hop.excluded)]
    without = f" − fallthrough {_set(fell)}" if fell else ""
    own = (hop.included, hop.excluded) != usual
    thread = f" ∪ thread {_set(hop.included)} − thread {_set(hop.excluded)}" if own else ""
    return f"   keys {_set(hop.keys)} = {arguments}{thread}{without}; {hop.verdict}{effects}"


# Autocast keys of the devices that this package knows. A thread excludes all others together.
_AUTOCAST_SHOWN = frozenset({"AutocastCPU", "AutocastCUDA"})


def _set(keys: Sequence[str]) -> str:
    """The keys in braces, with one entry for the autocast keys of all other devices."""
    others = [key for key in keys if key.startswith("Autocast") and key not in _AUTOCAST_SHOWN]
    shown = [key for key in keys if key not in others]
    return f"{{{', '.join([*shown, 'Autocast of other devices'] if others else shown)}}}"


def dispatch_table(operator: str, *, every: bool = False) -> str:
    """An operator's dispatch table as aligned text, highest priority first.

    Args:
        operator: Name of the operator.
        every: Whether to show all keys; by default those that a trace can watch on this machine.

    Raises:
        ValueError: If there is no such operator; the message has near names.
    """
    table = table_of(operator)
    watched = watched_keys("all")
    shown = [key for key in reversed(list(table)) if every or key in watched]
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

"""Traces and dispatch tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchkit import numbers
from benchkit.markdown import block, code, inert
from dispatcher_trace.capture.dispatcher import table_of
from dispatcher_trace.capture.scope import watched_keys
from dispatcher_trace.capture.types import EVIDENCE, Call, Hop, Kernel, NativeFrame, NativeStep
from dispatcher_trace.explain.findings import findings
from dispatcher_trace.explain.native_functions import native_function


def markdown(calls: Sequence[Call], notes: Iterable[str] = ()) -> str:
    """A trace as Markdown: the tree of calls and hops, then the reason for each hop, then findings and notes.

    Args:
        calls: Top-level calls.
        notes: Sentences on what the trace does not show.
    """
    hops = sorted((hop for top in calls for call in top.walk() for hop in call.hops), key=lambda hop: hop.number)
    reasons = [
        line for hop in hops for line in (f"{hop.number}. {code(hop.operator)} at {hop.key}: {hop.why}", key_line(hop))
    ]
    found = findings(calls)
    parts = [block(tree(calls)), "", *reasons, ""]
    parts += ["Findings:", "", *(f"- {finding.text(code)}" for finding in found), ""] if found else []
    parts += [f"- {note}" for note in notes]
    parts.append(f"- Evidence: {'; '.join(f'{fact}: {source}' for fact, source in EVIDENCE.items())}.")
    return inert("\n".join(parts).rstrip() + "\n")


def key_line(hop: Hop) -> str:
    """The key set as an equation with the keys of each argument, then the verdict on the prediction; indented."""
    effects = f"; {'; '.join(hop.effects)}" if hop.effects else ""
    if hop.how == "redispatch":
        return f"   keys {_set(hop.keys)} from the redispatch; {hop.verdict}{effects}"
    keys_of = dict.fromkeys((argument.name, tensor.keys) for argument in hop.arguments for tensor in argument.tensors)
    arguments = " ∪ ".join(f"{name} {_set(keys)}" for name, keys in keys_of) or "no tensors"
    present = dict.fromkeys([*(key for _, keys in keys_of for key in keys), *hop.included])
    fell = [key for key in present if key not in (*hop.keys, *hop.removed, *hop.excluded)]
    without = f" − fallthrough {_set(fell)}" if fell else ""
    thread = f"thread {_set(hop.included)} − thread {_set(hop.excluded)}"
    return f"   keys {_set(hop.keys)} = {arguments} ∪ {thread}{without}; {hop.verdict}{effects}"


# Autocast keys of the devices that this package knows. A thread excludes all others together.
_AUTOCAST_SHOWN = frozenset({"AutocastCPU", "AutocastCUDA"})


def _set(keys: Sequence[str]) -> str:
    """The keys in braces, with one entry for the autocast keys of all other devices."""
    others = [key for key in keys if key.startswith("Autocast") and key not in _AUTOCAST_SHOWN]
    shown = [key for key in keys if key not in others]
    return f"{{{', '.join([*shown, 'Autocast of other devices'] if others else shown)}}}"


def tree(calls: Sequence[Call]) -> str:
    """The indented tree: the title of a call, its numbered hops, and under each hop the calls of its kernel."""
    return "\n".join(line for call in calls for line in _call_lines(call, 0))


def _call_lines(call: Call, depth: int) -> list[str]:
    indent = "    " * depth
    made = f", made by hop {call.forward}" if call.forward else ""
    node = f"   [in {call.hops[0].node}{made}]" if call.hops[0].node else ""
    lines = [f"{indent}{call.title}{node}"]
    for hop in call.hops:
        lines.append(f"{indent}{hop.number:>3} {hop.key:<16} {kernel_text(hop)}")
        if hop.native_step is not None:
            lines += [f"{indent}      {line}" for line in native_lines(hop.native_step)]
        for inner in hop.calls:
            lines += _call_lines(inner, depth + 1)
    lines += [f"{indent}      {missed:<14} predicted, not seen" for missed in call.missed]
    lines += [f"{indent}      on the device: {device_kernel(kernel)}" for kernel in call.kernels]
    return lines


def kernel_text(hop: Hop) -> str:
    """The kernel of a hop: its kind, the place of its registration, its native function."""
    native = f", at::native::{hop.native}" if hop.native else ""
    error = f"   raised {hop.error}" if hop.error else ""
    verdict = "" if hop.predicted == hop.key else f"   ({hop.verdict})"
    return f"{hop.kind}, {hop.where}{native}{verdict}{error}"


def device_kernel(kernel: Kernel) -> str:
    """A device kernel: name, library, grid, block, registers, shared memory and time."""
    grid = f" grid {'×'.join(map(str, kernel.grid))}" if kernel.grid else ""
    block = f" block {'×'.join(map(str, kernel.block))}" if kernel.block else ""
    registers = f" registers {kernel.registers}" if kernel.registers is not None else ""
    shared = f" shared memory {kernel.shared_memory} B" if kernel.shared_memory is not None else ""
    library = f" ({kernel.library})" if kernel.library else ""
    return f"{kernel.name}{library}{grid}{block}{registers}{shared} {numbers.with_unit(kernel.seconds, 's')}"


def native_lines(step: NativeStep) -> list[str]:
    """What ran below a kernel: one line for the number of instructions, one for each notable function."""
    bound = "at least " if step.cut else ""
    head = f"native step: {bound}{numbers.count(step.instructions)} instructions"
    return [head, *(f"  {frame_text(frame)}" for frame in step.frames)]


def frame_text(frame: NativeFrame) -> str:
    """``at::native::… [BinaryOpsKernel.cpp.AVX512.cpp]``."""
    return f"{frame.function} [{frame.file or frame.library}]"


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

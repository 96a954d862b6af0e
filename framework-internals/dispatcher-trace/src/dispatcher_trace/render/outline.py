"""The tree of a trace as lines: every call, or a part of it that fits on a few screens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchkit import numbers
from dispatcher_trace.capture.types import Call, Hop, Kernel, NativeFrame, NativeStep

_LONGEST_PATTERN = 512  # calls; one block of a model with its optimizer is shorter
_LONGEST_ERROR = 240  # characters
_FEWEST_SAVED = 3  # lines; to fold less would not shorten the tree


@dataclass(frozen=True)
class Shown:
    """The part of a trace that is printed. The default is all of it.

    Attributes:
        fold: Whether calls that repeat, alike but for their tensors, are printed once with a count.
        depth: Levels of calls inside calls; None for all.
        only: Print only the calls of these operators, wherever they are, with what is inside them: ``aten::mm``, or a
            pattern such as ``aten::_foreach_*``. Empty for all.
        max_lines: Largest number of lines; 0 for no limit.
    """

    fold: bool = False
    depth: int | None = None
    only: str = ""
    max_lines: int = 0


EVERYTHING = Shown()


@dataclass(frozen=True)
class Line:
    """A line of the tree, and the hop that it shows, if it shows one."""

    text: str
    hop: Hop | None = None


def outline(calls: Sequence[Call], shown: Shown) -> list[Line]:
    """The lines of the tree, without a limit to their number."""
    if shown.only:
        calls = matching(calls, shown.only)
    return list(_Outline(shown).lines(calls, 0))


def matching(calls: Sequence[Call], pattern: str) -> list[Call]:
    """The outermost calls of an operator or of a pattern of operators.

    Args:
        calls: Where to look, inside the calls too.
        pattern: ``aten::mm``, which is every overload, ``aten::add.Tensor`` or ``aten::_foreach_*``.
    """
    outermost: list[Call] = []
    for call in calls:
        if fnmatchcase(call.operator, pattern) or call.operator.partition(".")[0] == pattern:
            outermost.append(call)
        else:
            outermost += matching([inner for hop in call.hops for inner in hop.calls], pattern)
    return outermost


@dataclass(frozen=True)
class _Run:
    """A pattern of calls that stands ``count`` times in a row."""

    calls: Sequence[Call]
    length: int
    count: int


class _Outline:
    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[int, tuple[int, int]] = {}

    def lines(self, calls: Sequence[Call], depth: int) -> Iterator[Line]:
        for run in self._runs(calls) if self.shown.fold else [_Run(calls, len(calls), 1)]:
            for call in run.calls[: run.length]:
                yield from self._call(call, depth)
            if run.count > 1:
                rest = run.calls[run.length :]
                numbers_of = [hop.number for top in rest for call in top.walk() for hop in call.hops]
                what = "the call above" if run.length == 1 else f"the {run.length} calls above"
                again = "once more" if run.count == 2 else f"{run.count - 1} times more"
                yield Line(f"{'    ' * depth}… {what} {again}, hops {min(numbers_of)} to {max(numbers_of)}")

    def _call(self, call: Call, depth: int) -> Iterator[Line]:
        indent = "    " * depth
        yield Line(f"{indent}{call.title}{_where(call)}")
        if call.alike:
            yield Line(f"{indent}      and {numbers.count(call.alike)} calls alike later, counted only")
        for hop, below in zip(call.hops, [*call.hops[1:], None], strict=True):
            yield Line(f"{indent}{hop.number:>3} {hop.key:<16} {kernel_text(hop, below)}", hop)
            if hop.native_step is not None:
                yield from (Line(f"{indent}      {line}") for line in native_lines(hop.native_step))
            if hop.calls and self.shown.depth is not None and depth + 1 >= self.shown.depth:
                inside = sum(1 for inner in hop.calls for _ in inner.walk())
                yield Line(f"{indent}    … {numbers.count(inside)} call{'s' if inside > 1 else ''} inside")
            else:
                yield from self.lines(hop.calls, depth + 1)
        yield from (Line(f"{indent}      {missed:<14} predicted, not seen") for missed in call.missed)
        yield from (Line(f"{indent}      on the device: {device_kernel(kernel)}") for kernel in call.kernels)

    def _runs(self, calls: Sequence[Call]) -> Iterator[_Run]:
        """The calls as runs of repeated patterns; at each call the pattern that saves the most lines."""
        kinds, sizes = zip(*(self._kind(call) for call in calls), strict=True) if calls else ((), ())
        start = 0
        while start < len(calls):
            length, count, saved = 1, 1, 0
            for period in range(1, min(_LONGEST_PATTERN, (len(calls) - start) // 2) + 1):
                if kinds[start] != kinds[start + period]:
                    continue
                pattern, times = kinds[start : start + period], 1
                while kinds[start + times * period : start + (times + 1) * period] == pattern:
                    times += 1
                lines = (times - 1) * sum(sizes[start : start + period])
                if lines > saved:
                    length, count, saved = period, times, lines
            if saved < _FEWEST_SAVED:
                length, count = 1, 1
            yield _Run(calls[start : start + length * count], length, count)
            start += length * count

    def _kind(self, call: Call) -> tuple[int, int]:
        """The kind of a call, and its number of lines.

        Calls of one kind have lines that differ in the labels of tensors and the numbers of hops only.
        """
        if id(call) in self._kind_of:
            return self._kind_of[id(call)]
        inner = [[self._kind(nested) for nested in hop.calls] for hop in call.hops]
        described = (
            _LABEL.sub("$", call.title),
            call.missed,
            tuple((hop.key, kernel_text(hop), hop.thread, hop.task, _NUMBER.sub("", hop.node)) for hop in call.hops),
            tuple(kernel.name for kernel in call.kernels),
            tuple(tuple(kind for kind, _ in kinds) for kinds in inner),
            call.alike,
        )
        size = 1 + (call.alike > 0) + len(call.hops) + len(call.missed) + len(call.kernels)
        size += sum(lines for kinds in inner for _, lines in kinds)
        kind_and_size = self._kinds.setdefault(described, len(self._kinds)), size
        self._kind_of[id(call)] = kind_and_size
        return kind_and_size


_LABEL = re.compile(r"\$\d+")
_NUMBER = re.compile(r"#\d+")


def _where(call: Call) -> str:
    """Where a call ran, if not in the main thread's own code: thread, task, autograd node."""
    first = call.hops[0]
    made = f", made by hop {call.forward}" if call.forward else ""
    node = f"in {first.node}{made}" if first.node else ""
    places = [place for place in (first.thread if first.thread != "main" else "", first.task, node) if place]
    return f"   [{', '.join(places)}]" if places else ""


def kernel_text(hop: Hop, below: Hop | None = None) -> str:
    """The kernel of a hop: its kind, the place of its registration, its native function.

    Args:
        hop: The hop.
        below: The hop that it redispatched to. An exception is printed where it was raised, not all the way up.
    """
    native = f", at::native::{hop.native}" if hop.native else ""
    verdict = "" if hop.predicted == hop.key else f"   ({hop.verdict})"
    return f"{hop.kind}, {hop.where}{native}{verdict}{_raised(hop, below)}"


def _raised(hop: Hop, below: Hop | None) -> str:
    if not hop.error:
        return ""
    inside = [*(call.hops[0] for call in hop.calls), *([below] if below else [])]
    if any(other.error == hop.error for other in inside):
        return "   raised the same"
    return f"   raised {hop.error}"  # in full, once: the hops around it raised the same


def shortened(error: str) -> str:
    """An exception in one line that fits: its first sentences, since torch's longest goes on to list every backend."""
    if len(error) <= _LONGEST_ERROR:
        return error
    sentences = error[:_LONGEST_ERROR].rpartition(". ")[0]
    return sentences or f"{error[: _LONGEST_ERROR - 1]}…"


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

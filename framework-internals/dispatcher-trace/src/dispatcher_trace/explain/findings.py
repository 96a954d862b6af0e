"""Findings of a trace: hidden copies, synchronisations, and calls whose keys were not predicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchkit import numbers
from dispatcher_trace.capture.types import Call, TensorFact
from dispatcher_trace.explain.predict import cause_of

Kind = Literal["copy", "synchronisation", "prediction"]

# Operators that move the data of one tensor into another's memory.
_COPYING = frozenset({"aten::clone", "aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"})
# Those of them that do nothing but copy: a line that calls one asks for the copy.
_ASKED_FOR = frozenset({"aten::clone", "aten::copy_", "aten::_foreach_copy_"})
# Operators whose result, or its size, is a value that the host needs.
_READING = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::bincount"),
        *("aten::_unique", "aten::_unique2", "aten::unique_dim"),
        *("aten::unique_consecutive", "aten::unique_dim_consecutive"),
    }
)


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: ``copy``: data was copied, and the line that caused it asks for something else. ``synchronisation``: the
            host reads a value of a tensor, or copies data from or to a device, and waits for the device if there is
            one. ``prediction``: a call visited other keys than its table predicts, for no known cause.
        number: Number of the hop where it begins.
        operator: Operator that did it.
        detail: The data, in one clause.
        cause: Operator that the user's line called.
        source: The user's line; empty if the stack has none (autograd's threads).
        node: Autograd node that was running, or empty.
        forward_source: In a backward, the line of the forward that made the node.
    """

    kind: Kind
    number: int
    operator: str
    detail: str
    cause: str
    source: str
    node: str = ""
    forward_source: str = ""

    def __str__(self) -> str:
        return self.text(str)

    def text(self, shown: Callable[[str], str], count: int = 1) -> str:
        """The finding in one line.

        Args:
            shown: Formats the source line for the page; the line may have ``<lambda>`` in it.
            count: Number of times that it was found, this being the first.
        """
        times, first = (f", {numbers.count(count)} times", "first at ") if count > 1 else ("", "")
        through = "" if self.cause == self.operator else f" under {self.cause}"
        node = f", in {self.node}" if self.node else ""
        line = self.forward_source or self.source
        where = f"; {'forward at ' if self.forward_source else ''}{shown(line)}" if line else ""
        return f"{self.kind}{times}: {self.operator}{through} ({first}hop {self.number}{node}): {self.detail}{where}"


def grouped(found: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """The first of the findings that differ only in hops, numbers of nodes and labels of tensors, with their number."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in found:
        kind = replace(finding, number=0, detail=_LABEL.sub("", finding.detail), node=_NUMBER.sub("", finding.node))
        groups.setdefault(kind, []).append(finding)
    return [(group[0], len(group)) for group in groups.values()]


_LABEL = re.compile(r"\$\d+")
_NUMBER = re.compile(r"#\d+")


def findings(calls: Sequence[Call]) -> list[Finding]:
    """All findings of a trace, in order.

    A copy is reported once, where it begins: ``aten::to.dtype`` calls ``_to_copy``, which calls ``copy_``. Copies of a
    single element on one device are left out, because casting a number makes one. Copies inside a kernel, below the
    dispatcher, are not seen. A copy from a GPU to the host is also a synchronisation, unless it is non-blocking and its
    target is pinned memory. A copy from the host to a GPU is one unless it is non-blocking.
    """
    return sorted((finding for top in calls for finding in _in_call(top, top)), key=lambda finding: finding.number)


def _in_call(call: Call, top: Call) -> Iterator[Finding]:
    if not call.agrees and not cause_of(call):
        detail = f"visited {' → '.join(call.path)}; the table predicts {' → '.join(call.predicted)}"
        yield _finding("prediction", call, top, detail)
    base = call.operator.partition(".")[0]
    if base in _COPYING:
        detail = "" if call is top and base in _ASKED_FOR else _copy_detail(call)
        if detail:
            yield _finding("copy", call, top, detail)
    waiting = _waiting_detail(call)
    if waiting:
        yield _finding("synchronisation", call, top, waiting)
    # The calls inside a copying or reading operator are part of it.
    covered = {"copy"} if base in _COPYING | _READING else set()
    covered |= {"synchronisation"} if waiting else set()
    for hop in call.hops:
        for inner in hop.calls:
            yield from (finding for finding in _in_call(inner, top) if finding.kind not in covered)


def _finding(kind: Kind, call: Call, top: Call, detail: str) -> Finding:
    first = call.hops[0]
    return Finding(
        kind, first.number, call.operator, detail, top.operator, call.source, first.node, call.forward_source
    )


def _copy_detail(call: Call) -> str:
    """What was copied from where to where; empty if the call shares memory or copies one number."""
    first = call.hops[0]
    given = first.tensors
    if call.operator.startswith("aten::copy_"):
        target, source = (given[0], given[1]) if len(given) > 1 else (None, None)
    else:
        results = [fact for result in first.results for fact in result.tensors]
        target, source = (results[0], given[0]) if results and given else (None, None)
    if target is None or source is None or (target.storage and target.storage == source.storage):
        return ""
    if source.elements == 1 and source.device == target.device:
        return ""
    return f"{source} → {target}, {_difference(source, target)}"


def _difference(source: TensorFact, target: TensorFact) -> str:
    reasons = []
    if source.device != target.device:
        reasons.append(f"moved to {target.device}")
    if source.dtype != target.dtype:
        reasons.append(f"cast to {target.dtype}")
    if source.strides != target.strides:
        reasons.append(f"strides {_sizes(source.strides)} laid out as {_sizes(target.strides)}")
    return ", ".join(reasons) or "the same dtype and layout"


def _waiting_detail(call: Call) -> str:
    """Why the host waits for a device in this call, or empty. Calls inside it are not considered."""
    base = call.operator.partition(".")[0]
    if base in _READING:
        return _reading_detail(call)
    return _transfer_detail(call) if base == "aten::copy_" else ""


def _transfer_detail(call: Call) -> str:
    """Why the host waits for a copy between a GPU and the host; empty if it does not wait."""
    # The last hop has the fact whether the target is pinned.
    arguments = {argument.name: argument for argument in call.hops[-1].arguments}
    targets, sources = (arguments[name].tensors if name in arguments else () for name in ("self", "src"))
    non_blocking = "non_blocking" in arguments and arguments["non_blocking"].text == "non_blocking=True"
    for target, source in zip(targets, sources, strict=False):
        if source.device.startswith("cuda") and target.device == "cpu" and not target.pinned:
            return f"copies {source} to the host, which waits for the GPU"
        # Torch synchronises the stream after every such copy that is not non-blocking, pinned or not.
        if source.device == "cpu" and target.device.startswith("cuda") and not non_blocking:
            return f"copies {source} to the GPU and waits for it; non_blocking=True from pinned memory would not wait"
    return ""


def _reading_detail(call: Call) -> str:
    tensor = next(iter(call.hops[0].tensors), None)
    if tensor is None:
        return "reads a value on the host"
    if tensor.device.startswith("cuda"):
        return f"reads {tensor} on the host, which waits for the GPU"
    return f"reads {tensor} on the host; on a GPU this would wait for it"


def _sizes(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))})"

"""Findings of a trace: hidden copies, synchronisations, fallbacks, and calls whose keys were not predicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchkit import numbers
from dispatcher_trace.capture.types import Call, Hop, TensorFact
from dispatcher_trace.explain.predict import cause_of

Kind = Literal["copy", "synchronisation", "vmap fallback", "no gradient", "CPU fallback", "no redispatch", "prediction"]

# Operators that move the data of one tensor into another's memory.
_COPYING = frozenset({"aten::clone", "aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"})
# What a line calls that asks for a copy: functions and methods by the names that users call them by.
_ASKING = frozenset(
    {
        *("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte"),
        *("bool", "cfloat", "cdouble", "chalf", "cpu", "cuda", "xpu", "mtia", "ipu", "to_empty"),
        *("set_default_device", "contiguous", "clone", "copy", "deepcopy", "copy_", "_foreach_copy_", "repeat"),
        *("tile", "load_state_dict", "tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor", "from_numpy"),
        *("pin_memory", "tolist", "numpy", "to_dense", "to_sparse", "to_sparse_coo", "to_sparse_csr", "to_mkldnn"),
        *("coalesce", "resolve_conj", "resolve_neg", "quantize_per_tensor", "quantize_per_channel", "dequantize"),
        *("setitem", "__setitem__"),
        "STORE_SUBSCR",  # x[i] = y
        "STORE_SLICE",  # x[:i] = y, from Python 3.12
    }
)
# Operators that do nothing but what such a function does. The line asks for it where it calls one itself, whatever the
# name that it has there.
_CONVERTING = frozenset(
    f"aten::{name}" for name in ("to", "contiguous", "clone", "copy_", "_to_copy", "_foreach_copy_", "type_as", "copy")
)
# Backward nodes of these: what the line asked for, in the other direction.
_CONVERTING_NODES = ("ToCopyBackward", "CloneBackward", "CopyBackward", "CopySlices")
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
            one. ``vmap fallback``: the operator has no batching rule, so its kernel ran once for each sample.
            ``no gradient``: the operator has no derivative, and a backward through it gives none. ``CPU fallback``:
            the operator has no kernel for the device, and ran on the CPU. ``no redispatch``: an autograd kernel ended
            the call, and the backend's kernel was not reached. ``prediction``: a call visited other keys than its
            table predicts, for no known cause.
        number: Number of the hop where it begins.
        operator: Operator that did it.
        detail: The data, in one clause.
        cause: Operator that the user's line called.
        source: The user's line; empty if the stack has none (autograd's threads).
        node: Autograd node that was running, or empty.
        forward_source: In a backward, the line of the forward that made the node.
        times: Number of times that it was found: more than once in calls that were counted instead of kept.
    """

    kind: Kind
    number: int
    operator: str
    detail: str
    cause: str
    source: str
    node: str = ""
    forward_source: str = ""
    times: int = 1

    def __str__(self) -> str:
        return self.text(str, self.times)

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
        kind = replace(
            finding, number=0, detail=_LABEL.sub("", finding.detail), node=_NUMBER.sub("", finding.node), times=1
        )
        groups.setdefault(kind, []).append(finding)
    return [(group[0], sum(finding.times for finding in group)) for group in groups.values()]


_LABEL = re.compile(r"\$\d+")
_NUMBER = re.compile(r"#\d+")


def findings(calls: Sequence[Call]) -> list[Finding]:
    """All findings of a trace, in order.

    A copy is reported once, where it begins: ``aten::to.dtype`` calls ``_to_copy``, which calls ``copy_``. Copies of a
    single element on one device are left out, because casting a number makes one. Copies inside a kernel, below the
    dispatcher, are not seen. A copy from a GPU to the host is also a synchronisation, unless it is non-blocking and its
    target is pinned memory. A copy from the host to a GPU is one unless it is non-blocking.
    """
    asking = {hop.number: _asks(top) for top in calls for call in top.walk() for hop in call.hops}
    every = (finding for top in calls for finding in _in_call(top, top, _asked_for(top, asking)))
    return sorted(every, key=lambda finding: finding.number)


def _asks(top: Call) -> bool:
    """Whether the line that made a call asks for a copy, by what it calls.

    The name counts first: functions of torch that are written in Python call other operators for the line. Under
    another name (``cast = x.to``), a call asks for what it does itself.
    """
    if top.called in _ASKING:
        return True
    python_operation = top.called.isupper() and "_" in top.called  # BINARY_OP, which promotes
    return top.direct and not python_operation and top.operator.partition(".")[0] in _CONVERTING


def _asked_for(top: Call, asking: Mapping[int, bool]) -> bool:
    """Whether the copies inside a call were asked for; in a backward, whether the forward's were."""
    first = top.hops[0]
    if not first.node:
        return asking[first.number]
    return first.node.startswith(_CONVERTING_NODES) and asking.get(top.forward, False)


def _in_call(call: Call, top: Call, asked: bool, times: int = 1) -> Iterator[Finding]:
    times *= 1 + call.alike
    for kind, detail in _about_hops(call):
        yield _finding(kind, call, top, detail, times)
    base = call.operator.partition(".")[0]
    if base in _COPYING and not asked and (detail := _copy_detail(call)):
        yield _finding("copy", call, top, detail, times)
    waiting = _waiting_detail(call)
    if waiting:
        yield _finding("synchronisation", call, top, waiting, times)
    # The calls inside a copying or reading operator are part of it.
    covered = {"copy"} if base in _COPYING | _READING else set()
    covered |= {"synchronisation"} if waiting else set()
    for hop in call.hops:
        for inner in hop.calls:
            inside = _in_call(inner, top, asked, times)
            yield from (finding for finding in inside if finding.kind not in covered)


def _about_hops(call: Call) -> Iterator[tuple[Kind, str]]:
    """What the path of a call shows."""
    last = call.hops[-1]
    if last.key == "FuncTorchBatched" and last.kind == "backend fallback":
        slices = sum(1 + inner.alike for inner in last.calls if inner.operator == call.operator)
        yield (
            "vmap fallback",
            f"no batching rule, so its kernel ran {numbers.count(slices)} times, once for each sample",
        )
    for hop in call.hops:
        if hop.made_node.startswith("WarnNotImplemented"):
            yield "no gradient", "no derivative is registered: a backward through it gives no gradient, and warns"
    if _ran_on_cpu(last):
        yield "CPU fallback", f"no kernel at {last.key}: its arguments are copied to the CPU, and the result back"
    if call.agrees or cause_of(call):
        return
    if call.missed and last.key.startswith("Autograd") and last.predicted == last.key:
        where = f"the kernel at {last.key} ({last.where})"
        yield "no redispatch", f"{where} ended the call, and the one at {call.missed[-1]} was not reached"
    else:
        yield "prediction", f"visited {' → '.join(call.path)}; the table predicts {' → '.join(call.predicted)}"


def _ran_on_cpu(hop: Hop) -> bool:
    """Whether the kernel of a device is the fallback that copies to the CPU and calls the operator there."""
    if hop.kind != "backend fallback" or all(tensor.device == "cpu" for tensor in hop.tensors):
        return False
    again = [call.hops[0].tensors for call in hop.calls if call.operator == hop.operator]
    return any(tensors and all(tensor.device == "cpu" for tensor in tensors) for tensors in again)


def _finding(kind: Kind, call: Call, top: Call, detail: str, times: int) -> Finding:
    first, source = call.hops[0], call.source
    forward = call.forward_source
    return Finding(kind, first.number, call.operator, detail, top.operator, source, first.node, forward, times)


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
    if not (_has_data(source) and _has_data(target)):
        return ""
    return f"{source} → {target}, {_difference(source, target)}"


def _has_data(tensor: TensorFact) -> bool:
    """Whether a tensor is neither on the meta device nor a fake one, which names another device."""
    return tensor.device != "meta" and tensor.subclass != "FakeTensor"


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
    if not _has_data(tensor):
        return ""
    if tensor.device.startswith("cuda"):
        return f"reads {tensor} on the host, which waits for the GPU"
    return f"reads {tensor} on the host; on a GPU this would wait for it"


def _sizes(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))})"

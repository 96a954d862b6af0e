"""A trace in a few lines: what ran, each kind of hop that a plain call does not have with its reason, the findings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchkit import numbers
from dispatcher_trace.capture.types import Call, Hop
from dispatcher_trace.explain.findings import findings, grouped
from dispatcher_trace.render.outline import shortened

_LINES = 6
_TITLES = 3  # top-level calls that are printed one by one
# The hops of a plain call: autograd, views, the choice of a factory's backend, a backend. The others in this list come
# with FuncTorchDynamicLayerFrontMode and with Python, at every call.
_PLAIN = re.compile(
    r"(Autograd\w+|ADInplaceOrView|BackendSelect|(Quantized|Sparse|SparseCsr|NestedTensor)?(CPU|CUDA)"
    r"|FuncTorchDynamicLayerBackMode|PythonTLSSnapshot)"
)


def answer(calls: Sequence[Call], *, failed: bool) -> list[str]:
    """The lines, at most six: the call that raised, unexpected hops, findings, and what was called.

    Args:
        calls: Top-level calls.
        failed: Whether an exception ended the traced code; what was caught is named after the unexpected hops.
    """
    every = [call for top in calls for call in top.walk()]
    raised, unexpected = list(_failure(every, "raised" if failed else "raised and caught")), list(_unexpected(every))
    about = [*raised, *unexpected] if failed else [*unexpected, *raised]
    bullets = [finding.text(str, count) for finding, count in grouped(findings(calls))]
    room = _LINES - min(len(calls), _TITLES if len(calls) <= _TITLES else 1)
    # Half of the room at least for what is unexpected, the other half for the findings; neither leaves its half empty.
    for_bullets = max(room // 2, room - len(about))
    lines = _fitting(about, room - min(len(bullets), for_bullets))
    lines += _fitting(bullets, room - len(lines))
    return [*_called(calls), *lines]


def _called(calls: Sequence[Call]) -> list[str]:
    """The top-level calls with their paths; in a line together if they are many."""
    if len(calls) <= _TITLES:
        return [f"{call.title}  {' → '.join(hop.key for hop in call.main_path())}{_native(call)}" for call in calls]
    operators: dict[str, int] = {}
    for call in calls:
        kind = f"{call.operator}({_dtypes(call)})"
        operators[kind] = operators.get(kind, 0) + 1 + call.alike
    ranked = sorted(operators.items(), key=lambda item: -item[1])
    listed = [f"{kind} × {numbers.count(times)}" if times > 1 else kind for kind, times in ranked[:_LINES]]
    left = len(ranked) - _LINES
    more = f" and {numbers.count(left)} operator{'' if left == 1 else 's'} more" if left > 0 else ""
    return [f"{numbers.count(sum(operators.values()))} calls: {', '.join(listed)}{more}"]


def _native(call: Call) -> str:
    native = call.main_path()[-1].native
    return f" at::native::{native}" if native else ""


def _dtypes(call: Call) -> str:
    return ", ".join(dict.fromkeys(tensor.dtype for tensor in call.hops[0].tensors))


def _failure(every: Sequence[Call], verb: str) -> Iterator[str]:
    """The innermost hop that the last exception left."""
    failed = [(call, hop) for call in every for hop in call.hops if hop.error]
    if failed:
        call, hop = max(failed, key=lambda pair: pair[1].number)
        yield f"{verb} at hop {hop.number}, {hop.key}, in {call.operator}({call.shapes}): {shortened(hop.error)}"


def _unexpected(every: Sequence[Call]) -> Iterator[str]:
    """One line for each key that a plain call does not have: its first hop and reason, how many there are."""
    groups: dict[str, list[tuple[Call, Hop]]] = {}
    for call in every:
        for hop in call.hops:
            if not _PLAIN.fullmatch(hop.key) and not hop.error:
                groups.setdefault(hop.key, []).append((call, hop))
    if len(groups) > 1:
        groups.pop("FuncTorchDynamicLayerFrontMode", None)  # the way into a transform, whose own key says more
    for key, pairs in groups.items():
        call, hop = pairs[0]
        more = f", {numbers.count(len(pairs))} hops, first" if len(pairs) > 1 else ""
        reason = hop.why.removesuffix(".")
        yield f"{key}{more} at hop {hop.number}, {call.operator}({_dtypes(call)}): {reason}"


def _fitting(lines: Sequence[str], room: int) -> list[str]:
    """The first lines, the last of them saying how many are left out."""
    if len(lines) <= room or room < 1:
        return list(lines[: max(room, 0)])
    return [*lines[: room - 1], f"… {numbers.count(len(lines) - room + 1)} lines more like these (--full)"]

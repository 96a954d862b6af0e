"""One sentence a hop that says why it happened, put together from the hop's own data."""

from __future__ import annotations

from itertools import groupby

from dispatcher_trace.records import Call, Hop, TensorFact

_COMPOSITE = {
    "math kernel": "a composite kernel, differentiable through the operators it calls",
    "default backend kernel": "a composite kernel for every backend",
}


def explain(hop: Hop, before: Hop | None) -> str:
    """Why the dispatcher came to this kernel, and what the kernel did.

    Args:
        hop: with its calls filled in.
        before: the hop of the same call that handed on to this one, or None for the first.
    """
    reason = _redispatched(hop, before) if before is not None else _computed(hop)
    return f"{reason}{_skipped(hop)}; {_effect(hop)}."


def _computed(hop: Hop) -> str:
    carriers = [argument.name for argument in hop.arguments if any(hop.key in t.keys for t in argument.tensors)]
    if carriers:
        source = f"`{'`, `'.join(carriers)}` {'carries' if len(carriers) == 1 else 'carry'} it"
    elif hop.key in hop.included:
        source = "the thread includes it"
    else:
        source = "arguments and thread state together bring it"
    carried = {key for tensor in hop.tensors for key in tensor.keys}
    # Only what would have come before this key explains anything: order of priority is that of the keys carried.
    order = [key for tensor in hop.tensors for key in tensor.keys if key in hop.excluded]
    excluded = list(dict.fromkeys(key for key in order if key in carried))
    without = f", the thread excludes {', '.join(excluded)}" if excluded else ""
    return f"{hop.key} is the highest key left: {source}{without}"


def _redispatched(hop: Hop, before: Hop | None) -> str:
    assert before is not None
    return f"the kernel at {before.key} handed on; of what is left {hop.key} is the highest"


def _skipped(hop: Hop) -> str:
    if not hop.skipped:
        return ""
    verb = "falls" if len(hop.skipped) == 1 else "fall"
    return f" ({', '.join(hop.skipped)} {verb} through for this operator)"


def _effect(hop: Hop) -> str:
    if hop.error:
        return f"its kernel raised {hop.error}"
    made = f" and recorded {hop.made_node}" if hop.made_node else ""
    kind = _COMPOSITE.get(hop.kind, f"its kernel ({hop.kind})")
    if not hop.calls:
        return f"{kind} called no further operator{made}"
    return f"{kind} called {_counted(hop.calls)}{_recast(hop)}{made}"


def _counted(calls: list[Call]) -> str:
    parts = []
    for operator, group in groupby(calls, key=lambda call: call.operator):
        number = sum(1 for _ in group)
        parts.append(operator if number == 1 else f"{operator} {number} times")
    return ", then ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])} and {len(parts) - 3} more"


def _recast(hop: Hop) -> str:
    """Dtypes with which the same operator was called anew, where they differ from those that came in."""
    again = [call for call in hop.calls if call.operator == hop.operator]
    if not again:
        return ""
    given, passed = _dtypes(hop.tensors), _dtypes(again[-1].hops[0].tensors)
    return f" with {passed} where {given} came in" if given != passed else " with the same dtypes"


def _dtypes(tensors: tuple[TensorFact, ...]) -> str:
    return ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors))

"""The reason for each hop, as one sentence from the hop's own data."""

from __future__ import annotations

from itertools import groupby

from dispatcher_trace.capture.key_sets import PYTHON_DISPATCHER
from dispatcher_trace.capture.types import Call, Hop, TensorFact

_COMPOSITE = {
    "math kernel": "its kernel, a composite that is differentiable through the operators it calls,",
    "default backend kernel": "its kernel, a composite for every backend,",
}
_MAX_NAMED_CALLS = 4


def explain(hop: Hop, before: Hop | None, after: str, by_rule: str) -> str:
    """Why the dispatcher chose this kernel, and what the kernel did.

    Args:
        hop: The hop, with its calls filled in.
        before: The hop of the same call that redispatched to this one; None for the first hop.
        after: The key that this hop redispatched to, or empty.
        by_rule: The key that the dispatcher's rule gives for a first hop, from the arguments and the thread's state.
    """
    if before is not None:
        reason = f"{before.key} redispatched, and {hop.key} is the highest key left"
    elif hop.key == by_rule:
        reason = _highest_key(hop)
    elif by_rule == PYTHON_DISPATCHER:
        reason = f"torch's Python dispatcher chose {hop.key}"
    else:
        reason = f"{hop.key} is the highest key of the set that the caller passed, which lacks {by_rule}"
    skipped = ""
    if hop.skipped:
        verb = "falls" if len(hop.skipped) == 1 else "fall"
        skipped = f" ({', '.join(hop.skipped)} {verb} through for this operator)"
    return f"{reason}{skipped}; {_effect(hop, after)}."


def _highest_key(hop: Hop) -> str:
    carriers = [argument.name for argument in hop.arguments if any(hop.key in t.keys for t in argument.tensors)]
    if carriers:
        source = f"`{'`, `'.join(carriers)}` {'carries' if len(carriers) == 1 else 'carry'} it"
    elif hop.key in hop.included:
        source = "the thread includes it"
    else:
        source = "arguments and thread state together bring it"
    removed = f", and the thread excludes {', '.join(hop.removed)}" if hop.removed else ""
    return f"{hop.key} is the highest key left: {source}{removed}"


def _effect(hop: Hop, after: str) -> str:
    kernel = _COMPOSITE.get(hop.kind, f"its {hop.kind}")
    if hop.error:
        return f"{kernel} raised {hop.error.partition(':')[0]}"
    did = []
    if hop.calls:
        did.append(f"called {_counted(hop.calls)}{_recast(hop)}")
    if after:
        did.append(f"redispatched to {after}")
    if hop.made_node:
        did.append(f"returned a result that carries {hop.made_node}")
    return f"{kernel} {', '.join(did) or 'called no further operator'}"


def _counted(calls: list[Call]) -> str:
    parts = []
    for operator, group in groupby(calls, key=lambda call: call.operator):
        number = sum(1 for _ in group)
        parts.append(operator if number == 1 else f"{operator} {number} times")
    if len(parts) <= _MAX_NAMED_CALLS:
        return ", then ".join(parts)
    return f"{', '.join(parts[:3])} and {len(parts) - 3} more"


def _recast(hop: Hop) -> str:
    """The dtypes with which the kernel called the same operator again, and those that it got."""
    again = [call for call in hop.calls if call.operator == hop.operator]
    if not again:
        return ""
    given, passed = _dtypes(hop.tensors), _dtypes(again[-1].hops[0].tensors)
    return f" with {passed} where {given} came in" if given != passed else " with the same dtypes"


def _dtypes(tensors: tuple[TensorFact, ...]) -> str:
    return ", ".join(dict.fromkeys(tensor.dtype for tensor in tensors))

"""One sentence a hop that says why it happened, put together from the hop's own data."""

from __future__ import annotations

from itertools import groupby

from dispatcher_trace.capture.types import Call, Hop, TensorFact

_COMPOSITE = {
    "math kernel": "its kernel, a composite that is differentiable through the operators it calls,",
    "default backend kernel": "its kernel, a composite for every backend,",
}


def explain(hop: Hop, before: Hop | None, after: str) -> str:
    """Why the dispatcher came to this kernel, and what the kernel did.

    Args:
        hop: with its calls filled in.
        before: the hop of the same call that handed on to this one, or None for the first.
        after: the key that this hop handed on to, or empty.
    """
    reason = _computed(hop) if before is None else f"{before.key} handed on, and of what is left {hop.key} is highest"
    return f"{reason}{_skipped(hop)}; {_effect(hop, after)}."


def _computed(hop: Hop) -> str:
    carriers = [argument.name for argument in hop.arguments if any(hop.key in t.keys for t in argument.tensors)]
    if carriers:
        source = f"`{'`, `'.join(carriers)}` {'carries' if len(carriers) == 1 else 'carry'} it"
    elif hop.key in hop.included:
        source = "the thread includes it"
    else:
        source = "arguments and thread state together bring it"
    removed = f", and the thread excludes {', '.join(hop.removed)}" if hop.removed else ""
    return f"{hop.key} is the highest key left: {source}{removed}"


def _skipped(hop: Hop) -> str:
    if not hop.skipped:
        return ""
    verb = "falls" if len(hop.skipped) == 1 else "fall"
    return f" ({', '.join(hop.skipped)} {verb} through for this operator)"


def _effect(hop: Hop, after: str) -> str:
    kernel = _COMPOSITE.get(hop.kind, f"its {hop.kind}")
    if hop.error:
        return f"{kernel} raised {hop.error}"
    did = []
    if hop.calls:
        did.append(f"called {_counted(hop.calls)}{_recast(hop)}")
    if after:
        did.append(f"handed on to {after}")
    if hop.made_node:
        did.append(f"returned a result that carries {hop.made_node}")
    return f"{kernel} {', '.join(did) or 'called no further operator'}"


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

"""The static prediction: which keys a call will visit, from its key set and the dispatch table alone.

The dispatcher's rule (c10 ``DispatchKeySet``, ``OperatorEntry``): a call's key set is (keys of the arguments ∪ what the
thread includes) − what it excludes; keys at which the operator falls through are dropped; the highest key left has the
kernel. Which kernels hand on what is left of the set, and how much that is, is a fact of the kernel, not of the table;
the rules for that are below, and the report counts how often they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher_trace.capture import dispatcher
from dispatcher_trace.capture.dispatcher import KeyBits, Table
from dispatcher_trace.capture.types import Call

_MOST_HOPS = 16
# Kinds of registration whose Autograd kernel ends the call: a composite calls other operators instead of handing on.
_COMPOSITE = frozenset({"math kernel", "default backend kernel"})
# Their fallbacks make the conjugate, negative or zero tensor a plain one and hand on.
_MATERIALIZERS = frozenset({"Conjugate", "Negative", "ZeroTensor"})
_HAND_WRITTEN = "its kernel at {key} is written by hand ({file}) and ends the call instead of handing on"
# Kernels of VariableTypeManual.cpp that no table tells from those that hand on.
_ENDS_BY_HAND = frozenset({"aten::detach_", "aten::_fw_primal", "aten::_make_dual"})
_PYTHON_DISPATCHER = "PythonDispatcher"


@dataclass(frozen=True)
class Step:
    """One predicted hop: the key, the set that its kernel gets, and the keys above it that fall through."""

    key: str
    keys: KeyBits
    skipped: tuple[str, ...]


def choose(table: Table, keys: KeyBits) -> Step:
    """Drop fallthrough keys from the top until one with a kernel is left; ``Undefined`` when none is."""
    skipped: list[str] = []
    while names := dispatcher.key_names(keys):
        registration = table.get(names[0])
        if registration is None or not registration.fallthrough:
            return Step(names[0], keys, tuple(skipped))
        skipped.append(names[0])
        keys = dispatcher.without(keys, names[0])
    return Step("Undefined", keys, tuple(skipped))


def handed_on(key: str, kind: str, keys: KeyBits, backend: str) -> KeyBits | None:
    """The key set with which the kernel at ``key`` redispatches, or None where it ends the call.

    Args:
        key: where the kernel is.
        kind: of its registration.
        keys: the set it was handed.
        backend: the key that the arguments ``device`` and ``layout`` name: a factory's backend comes from there.
    """
    if kind in _COMPOSITE:
        return None
    if key.startswith("Autograd"):
        # Every per-backend autograd key stands above ADInplaceOrView; AutogradOther is the lowest of them.
        return dispatcher.below(keys, "AutogradOther")
    if key in ("ADInplaceOrView", "PythonTLSSnapshot") or (key in _MATERIALIZERS and kind == "backend fallback"):
        return dispatcher.below(keys, key)
    if key == "BackendSelect":
        named = dispatcher.bits_of(backend) if dispatcher.known_key(backend) else 0
        return dispatcher.without(keys, key) | named
    return None


def predict(table: Table, carried: KeyBits, included: KeyBits, excluded: KeyBits, backend: str) -> list[Step]:
    """The hops of one call, in order.

    Args:
        table: of the operator, as it was without shims.
        carried: union of the arguments' keys.
        included: what the thread adds.
        excluded: what the thread takes out.
        backend: as :func:`handed_on` has it.
    """
    keys: KeyBits | None = dispatcher.computed(carried, included, excluded)
    steps: list[Step] = []
    while keys is not None and len(steps) < _MOST_HOPS:
        step = choose(table, keys)
        steps.append(step)
        registration = table.get(step.key)
        if registration is None:
            break
        keys = handed_on(step.key, registration.kind, step.keys, backend)
    return steps


def cause_of(call: Call) -> str:
    """Why a call took another way than predicted; empty where no known cause fits."""
    last = call.hops[-1]
    if last.error:
        return "the kernel raised before it could hand on"
    if call.operator.partition(".")[0] in _ENDS_BY_HAND and call.missed:
        return _HAND_WRITTEN.format(key=last.key, file=last.where)
    if by_python_dispatcher(call):
        return "torch's dispatcher in Python chose the kernel"
    return ""


def by_python_dispatcher(call: Call) -> bool:
    """Whether torch's dispatcher in Python, which no table describes, chose the call's kernel: while it compiles."""
    return _PYTHON_DISPATCHER in call.hops[0].keys

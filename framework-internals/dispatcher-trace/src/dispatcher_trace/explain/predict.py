"""The static prediction: the keys that a call visits, from its key set and the dispatch table alone.

The dispatcher's rule (c10 ``DispatchKeySet``, ``OperatorEntry``): the key set of a call is (keys of the arguments ∪ the
thread's include set) − the thread's exclude set. Keys at which the operator falls through are dropped. The highest key
that is left has the kernel. The table does not say which kernels redispatch, nor with which key set. This module has
rules for that, and the report counts how often they hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher_trace.capture import key_sets
from dispatcher_trace.capture.dispatcher import Table
from dispatcher_trace.capture.key_sets import PYTHON_DISPATCHER, KeyBits
from dispatcher_trace.capture.types import Call

_MAX_HOPS = 16
# Kinds of kernels that end the call: a composite calls other operators instead of redispatching.
_COMPOSITE = frozenset({"math kernel", "default backend kernel"})
# Their fallbacks turn the conjugate, negative or zero tensor into a plain one and redispatch.
_MATERIALIZERS = frozenset({"Conjugate", "Negative", "ZeroTensor"})
_HAND_WRITTEN = "the hand-written kernel at {key} ({file}) ends the call instead of redispatching"
# Kernels of VariableTypeManual.cpp. In the table they look like those that redispatch.
_ENDS_BY_HAND = frozenset({"aten::detach_", "aten::_fw_primal", "aten::_make_dual"})


@dataclass(frozen=True)
class PredictedHop:
    """One predicted hop.

    Attributes:
        key: The key that the dispatcher chooses.
        keys: The key set that the kernel gets.
        skipped: Keys above ``key`` at which the operator falls through.
    """

    key: str
    keys: KeyBits
    skipped: tuple[str, ...]


def choose(table: Table, keys: KeyBits) -> PredictedHop:
    """Drop fallthrough keys from the top until a key with a kernel is left; ``Undefined`` if none is."""
    skipped: list[str] = []
    while names := key_sets.key_names(keys):
        registration = table.get(names[0])
        if registration is None or not registration.fallthrough:
            return PredictedHop(names[0], keys, tuple(skipped))
        skipped.append(names[0])
        keys = key_sets.without(keys, names[0])
    return PredictedHop("Undefined", keys, tuple(skipped))


def redispatched_keys(key: str, kind: str, keys: KeyBits, backend: str) -> KeyBits | None:
    """The key set with which the kernel at ``key`` redispatches; None if the kernel ends the call.

    Args:
        key: Key of the kernel.
        kind: Kind of its registration.
        keys: The key set that the kernel got.
        backend: The backend key that the arguments ``device`` and ``layout`` name; a factory's backend comes from it.
    """
    if kind in _COMPOSITE:
        return None
    if key.startswith("Autograd"):
        # AutogradOther is the lowest autograd key, and ADInplaceOrView is below it.
        return key_sets.below(keys, "AutogradOther")
    if key in ("ADInplaceOrView", "PythonTLSSnapshot") or (key in _MATERIALIZERS and kind == "backend fallback"):
        return key_sets.below(keys, key)
    if key == "BackendSelect":
        named = key_sets.bits_of(backend) if key_sets.known_key(backend) else 0
        return key_sets.without(keys, key) | named
    return None


def predict(table: Table, carried: KeyBits, included: KeyBits, excluded: KeyBits, backend: str) -> list[PredictedHop]:
    """The hops of one call, in order.

    Args:
        table: Dispatch table of the operator without shims.
        carried: Union of the arguments' keys.
        included: The thread's include set.
        excluded: The thread's exclude set.
        backend: As for :func:`redispatched_keys`.
    """
    keys: KeyBits | None = key_sets.computed(carried, included, excluded)
    steps: list[PredictedHop] = []
    while keys is not None and len(steps) < _MAX_HOPS:
        step = choose(table, keys)
        steps.append(step)
        registration = table.get(step.key)
        if registration is None:
            break
        keys = redispatched_keys(step.key, registration.kind, step.keys, backend)
    return steps


def cause_of(call: Call) -> str:
    """Why a call visited other keys than predicted; empty if no known cause fits."""
    last = call.hops[-1]
    if not last.stop_ns:
        return "the trace ended before the kernel"
    if last.error:
        return "the kernel raised before it could redispatch"
    if call.operator.partition(".")[0] in _ENDS_BY_HAND and call.missed:
        return _HAND_WRITTEN.format(key=last.key, file=last.where)
    if by_python_dispatcher(call):
        return "torch's Python dispatcher chose the kernel"
    return ""


def by_python_dispatcher(call: Call) -> bool:
    """Whether torch's Python dispatcher chose the call's kernel, as it does while compiling; no table describes it."""
    return PYTHON_DISPATCHER in call.hops[0].keys

"""Assemble captured hops into calls: group them, predict their keys, add native names and reasons."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dispatcher_trace.capture import dispatcher, key_sets
from dispatcher_trace.capture.recorder import RawHop, RawTensor, fact_of, raw_tensors_in, text_of
from dispatcher_trace.capture.types import Argument, Call, Hop
from dispatcher_trace.capture.user_stack import called_name, stack_lines
from dispatcher_trace.explain.native_functions import native_function
from dispatcher_trace.explain.predict import PredictedHop, choose, predict, redispatched_keys
from dispatcher_trace.explain.why import explain


def calls_of(top: Sequence[RawHop]) -> tuple[list[Call], list[RawHop], dict[str, int]]:
    """The calls that a recorder has captured.

    Args:
        top: The captured hops of the top level, after the traced code has ended.

    Returns:
        The calls that the traced code itself made; the captured first hop of every call (nested ones too) in order of
        their numbers, to match a profile with; and how often calls went through kernels without shim, by operator and
        key.
    """
    assembler = _Assembler()
    collecting = gc.isenabled()
    gc.disable()  # nothing here becomes garbage, and collections would visit all calls again and again
    try:
        calls = [assembler.call(raw) for raw in top]
        _link_backward(calls)
    finally:
        if collecting:
            gc.enable()
    return calls, sorted(assembler.first_hops, key=lambda raw: raw.number), dict(assembler.unshimmed)


def is_redispatch(raw: RawHop) -> bool:
    """Whether the hop's parent redispatched to it, rather than calling the operator again.

    The dispatcher does not say. A hop counts as redispatched if its parent is a hop of the same operator whose kernel
    redispatches by the rules of :mod:`~dispatcher_trace.explain.predict`, and if the key set of that redispatch leads
    to this key, possibly through kernels without shim.
    """
    parent, table = raw.parent, raw.table
    if parent is None or parent.operator != raw.operator or parent.key not in table:
        return False
    left = redispatched_keys(parent.key, table[parent.key].kind, parent.keys, raw.backend)
    if left is None:
        return False
    if parent.key == "BackendSelect":
        return True  # any key: the backend may come from a layout or a default device
    step = choose(table, left)
    while step.key in table and table[step.key].unwatched:
        left = redispatched_keys(step.key, table[step.key].kind, step.keys, raw.backend)
        if left is None:
            return False
        step = choose(table, left)
    return step.key == raw.key


class _Assembler:
    def __init__(self) -> None:
        self.first_hops: list[RawHop] = []
        self.unshimmed: Counter[str] = Counter()
        self._threads: dict[int, str] = {0: "main"}
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._arguments: dict[tuple[str, RawTensor], Argument] = {}

    def call(self, first: RawHop) -> Call:
        """The call whose first hop this is."""
        self.first_hops.append(first)
        by_rule, expected = self._expected(first)
        chain: list[RawHop] = []
        following: RawHop | None = first
        while following is not None:
            chain.append(following)
            following = next((child for child in chain[-1].children if is_redispatch(child)), None)
        hops: list[Hop] = []
        for position, raw in enumerate(chain):
            predicted = expected[position].key if position < len(expected) else ""
            hop = self._hop(raw, predicted, redispatched=position > 0)
            successor = chain[position + 1] if position + 1 < len(chain) else None
            hop.calls = [self.call(child) for child in raw.children if child is not successor]
            hop.why = explain(hop, hops[-1] if hops else None, successor.key if successor else "", by_rule)
            hops.append(hop)
        missed = tuple(hop.key for hop in expected[len(chain) :])
        frames, direct = first.stack
        called = called_name(*frames[0]) if frames else ""
        lines = self._lines(first)
        return Call(first.operator, hops, missed, lines, alike=first.alike, called=called, direct=direct)

    def _expected(self, first: RawHop) -> tuple[str, list[PredictedHop]]:
        """The key of a call by the dispatcher's rule, and the predicted hops without those at kernels without shim.

        A later hop at Undefined is at a backend that has no name in Python (MKL-DNN's). It is not watched.
        """
        table = first.table
        predicted = predict(table, first.carried, first.included, first.excluded, first.backend)
        predicted = [hop for hop in predicted if hop is predicted[0] or hop.key != "Undefined"]
        unshimmed = [hop for hop in predicted if hop.key in table and table[hop.key].unwatched]
        self.unshimmed.update(f"{first.operator} at {hop.key}" for hop in unshimmed)
        return predicted[0].key, [hop for hop in predicted if hop not in unshimmed]

    def _hop(self, raw: RawHop, predicted: str, *, redispatched: bool) -> Hop:
        registration = raw.table[raw.key]
        where = registration.where
        if registration.file.endswith("custom_ops.py") and not raw.key.startswith("Autograd"):
            where = dispatcher.custom_kernel_at(raw.operator) or where
        removed: tuple[str, ...] = ()
        if not redispatched:
            computed = key_sets.key_names(key_sets.computed(raw.carried, raw.included, raw.excluded))
            removed = tuple(key for key in key_sets.key_names(raw.carried) if key not in computed)
        thread = f"{'autograd worker' if raw.node else 'thread'} {raw.thread}"
        return Hop(
            number=raw.number,
            operator=raw.operator,
            key=raw.key,
            keys=key_sets.key_names(raw.keys),
            how="redispatch" if redispatched else "call",
            skipped=_skipped(raw, redispatched=redispatched),
            included=key_sets.key_names(raw.included),
            excluded=key_sets.key_names(raw.excluded),
            removed=removed,
            kind=registration.kind,
            where=where,
            native=native_function(raw.operator, raw.key, registration.kind),
            predicted=predicted,
            arguments=tuple(self._argument(name, value) for name, value in zip(raw.names, raw.values, strict=False)),
            results=tuple(self._argument("", value) for value in raw.results),
            thread=self._threads.setdefault(raw.thread, thread),
            node=raw.node,
            made_node=raw.made_node,
            start_ns=raw.start_ns,
            stop_ns=raw.stop_ns,
            error=raw.error,
            effects=_own_effects(raw),
            native_step=raw.native_step,
            task=f"task {raw.task}" if raw.task else "",
        )

    def _argument(self, name: str, value: Any) -> Argument:
        """An argument as a trace shows it; one object for a tensor that stays the same from hop to hop."""
        if isinstance(value, RawTensor):
            known = self._arguments.get((name, value))
            if known is None:
                fact = fact_of(value)
                known = self._arguments[name, value] = Argument(name, str(fact), (fact,))
            return known
        if tensors := tuple(map(fact_of, raw_tensors_in(value))):
            facts = iter(tensors)
            items = (str(next(facts)) if isinstance(item, RawTensor) else text_of(item) for item in value)
            return Argument(name, f"[{', '.join(items)}]", tensors)
        text = text_of(value)
        return Argument(name, f"{name}={text}" if name else text)

    def _lines(self, raw: RawHop) -> tuple[str, ...]:
        """The user's lines; hops that have the same stack share the object."""
        lines = self._stacks.get(id(raw.stack))
        if lines is None:
            lines = self._stacks[id(raw.stack)] = stack_lines(raw.stack.frames)
        return lines


def _skipped(raw: RawHop, *, redispatched: bool) -> tuple[str, ...]:
    table = raw.table
    if not redispatched:
        return choose(table, key_sets.computed(raw.carried, raw.included, raw.excluded)).skipped
    assert raw.parent is not None
    left = redispatched_keys(raw.parent.key, table[raw.parent.key].kind, raw.parent.keys, raw.backend)
    return () if left is None else choose(table, left).skipped


def _link_backward(calls: list[Call]) -> None:
    """Set for each call of a backward the forward hop that made the running node."""
    every = [call for top in calls for call in top.walk()]
    # Each thread numbers its nodes from 0, so threads may have made nodes of one name.
    made: dict[str, dict[str, tuple[int, str]]] = {}
    for call in every:
        for hop in call.hops:
            if hop.made_node:
                # The innermost hop that returned the node made it, and comes last.
                made.setdefault(hop.made_node, {})[hop.thread] = (hop.number, call.source)
    for call in every:
        makers = made.get(call.hops[0].node, {})
        if len(makers) == 1:
            call.forward, call.forward_source = next(iter(makers.values()))
        else:  # a graph is nearly always run by the thread that made it
            call.forward, call.forward_source = makers.get(call.hops[0].thread, (0, ""))


def _own_effects(raw: RawHop) -> tuple[str, ...]:
    """The effects of a hop, without those of the hops inside it."""
    inside = {effect for child in raw.children for effect in _effects(child)}
    return tuple(effect for effect in _effects(raw) if effect not in inside)


def _effects(raw: RawHop) -> tuple[str, ...]:
    """Which results share memory with arguments, and which versions went up."""
    labels = {tensor.label for tensor in raw.tensors}
    memory: dict[str, str] = {}
    for tensor in raw.tensors:
        if tensor.storage:
            memory.setdefault(tensor.storage, tensor.label)
    made = [tensor for value in raw.results for tensor in raw_tensors_in(value) if tensor.label not in labels]
    on_memory = (
        f"{tensor.label} aliases the memory of {memory[tensor.storage]} ({tensor.storage})"
        for tensor in made
        if tensor.storage in memory
    )
    return (*on_memory, *(f"the version of {label} went up" for label in raw.bumped))

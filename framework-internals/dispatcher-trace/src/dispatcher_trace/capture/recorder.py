"""What a shim captures at each hop, unprocessed: keys, arguments, results, autograd nodes, times."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchkit.errors import first_line
from dispatcher_trace.capture import dispatcher, key_sets
from dispatcher_trace.capture.types import NativeStep, TensorFact, dtype_name
from dispatcher_trace.capture.user_stack import user_stack

_REPR_LIMIT = 60
_LAYOUTS = {
    torch.sparse_coo: "Sparse",
    torch.sparse_csr: "SparseCsr",
    torch.sparse_csc: "SparseCsr",
    torch.sparse_bsr: "SparseCsr",
    torch.sparse_bsc: "SparseCsr",
    torch._mkldnn: "Mkldnn",  # type: ignore[attr-defined]
}
_LARGEST_SEQUENCE_NUMBER = 2**62  # AccumulateGrad has the largest possible number, so that it runs first


@dataclass(slots=True)
class RawHop:
    """One captured hop. :class:`dispatcher_trace.capture.types.Hop` explains the fields that are not listed here.

    Attributes:
        parent: The hop whose kernel was running on this thread; None at the top level.
        carried: Union of the arguments' keys.
        backend: The backend key that the arguments ``device`` and ``layout`` name.
        native_thread: Thread identifier of the operating system, which the profiler uses.
        bumped: Labels of the arguments whose version went up.
        children: The hops inside this one.
    """

    number: int
    parent: RawHop | None
    operator: str
    key: str
    keys: key_sets.KeyBits
    included: key_sets.KeyBits
    excluded: key_sets.KeyBits
    carried: key_sets.KeyBits
    arguments: list[tuple[str, Any]]
    backend: str
    thread: int
    native_thread: int
    node: str
    start_ns: int
    stop_ns: int = 0
    results: list[Any] = field(default_factory=list)
    made_node: str = ""
    error: str = ""
    bumped: list[str] = field(default_factory=list)
    stack: tuple[str, ...] = ()
    native_step: NativeStep | None = None
    children: list[RawHop] = field(default_factory=list)


class _PerThread(threading.local):
    """The current hop of this thread, and whether the tracer itself is calling torch."""

    def __init__(self) -> None:
        self.open: RawHop | None = None
        self.busy = False


class Recorder:
    """Collects the hops of one trace; shims call :meth:`enter` and :meth:`leave` from any thread.

    State that threads share is only appended to or counted up, which is atomic under the interpreter lock. The current
    hop is kept per thread. The recorder keeps no tensor alive: it reads everything that a trace shows at the hop.

    Args:
        numbers: Text of each wrapped number, by ``id``. A wrapped number is labelled by its value.
    """

    def __init__(self, numbers: Mapping[int, str]) -> None:
        self.top: list[RawHop] = []
        self.unrecorded: dict[str, int] = {}
        self.thread = threading.get_ident()
        self.start_ns = time.perf_counter_ns()
        self._numbers = itertools.count(1)
        self._labels = itertools.count()
        self._numbers_by_id = numbers
        self._seen: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._storages: dict[int, tuple[str, list[weakref.ref[torch.Tensor]]]] = {}
        self._storage_labels = itertools.count()
        self._stepped: set[tuple[str, str, str]] = set()
        self._local = _PerThread()

    @property
    def busy(self) -> bool:
        """Whether the tracer itself is calling torch on this thread; such calls are not recorded."""
        return self._local.busy

    @busy.setter
    def busy(self, value: bool) -> None:
        self._local.busy = value

    def exists_only_for_number(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a hop exists only because of a wrapped number that a shim made.

        In inference mode C++ would have an inference tensor there, which lacks the key.
        """
        if not torch.is_inference_mode_enabled():
            return False
        carried = self._carried((*args, *kwargs.values()))
        keys = key_sets.computed(carried, key_sets.tls_included(), key_sets.tls_excluded())
        return key not in key_sets.key_names(keys)

    def enter(
        self,
        operator: str,
        key: str,
        keyset: Any,
        names: Sequence[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RawHop:
        """Record that a kernel was reached. Every call needs a :meth:`leave`."""
        local = self._local
        local.busy = True
        try:
            parent = local.open
            given = [*zip(names, args, strict=False), *kwargs.items()]
            node = dispatcher.running_node()
            hop = RawHop(
                number=next(self._numbers),
                parent=parent,
                operator=operator,
                key=key,
                keys=keyset.raw_repr(),
                included=key_sets.tls_included(),
                excluded=key_sets.tls_excluded(),
                carried=self._carried(value for _, value in given),
                arguments=self._arguments(operator, key, given),
                backend=_backend(given),
                thread=threading.get_ident(),
                native_thread=threading.get_native_id(),
                node="" if node is None else _node_name(node),
                start_ns=0,
                stack=user_stack() if parent is None else parent.stack,
            )
            (self.top if parent is None else parent.children).append(hop)
            local.open = hop
        finally:
            local.busy = False
        hop.start_ns = time.perf_counter_ns() - self.start_ns
        return hop

    def leave(
        self, hop: RawHop, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException | None
    ) -> None:
        """Record how the kernel ended."""
        hop.stop_ns = time.perf_counter_ns() - self.start_ns
        local = self._local
        local.open = hop.parent
        local.busy = True
        try:
            if error is not None:
                hop.error = first_line(error)
                return
            outputs = result if isinstance(result, tuple) else () if result is None else (result,)
            hop.results = [self._facts(output) for output in outputs]
            given = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_in(value)]
            before = [fact for _, value in hop.arguments for fact in facts_in(value)]
            bumped = (
                fact.label
                for fact, tensor in zip(before, given, strict=False)
                if fact.version is not None and _version(tensor) != fact.version
            )
            hop.bumped = list(dict.fromkeys(bumped))
            if hop.key.startswith("Autograd"):
                hop.made_node = _made_node(outputs, given)
        finally:
            local.busy = False

    def first_of_its_kind(self, hop: RawHop) -> bool:
        """Whether this is the first hop at its kernel with these dtypes, shapes, strides and numbers.

        False on any thread but the one that made the recorder.
        """
        if threading.get_ident() != self.thread:
            return False
        arguments = ((facts_in(value) or value) for _, value in hop.arguments)
        described = [
            [(fact.dtype, fact.shape, fact.strides) for fact in value] if isinstance(value, list) else value
            for value in arguments
        ]
        kind = (hop.operator, hop.key, repr(described))
        known = kind in self._stepped
        self._stepped.add(kind)
        return not known

    def _arguments(self, operator: str, key: str, given: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        facts = [(name, self._facts(value)) for name, value in given]
        # is_pinned is an operator call: it is made once per copy, at its kernel, where no mode of the user sees it.
        if operator == "aten::copy_" and key == "CUDA" and dict(given).get("non_blocking"):
            (name, target), tensor = facts[0], given[0][1]
            with dispatcher.own_work():
                facts[0] = name, replace(target, pinned=torch.ops.aten.is_pinned.default(tensor))
        return facts

    def _facts(self, value: Any) -> Any:
        """A tensor's facts, a list of them, or a short text for anything else."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [self._facts(item) for item in value]
        text = _plain(value)
        return text if len(text) <= _REPR_LIMIT else text[: _REPR_LIMIT - 1] + "…"

    def _tensor(self, tensor: torch.Tensor) -> TensorFact:
        with dispatcher.without_subclass_code():  # an attribute of a subclass would run the user's code
            try:
                shape = tuple(size if type(size) is int else str(size) for size in tensor.shape)
            except RuntimeError:  # a nested tensor has no single shape
                shape = ("?",)
            return TensorFact(
                label=self._label(tensor),
                dtype=dtype_name(tensor.dtype),
                shape=shape,
                device=str(tensor.device),
                keys=key_sets.key_names(self._keys(tensor)),
                strides=_strides(tensor),
                storage=self._storage(tensor),
                version=_version(tensor),
            )

    def _storage(self, tensor: torch.Tensor) -> str:
        address = dispatcher.storage_address(tensor)
        if address == 0:
            return ""
        # A freed storage's address is used again. It is not freed while a tensor that was seen on it lives.
        label, seen = self._storages.get(address, ("", []))
        seen = [reference for reference in seen if reference() is not None]
        if not seen:
            label = f"s{next(self._storage_labels)}"
        self._storages[address] = (label, [*(known for known in seen if known() is not tensor), weakref.ref(tensor)])
        return label

    def _keys(self, tensor: torch.Tensor) -> key_sets.KeyBits:
        """The keys of a tensor; for a wrapped number, those of the tensor that C++ has in its place."""
        keys = key_sets.keys_of(tensor)
        if id(tensor) in self._numbers_by_id and torch.is_inference_mode_enabled():
            return key_sets.as_inference_tensor(keys)
        return keys

    def _carried(self, values: Iterable[Any]) -> key_sets.KeyBits:
        """Union of the keys of all tensors in these values."""
        return functools.reduce(operator.or_, (self._keys(t) for value in values for t in tensors_in(value)), 0)

    def _label(self, tensor: torch.Tensor) -> str:
        # A freed tensor's address is used again; the reference distinguishes the old tensor from the new one.
        address = id(tensor)
        if address in self._numbers_by_id:
            return self._numbers_by_id[address]
        known = self._seen.get(address)
        if known is not None and known[1]() is tensor:
            return known[0]
        label = f"${next(self._labels)}"
        self._seen[address] = (label, weakref.ref(tensor))
        return label


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of an argument: itself, those of a list, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def facts_in(value: Any) -> list[TensorFact]:
    """The tensor facts of a captured argument, in the order of :func:`tensors_in`."""
    if isinstance(value, TensorFact):
        return [value]
    return [fact for fact in value if isinstance(fact, TensorFact)] if isinstance(value, list) else []


def _plain(value: Any) -> str:
    """Text of a value that is no tensor. An object becomes the name of its type: its ``repr`` might run operators."""
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    if value is None or isinstance(
        value, (bool, int, float, complex, str, torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        return repr(value)
    return type(value).__name__


def _backend(given: Sequence[tuple[str, Any]]) -> str:
    """The backend key that the arguments ``device`` and ``layout`` of a factory name; dense on a CPU by default."""
    named = {name: value for name, value in given if value is not None and name in ("device", "layout")}
    backend = key_sets.backend_key(torch.device(named.get("device", "cpu")).type)
    return f"{_LAYOUTS.get(named.get('layout', torch.strided), '')}{backend}"


def _node_name(node: Any) -> str:
    name, number = node.name().removeprefix("torch::autograd::"), dispatcher.sequence_number(node)
    return name if number > _LARGEST_SEQUENCE_NUMBER else f"{name}#{number}"


def _made_node(outputs: tuple[Any, ...], given: list[torch.Tensor]) -> str:
    """The node that an output has and no argument has.

    Arguments that are views are skipped, also where they are outputs: reading the ``grad_fn`` of a view that was
    written to runs operators.
    """
    before = {tensor.grad_fn for tensor in given if not tensor._is_view()}
    views = {id(tensor) for tensor in given if tensor._is_view()}
    for output in outputs:
        for tensor in tensors_in(output):
            if id(tensor) not in views and tensor.grad_fn is not None and tensor.grad_fn not in before:
                return _node_name(tensor.grad_fn)
    return ""


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _strides(tensor: torch.Tensor) -> tuple[int | str, ...]:
    try:
        return tuple(stride if type(stride) is int else str(stride) for stride in tensor.stride())
    except RuntimeError:  # sparse and nested tensors have none
        return ()

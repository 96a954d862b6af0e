"""What a shim captures at each hop, unprocessed: keys, arguments, results, autograd nodes, times.

A hop is captured in under twenty microseconds, because the text of all this is made when the trace is assembled:
:func:`fact_of` and :func:`text_of` turn what was captured into what a trace shows.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from benchkit.errors import first_line
from dispatcher_trace.capture import dispatcher, key_sets, wrapped_numbers
from dispatcher_trace.capture.types import NativeStep, TensorFact, dtype_name
from dispatcher_trace.capture.user_stack import Frame, user_frames

_REPR_LIMIT = 60
_LAYOUTS = {
    torch.sparse_coo: "Sparse",
    torch.sparse_csr: "SparseCsr",
    torch.sparse_csc: "SparseCsr",
    torch.sparse_bsr: "SparseCsr",
    torch.sparse_bsc: "SparseCsr",
    torch._mkldnn: "Mkldnn",  # type: ignore[attr-defined]
}
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
MAX_HOPS = 20_000  # kept by default; a training step of a small transformer with its optimizer has 5,000
_LAST_CALLS = 12  # top-level calls at the end that are kept whatever their number
# Held while hops are counted and taken from the top level, which threads share.
_counting = threading.RLock()
if hasattr(os, "register_at_fork"):  # the thread that holds it is not in the child
    os.register_at_fork(after_in_child=_counting._at_fork_reinit)  # type: ignore[attr-defined]
_LARGEST_SEQUENCE_NUMBER = 2**62  # AccumulateGrad has the largest possible number, so that it runs first

_TORCH_VALUES = frozenset({torch.device, torch.dtype, torch.layout, torch.memory_format})
# Types of values that never change, so their text can be made later.
_UNCHANGING = frozenset({int, float, bool, complex, str, type(None), *_TORCH_VALUES})
_PLAIN_SIZES = frozenset({int})


# A subclass may have properties of these names; what it answers is the program's, and it may raise.
_shape, _strides, _device, _dtype, _counter, _base, _node, _requires_grad = map(
    dispatcher.own_fact, ("shape", "stride", "device", "dtype", "_version", "_base", "grad_fn", "requires_grad")
)


class Stack(NamedTuple):
    """The user's frames, innermost first, and whether the innermost frame of all is one of them."""

    frames: tuple[Frame, ...]
    direct: bool


class RawTensor(NamedTuple):
    """One captured tensor. :class:`dispatcher_trace.capture.types.TensorFact` explains the fields."""

    label: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    device: torch.device | str
    keys: key_sets.KeyBits
    strides: tuple[Any, ...]
    storage: str
    version: int | None
    subclass: str
    pinned: bool = False


class _Text(str):
    """Text of a value that may change or would run code later, made when the value was captured."""

    __slots__ = ()


@dataclass(slots=True)
class RawHop:
    """One captured hop. :class:`dispatcher_trace.capture.types.Hop` explains the fields that are not listed here.

    Attributes:
        parent: The hop whose kernel was running on this thread; None at the top level.
        carried: Union of the arguments' keys.
        table: The operator's dispatch table without shims.
        names: Names of the arguments.
        values: The captured arguments: a :class:`RawTensor`, a value that never changes, or a list of these.
        tensors: The captured tensors of all arguments, in order.
        given: The tensors themselves, while the kernel runs.
        thread: Number of the thread; 0 is the thread that made the recorder.
        task: Number of the asyncio task, from 1; 0 outside of any.
        native_thread: Thread identifier of the operating system, which the profiler uses.
        bumped: Labels of the arguments whose version went up.
        stack: The user's frames, at the outermost hop that this one is inside of.
        children: The hops inside this one.
        alike: Number of later calls that were counted here instead of kept.
        kind: Hash of all that :meth:`Recorder.leave` compares; 0 before it is needed.
    """

    number: int
    parent: RawHop | None
    operator: str
    key: str
    keys: key_sets.KeyBits
    included: key_sets.KeyBits
    excluded: key_sets.KeyBits
    carried: key_sets.KeyBits
    table: dispatcher.Table
    names: Sequence[str]
    values: list[Any]
    tensors: list[RawTensor]
    given: Sequence[torch.Tensor]
    thread: int
    task: int
    native_thread: int
    node: str
    stack: Stack
    start_ns: int = 0
    stop_ns: int = 0
    results: Sequence[Any] = ()
    made_node: str = ""
    error: str = ""
    bumped: Sequence[str] = ()
    native_step: NativeStep | None = None
    children: list[RawHop] = field(default_factory=list)
    alike: int = 0
    kind: int = 0

    @property
    def backend(self) -> str:
        """The backend key that ``device``, ``layout`` and ``dtype`` of a factory name; dense on a CPU by default."""
        named = dict(zip(self.names, self.values, strict=False))
        # In an operator of the user's own these names may mean something else.
        device, dtype, layout = named.get("device"), named.get("dtype"), named.get("layout")
        backend = key_sets.backend_key(device.type if isinstance(device, torch.device) else "cpu")
        quantized = isinstance(dtype, torch.dtype) and dtype in _QUANTIZED
        prefix = "Quantized" if quantized else _LAYOUTS.get(layout, "") if isinstance(layout, torch.layout) else ""
        return f"{prefix}{backend}"


@dataclass(slots=True)
class _Seen:
    """The labels of one tensor object and of its storage, while the object lives, and how it was captured last."""

    label: str
    reference: weakref.ref[torch.Tensor]
    address: int
    storage: str
    captured: RawTensor | None = None


class _PerThread(threading.local):
    """The current hop of this thread, its numbers, and whether the tracer itself is calling torch.

    Args:
        numbers: Numbers of the threads: an identifier of the operating system is used again after a thread's end.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self.open: RawHop | None = None
        self.busy = False
        self.number = next(numbers)
        self.native = threading.get_native_id()


class Recorder:
    """Collects the hops of one trace; shims call :meth:`enter` and :meth:`leave` from any thread.

    The other state that threads share is only appended to, which is atomic under the interpreter lock. The current hop
    is kept per thread. The recorder keeps no tensor alive after its hop.

    The first ``max_hops`` hops are kept. After them, a call that is alike to a kept one in the same place is counted
    there and not kept: the same operators, keys, dtypes, shapes, strides, lines and errors, whatever the labels and
    numbers. Other calls are kept until there are twice as many hops; then only those that raise, and the last few.

    Args:
        max_hops: Number of hops after which calls are compared; None to keep all.

    Attributes:
        local: The state of each thread. Its ``open`` is set without a call: the handler of a signal may raise at one.
        counted: Number of hops that were counted as alike to others, and not kept.
        dropped: Number of hops that were neither kept nor counted as alike to others.
        above: Qualified names of the ``__torch_function__`` that calls came through.
    """

    def __init__(self, max_hops: int | None = None) -> None:
        self.top: list[RawHop] = []
        self.unrecorded: dict[str, int] = {}
        self.counted = self.dropped = 0
        self._kept = 0
        self._max_hops = max_hops
        self._kinds: dict[int, dict[int, RawHop]] = {}
        self._last: deque[RawHop] = deque(maxlen=_LAST_CALLS)
        self._same: dict[Any, Any] = {}
        self._stacks: dict[tuple[Any, ...], Stack] = {}
        self.above: set[str] = set()
        self.start_ns = time.perf_counter_ns()
        self._numbers = itertools.count(1)
        self._labels = itertools.count()
        self._seen: dict[int, _Seen] = {}
        self._storages: dict[int, tuple[str, list[weakref.ref[torch.Tensor]]]] = {}
        self._storage_labels = itertools.count()
        self._tasks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._task_numbers = itertools.count(1)
        self._stepped: set[tuple[str, str, str]] = set()
        self.local = _PerThread(itertools.count())

    def enter(
        self,
        operator: str,
        key: str,
        keyset: Any,
        table: dispatcher.Table,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RawHop:
        """Record that a kernel was reached. Every call needs a :meth:`leave`."""
        local = self.local
        local.busy = True
        try:
            parent = local.open
            shared = self._same.setdefault  # the first value that is equal, so that only one is kept
            given: list[torch.Tensor] = []
            tensors: list[RawTensor] = []
            with dispatcher.without_torch_function():
                values = [self._capture(value, given, tensors) for value in (*args, *kwargs.values())]
            carried = 0
            for tensor in tensors:
                carried |= tensor.keys
            node = dispatcher.running_node()
            if parent is not None and parent.operator == operator and values == parent.values:  # kept once
                values, tensors = parent.values, parent.tensors
            hop = RawHop(
                number=next(self._numbers),
                parent=parent,
                operator=operator,
                key=key,
                keys=shared(bits := keyset.raw_repr(), bits),
                included=shared(bits := key_sets.tls_included(), bits),
                excluded=shared(bits := key_sets.tls_excluded(), bits),
                carried=shared(carried, carried),
                table=table,
                names=(*names[: len(args)], *kwargs) if kwargs else names,
                values=values,
                tensors=tensors,
                given=given,
                thread=local.number,
                task=self._task() if parent is None else parent.task,
                native_thread=local.native,
                node="" if node is None else _node_name(node),
                stack=self._stack() if parent is None else parent.stack,
            )
            with _counting:
                self._kept += 1
            if operator == "aten::copy_" and key == "CUDA":
                self._find_pinned(hop)
            (self.top if parent is None else parent.children).append(hop)
            hop.start_ns = time.perf_counter_ns() - self.start_ns
            local.open = hop  # last, since the handler of a signal may raise at any call, and the hop would stay open
        finally:
            local.busy = False
        return hop

    def text_of_error(self, error: BaseException) -> str:
        """The type and the first line of the message of an exception. Its class may call operators to make it."""
        local = self.local
        local.busy = True
        try:
            return first_line(error)
        finally:
            local.busy = False

    def leave(self, hop: RawHop, result: Any, error: str) -> None:
        """Record how the kernel ended: with a result, or with an exception of this text. The caller closes the hop."""
        hop.stop_ns = time.perf_counter_ns() - self.start_ns
        local = self.local
        local.busy = True
        try:
            hop.error = error
            if not error:
                self._record_result(hop, result)
        finally:
            hop.given = ()
            local.busy = False
        if self._max_hops is not None and self._kept > self._max_hops:
            with _counting:
                self._count_or_keep(hop)

    def _record_result(self, hop: RawHop, result: Any) -> None:
        with dispatcher.without_torch_function():
            outputs = result if isinstance(result, tuple) else () if result is None else (result,)
            hop.results = [self._capture(output, [], []) for output in outputs]
            written = [
                (before.label, tensor)
                for before, tensor in zip(hop.tensors, hop.given, strict=True)
                if before.version is not None and _version(tensor) != before.version
            ]
            if written:
                hop.bumped = list(dict.fromkeys(label for label, _ in written))
            if hop.key.startswith("Autograd") and torch.is_grad_enabled():
                hop.made_node = _made_node(outputs, hop.given, [tensor for _, tensor in written])
            below = hop.children[-1] if hop.children else None
            if below is not None and below.operator == hop.operator and below.results == hop.results:
                hop.results = below.results  # kept once

    def hop_count(self) -> int:
        """Number of hops so far, kept or not."""
        return self._kept + self.counted + self.dropped

    def end(self) -> None:
        """Add the last calls that were not kept."""
        for hop in self._last:
            inside = _size(hop)
            if hop.kind in self._kinds[0]:
                self._kinds[0][hop.kind].alike -= 1
                self.counted -= inside
            else:
                self.dropped -= inside
            self._kept += inside
            self.top.append(hop)
        self._last.clear()
        self.top.sort(key=lambda hop: hop.number)

    def _count_or_keep(self, hop: RawHop) -> None:
        """Count a call that ended instead of keeping it, if one alike is kept in its place."""
        assert self._max_hops is not None
        parent = hop.parent
        siblings = self.top if parent is None else parent.children
        self._kinds.pop(id(hop), None)
        kinds = self._kinds.get(0 if parent is None else id(parent))
        if kinds is None:
            kinds = self._kinds[0 if parent is None else id(parent)] = {}
            for sibling in siblings:
                if sibling is not hop and sibling.stop_ns:
                    kinds.setdefault(_kind(sibling), sibling)
        known = kinds.get(_kind(hop))
        # The inside of a call goes with the call, or a kept call would look as if its kernel had not redispatched. Only
        # one that never ends has to be thinned out itself, and then of calls that its kernel made anew.
        inner = parent is not None and (parent.operator == hop.operator or self._kept <= 3 * self._max_hops)
        full = self._kept > 2 * self._max_hops and not hop.error and not inner
        if known is None and not full:
            kinds[hop.kind] = hop
            return
        inside = _size(hop)
        del siblings[_position(siblings, hop)]
        self._kept -= inside
        if known is None:
            self.dropped += inside
        else:
            known.alike += 1
            self.counted += inside
        if parent is None:
            self._last.append(hop)

    def forget(self, tensor: torch.Tensor) -> None:
        """Hold no weak reference to this tensor; it gets a new label."""
        seen = self._seen.pop(id(tensor), None)
        for _, owners in self._storages.values():
            owners[:] = [owner for owner in owners if seen is None or owner is not seen.reference]

    def first_of_its_kind(self, hop: RawHop) -> bool:
        """Whether this is the first hop at its kernel with these dtypes, shapes, strides and numbers.

        False on any thread but the one that made the recorder.
        """
        if hop.thread != 0:
            return False
        described = [
            [(tensor.dtype, tensor.shape, tensor.strides) for tensor in raw_tensors_in(value)] or value
            for value in hop.values
        ]
        kind = (hop.operator, hop.key, repr(described))
        known = kind in self._stepped
        self._stepped.add(kind)
        return not known

    def _find_pinned(self, hop: RawHop) -> None:
        """Ask whether the target of a non-blocking copy is in pinned memory.

        is_pinned is an operator call: it is made once per copy, at its kernel, where no mode of the user sees it.
        """
        if dict(zip(hop.names, hop.values, strict=False)).get("non_blocking"):
            with dispatcher.own_work():
                pinned = torch.ops.aten.is_pinned.default(hop.given[0])
            hop.values[0] = hop.tensors[0] = hop.tensors[0]._replace(pinned=pinned)

    def _stack(self) -> Stack:
        """The user's frames, one object for those that are equal."""
        frames, direct = user_frames(self.above)
        key = (direct, *[part for code, offset in frames for part in (id(code), offset)])
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = Stack(frames, direct)
        return stack

    def _task(self) -> int:
        """Number of the running asyncio task; 0 outside of any."""
        loop = asyncio._get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        if task is None:
            return 0
        number = self._tasks.get(task)
        if number is None:
            number = self._tasks[task] = next(self._task_numbers)
        return number

    def _capture(self, value: Any, given: list[torch.Tensor], tensors: list[RawTensor]) -> Any:
        """Capture a value; its tensors go to both lists."""
        if isinstance(value, torch.Tensor):
            raw = self._tensor(value)
            given.append(value)
            tensors.append(raw)
            return raw
        if type(value) in _UNCHANGING:
            return value
        if isinstance(value, (list, tuple)):
            return [self._capture(item, given, tensors) for item in value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _Text(repr(value))
        return _Text(type(value).__name__)  # the repr of an object might run operators

    def _tensor(self, tensor: torch.Tensor) -> RawTensor:
        seen = self._labels_of(tensor)
        kind = type(tensor)
        plain = kind is torch.Tensor or kind is torch.nn.Parameter
        if plain or kind.__module__.startswith("torch."):
            shape, strides, device = _layout(tensor, kind.device.__get__)  # a fake tensor's asks no mode of the program
        else:  # a user's
            shape, strides, device = dispatcher.without_torch_dispatch(_layout, tensor)
        subclass = "" if plain else kind.__name__
        keys, version, dtype = key_sets.keys_of(tensor), _version(tensor), _dtype(tensor)
        if not _PLAIN_SIZES.issuperset(map(type, shape)):
            shape, strides = _sizes(shape), _sizes(strides)  # the text of a symbol may change, and so may its hash
        before = seen.captured
        if (
            before is not None
            and before.version == version
            and before.keys == keys
            and before.storage is seen.storage
            and before.shape == shape
            and before.strides == strides
            and before.dtype is dtype
            and before.device == device
            and before.subclass == subclass
        ):
            return before  # most hops get a tensor as the hop before them left it
        shape, shared = tuple(shape), self._same.setdefault
        shape, strides, keys = shared(shape, shape), shared(strides, strides), shared(keys, keys)
        seen.captured = RawTensor(seen.label, dtype, shape, device, keys, strides, seen.storage, version, subclass)
        return seen.captured

    def _labels_of(self, tensor: torch.Tensor) -> _Seen:
        """The labels of the tensor and of its storage."""
        key, address = id(tensor), dispatcher.storage_address(tensor)
        seen = self._seen.get(key)
        # A freed tensor's address is used again; the reference distinguishes the old tensor from the new one.
        if seen is not None and seen.reference() is tensor:
            if seen.address != address:
                seen.address, seen.storage = address, self._storage(address, seen.reference)
            return seen
        reference = weakref.ref(tensor)
        label = wrapped_numbers.text_of(tensor) or f"${next(self._labels)}"
        self._seen[key] = seen = _Seen(label, reference, address, self._storage(address, reference))
        return seen

    def _storage(self, address: int, reference: weakref.ref[torch.Tensor]) -> str:
        if address == 0:
            return ""
        # A freed storage's address is used again. It is not freed while a tensor that was seen on it lives.
        label, owners = self._storages.get(address, ("", []))
        if not len(owners) & (len(owners) - 1):  # at powers of two: a storage may have thousands of views
            owners = [owner for owner in owners if owner() is not None]
        while owners and owners[-1]() is None:
            owners.pop()
        if not owners:
            label = f"s{next(self._storage_labels)}"
        owners.append(reference)
        self._storages[address] = (label, owners)
        return label


def _layout(
    tensor: torch.Tensor, own_device: Callable[[torch.Tensor], Any] = _device
) -> tuple[tuple[Any, ...], tuple[Any, ...], torch.device | str]:
    """Shape, strides and device, as far as the tensor has them without the code of a subclass."""
    try:
        shape: tuple[Any, ...] = _shape(tensor)
    except RuntimeError:  # a nested tensor has no single shape
        shape = ("?",)
    try:
        strides: tuple[Any, ...] = _strides(tensor)
    except RuntimeError:  # sparse and nested tensors have none
        strides = ()
    try:
        device: torch.device | str = own_device(tensor)
    except dispatcher.AskedForSubclassCode:
        device = "?"
    return shape, strides, device


def _position(siblings: Sequence[RawHop], hop: RawHop) -> int:
    """Where the hop stands; at the end, but for calls of other threads."""
    if siblings[-1] is hop:
        return len(siblings) - 1
    return next(index for index in range(len(siblings) - 1, -1, -1) if siblings[index] is hop)


def _size(hop: RawHop) -> int:
    """Number of hops: this one and every one inside it."""
    return 1 + sum(map(_size, hop.children))


def _kind(hop: RawHop) -> int:
    """Hash of all that makes a call another one; not of labels, numbers and times."""
    if hop.kind == 0:
        described = (
            hop.operator,
            hop.key,
            hop.keys,
            hop.included,
            hop.excluded,
            tuple(map(_described, hop.values)),
            tuple(map(_described, hop.results)),
            len(hop.bumped),
            hop.thread,
            hop.node.partition("#")[0],
            hop.made_node.partition("#")[0],
            id(hop.stack),
            hop.error,
            tuple((_kind(child), child.alike) for child in hop.children),
        )
        hop.kind = hash(described) or 1
    return hop.kind


def _described(value: Any) -> Any:
    if isinstance(value, RawTensor):
        return value.dtype, value.shape, value.strides, value.device, value.keys, value.subclass
    if isinstance(value, list):
        return tuple(map(_described, value))
    return type(value) if isinstance(value, (int, float, complex)) else value


def fact_of(tensor: RawTensor) -> TensorFact:
    """A captured tensor as a trace shows it."""
    return TensorFact(
        label=tensor.label,
        dtype=dtype_name(tensor.dtype),
        shape=_sizes(tensor.shape),
        device=str(tensor.device),
        keys=key_sets.key_names(tensor.keys),
        strides=_sizes(tensor.strides),
        storage=tensor.storage,
        version=tensor.version,
        pinned=tensor.pinned,
        subclass=tensor.subclass,
    )


def text_of(value: Any) -> str:
    """Text of a captured value without tensors, at most 60 characters."""
    text = _plain(value)
    return text if len(text) <= _REPR_LIMIT else text[: _REPR_LIMIT - 1] + "…"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value) if isinstance(value, _Text) or type(value) in _TORCH_VALUES else repr(value)


def raw_tensors_in(value: Any) -> list[RawTensor]:
    """The captured tensors of a captured argument: itself, those of a list, or none."""
    if isinstance(value, RawTensor):
        return [value]
    return [item for item in value if isinstance(item, RawTensor)] if isinstance(value, list) else []


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return ()


def _sizes(sizes: Iterable[Any]) -> tuple[int | str, ...]:
    return tuple(size if type(size) is int else str(size) for size in sizes)


def _node_name(node: Any) -> str:
    name, number = dispatcher.node_name(node), dispatcher.sequence_number(node)
    return name if number > _LARGEST_SEQUENCE_NUMBER else f"{name}#{number}"


def _made_node(outputs: tuple[Any, ...], given: Sequence[torch.Tensor], written: Iterable[torch.Tensor]) -> str:
    """The node that an output has and no argument has, or that the history of a written argument ends with.

    The history of a view is its base's: reading the ``grad_fn`` of a view that was written to runs operators.
    """
    views = {id(tensor): base for tensor in given if (base := _base(tensor)) is not None}
    nodes = [_node(views.get(id(tensor), tensor)) for tensor in written]
    tensors = [tensor for output in outputs for tensor in _tensors_in(output) if id(tensor) not in views]
    if any(map(_requires_grad, tensors)):
        before = {_node(tensor) for tensor in given if id(tensor) not in views}
        nodes += [node for tensor in tensors if (node := _node(tensor)) not in before]
    return next((_node_name(node) for node in nodes if node is not None), "")


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return _counter(tensor)
    except RuntimeError:  # an inference tensor has no counter
        return None

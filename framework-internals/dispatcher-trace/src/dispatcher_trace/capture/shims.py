"""Shims: Python functions that replace the kernels of the dispatch tables, record the hop and call the kernel.

The table gives the current kernel of (operator, key). A wrapper that is registered under the same (operator, key)
replaces it and gets the exact key set of the hop; ``call_boxed`` runs the kernel as the dispatcher would. Removing the
registrations restores the tables.

All operators are shimmed at once. To find out which operators a callable uses would need a dry run, which changes
random state, parameters and caches; and the second run might use others. A registration costs about 18 µs (NOTES.md).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import torch

from dispatcher_trace.capture import dispatcher, wrapped_numbers
from dispatcher_trace.capture.key_sets import Scope, watched_keys
from dispatcher_trace.capture.native_step import Stepper
from dispatcher_trace.capture.python_kernels import (
    Cell,
    PythonKernel,
    python_kernels,
    registrations_watched,
    shims_are_invisible,
)
from dispatcher_trace.capture.recorder import RawHop, Recorder

# torch.Tensor's constructors of subclasses need a new view that Python has not seen, and a shim shows every result to
# Python. So the shims of the operators that they call are suspended while they run.
_CONSTRUCTORS: dict[str, Sequence[str]] = {
    "_make_subclass": ("aten::detach",),
    "as_subclass": ("aten::alias",),
    "__new__": (  # without a subclass's own: MyTensor(2, 3), MyTensor([1, 2]), of an array, a tensor, a storage
        *("aten::empty.memory_format", "aten::alias", "aten::lift_fresh", "aten::to.device", "aten::to.dtype_layout"),
        *("aten::_to_copy", "aten::empty_strided", "aten::copy_", "aten::set_.source_Storage", "aten::detach_"),
    ),
}
# The new view is an argument of these if it gets a tangent.
_TANGENT_CHECKS = ("aten::is_same_size", "aten::_has_same_storage_numel")
_MAX_RETIRED = 1_000  # a few seconds of a program that does nothing but make parameters

_active = threading.Lock()
_changing = threading.RLock()  # held while shims leave the tables and come back
# Held while a kernel runs that holds a lock of torch's and calls operators meanwhile: autocast's holds that of the
# cache of casts, a random one that of its generator. A second thread that reached such a kernel would wait for torch's
# lock and keep the interpreter lock, which the first one needs to enter a shim: a deadlock.
_holding_torchs_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # the thread that holds one of them is not in the child
    for _lock in (_changing, _holding_torchs_lock):
        os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]
_FRAMES = 200  # of Python, more than the shims add to the stack of a call


class Shims:
    """The shims of one installation; :func:`installed` makes and removes them.

    Attributes:
        recorder: Where hops go; None while nothing is recorded.
        stepper: Steps through CPU kernels; None unless a recording asks for it.
        tables: Dispatch table of every operator before the installation.
        scope: Which keys are watched.
        count: Number of shimmed (operator, key) pairs.
    """

    def __init__(self, scope: Scope) -> None:
        dispatcher.require_apis()
        self.scope = scope
        self.recorder: Recorder | None = None
        self.stepper: Stepper | None = None
        self._stepped: RawHop | None = None
        self.tables: dict[str, dispatcher.Table] = {}
        self.count = 0
        self._watched = watched_keys(scope)
        self._libraries: dict[str, Any] = {}  # one for each operator
        self._wrappers: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        self._python: dict[Cell, PythonKernel] = {}
        self._in_second_map: dict[Cell, Callable[..., Any]] = {}
        self._only: frozenset[str] | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._retired: deque[list[Any]] = deque(maxlen=_MAX_RETIRED)

    def install(self, only: Iterable[str] | None = None) -> None:
        """Register the shims.

        Args:
            only: The operators to shim; all by default.
        """
        self._only = None if only is None else frozenset(only)
        self._shim(dispatcher.operators() if self._only is None else self._only)
        _list_overridable_functions()
        self.count = sum(map(len, self._wrappers.values()))
        for name, called in _CONSTRUCTORS.items():
            if not self._wrappers.keys().isdisjoint(called):
                self._replace(torch.Tensor, name, self._constructor(name, called))
        self._replace(torch.utils, "weakref", SimpleNamespace(getweakrefs=self._other_references))
        self._replace(torch, "clear_autocast_cache", _alone(torch.clear_autocast_cache))
        wrapped_numbers.watch_conversions()

    def remove(self) -> None:
        """Remove the shims, which restores the tables."""
        wrapped_numbers.stop_watching()
        for owner, name, before, ours in reversed(self._replaced):
            if vars(owner).get(name) is not ours:  # the traced code has put something in its place
                continue
            setattr(owner, name, before) if before is not None else delattr(owner, name)
        self._replaced.clear()
        others = threading.active_count() - 1
        with _changing:
            operators = list(self._libraries)
            kept = self._kernels(operators) if others else []
            self._unshim(operators)
        if kept:
            time.sleep(2 * others * sys.getswitchinterval())  # each other thread gets the interpreter lock meanwhile

    def _replace(self, owner: Any, name: str, ours: Any) -> None:
        """Replace an attribute of torch until the removal. The program may have replaced it before, or may later."""
        self._replaced.append((owner, name, vars(owner).get(name), ours))
        setattr(owner, name, ours)

    @contextmanager
    def without(self, operators: Iterable[str]) -> Iterator[None]:
        """A block that changes kernels of these operators: their shims are removed before, and made anew after it."""
        operators = [name for name in operators if self._only is None or name in self._only]
        with _changing:
            taken = [operator for operator in operators if operator in self._libraries]
            self._retired.append(self._kernels(taken))
            with _quiet():
                self._unshim(taken)
            try:
                yield
            finally:
                with _quiet():
                    self._shim(operator for operator in operators if dispatcher.defined(operator))

    def _shim(self, operators: Iterable[str]) -> None:
        """Make the shims of operators and register them."""
        pending: dict[Cell, Any] = {}
        operators = [operator for operator in operators if operator not in WAIT_FOR_THREADS]
        # Get every kernel before registering any: a new CPU registration changes the kernel of a composite operator at
        # AutogradCPU.
        for operator in operators:
            self.tables[operator] = table = dispatcher.table(operator)
            for key, registration in table.items():
                if key in self._watched and not registration.fallthrough:
                    pending[operator, key] = dispatcher.kernel_of(operator, key)
        python = self._take_python_kernels(pending)
        wrappers: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        for (operator, key), kernel in pending.items():
            wrappers.setdefault(operator, []).append((key, self._wrap(operator, key, kernel.call_boxed)))
        for cell, known in python.items():
            self._in_second_map[cell] = self._for_second_map(cell, known)
        self._python |= python
        self._wrappers |= wrappers
        for operator in wrappers:
            self._register(operator)

    def _other_references(self, tensor: torch.Tensor) -> list[Any]:
        """The weak references to a tensor without the recorder's: torch refuses to swap tensors that have some."""
        if self.recorder is not None:
            self.recorder.forget(tensor)
        return weakref.getweakrefs(tensor)

    def added(self, operator: str, key: str) -> bool:
        """Whether an operator has a kernel at the very key because of a shim alone."""
        before = self.tables.get(operator, {}).get(key)
        if before is None or before.kind == "kernel" or operator not in self._wrappers:
            return False
        return dispatcher.table(operator)[key].file == dispatcher.NO_FILE

    def _unshim(self, operators: Sequence[str]) -> None:
        for operator in operators:
            self._libraries.pop(operator).reset()
            del self._wrappers[operator]
        taken = set(operators)
        for cell in [cell for cell in self._python if cell[0] in taken]:
            python = self._python.pop(cell)
            del self._in_second_map[cell]
            _leave_in_second_map(cell, python.function, with_keyset=python.with_keyset)

    def _take_python_kernels(self, pending: dict[Cell, Any]) -> dict[Cell, PythonKernel]:
        """The Python kernels that get shims. The cells of those that cannot be registered again leave ``pending``."""
        cells = [(operator, key) for operator, key in pending if self.tables[operator][key].python]
        of_users = {cell: pending[cell] for cell in cells if not self.tables[cell[0]][cell[1]].torchs_own}
        known = python_kernels(of_users, self._unrecorded)
        for operator, key in cells:
            if (operator, key) not in known:
                del pending[operator, key]
                table = self.tables[operator]
                self.tables[operator] = {**table, key: replace(table[key], unwatched=True)}
        return known

    def _register(self, operator: str) -> None:
        namespace, _, name = operator.partition("::")
        library = self._libraries[operator] = dispatcher.registrar(namespace)
        for key, wrapper in self._wrappers[operator]:
            library.impl(name, key, wrapper, True)
            if self.tables[operator][key].kind == "kernel":
                _has_warned.set()
            if (operator, key) in self._in_second_map:
                _leave_in_second_map((operator, key), self._in_second_map[operator, key], with_keyset=True)

    def _kernels(self, operators: Iterable[str]) -> list[Any]:
        """What keeps the shims of operators alive after they are removed.

        A thread that enters a shim waits for the interpreter lock inside of torch's kernel, to which it has no
        reference.
        """
        kernels: list[Any] = []
        for operator in operators:
            try:
                kernels += [dispatcher.kernel_of(operator, key) for key, _ in self._wrappers[operator]]
            except RuntimeError:  # the library that defined it is gone
                continue
        return kernels

    def _for_second_map(self, cell: Cell, python: PythonKernel) -> Callable[..., Any]:
        """What torch calls instead of a Python kernel, or of its shim, while a Python mode is active.

        It gets the key set in place of a shim.
        """
        shim = self._wrap(*cell, python.run, numbers=False)

        def called(*args: Any, **kwargs: Any) -> Any:
            for_shim = bool(args) and type(args[0]) is torch._C.DispatchKeySet
            return shim(*args, **kwargs) if for_shim else python.function(*args, **kwargs)

        dispatcher.hide_from_compiler(called)
        return called

    def _wrap(self, operator: str, key: str, run: Callable[..., Any], *, numbers: bool = True) -> Callable[..., Any]:
        """The shim of (operator, key): record the hop, run the kernel, record how it ended.

        Python gets wrapped numbers as plain ones, in arguments and in results. The shim wraps them again.

        Args:
            operator: The operator.
            key: The key.
            run: Runs the kernel with a key set and arguments.
            numbers: Whether the kernel needs wrapped numbers: a Python function that is called itself does not.
        """
        signature, table = _Signature(operator), self.tables[operator]
        steppable = _steppable(operator, key, table[key])
        if key == "CPU" and operator in _CALL_FROM_WORKERS:
            run = _on_one_thread(run)
        if not table[key].python and (key.startswith("Autocast") or (key in _RANDOM_AT and signature.takes_generator)):
            run = _alone(run)

        def shim(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            for value in args if numbers else ():
                if type(value) in _NUMBERS:
                    args = _with_tensors(args, signature.tensor_positions)
                    break
            recorder = self.recorder
            if recorder is None or recorder.local.busy:
                result = run(keyset, *args, **kwargs)
                if numbers and type(result) in _NUMBERS and signature.returns_tensor:
                    result = _as_tensor(result)
                return result
            hop = recorder.enter(operator, key, keyset, table, signature.names, args, kwargs)
            result = None
            error = ""  # as text: an exception in a variable of its own traceback would keep every tensor of the frames
            try:
                free = self.stepper is not None and self._stepped is None
                if steppable and free and recorder.first_of_its_kind(hop):
                    result = self._stepping(hop, lambda: run(keyset, *args, **kwargs))
                else:
                    result = run(keyset, *args, **kwargs)
                if numbers and type(result) in _NUMBERS and signature.returns_tensor:
                    result = _as_tensor(result)
            except BaseException as raised:
                error = recorder.text_of_error(raised)
                raise
            finally:
                recorder.local.open = hop.parent
                recorder.leave(hop, result, error)
                if self._stepped is not None and hop.parent is self._stepped and self.stepper is not None:
                    self.stepper.resume()  # control returns to the stepped kernel
            return result

        # Between graph breaks Dynamo compiles every Python frame; it must not compile the tracer's.
        dispatcher.hide_from_compiler(shim)
        return shim

    def _stepping(self, hop: RawHop, call: Callable[[], Any]) -> Any:
        """Make the call and step through its kernel; operators that the kernel calls run at full speed."""
        assert self.stepper is not None
        self._stepped = hop
        try:
            result, hop.native_step = self.stepper.step(call)
        finally:
            self._stepped = None
        return result

    @contextmanager
    def _suspended(self, *operators: str) -> Iterator[None]:
        """Remove the shims of these operators for the duration of the block."""
        with _changing:
            taken = [operator for operator in operators if operator in self._libraries]
            self._retired.append(self._kernels(taken))
            for operator in taken:
                self._libraries.pop(operator).reset()
            try:
                with dispatcher.own_work():
                    yield
            finally:
                with _quiet():
                    for operator in taken:
                        self._register(operator)

    def _constructor(self, name: str, called: Sequence[str]) -> Any:
        original = getattr(torch.Tensor, name)
        shown = called[0] if len(called) == 1 else f"{called[0]} and others"

        def construct(*args: Any, **kwargs: Any) -> Any:  # Dynamo allows no other signature
            removed = not self._replaced  # what the program put in its place calls it still
            if removed or (name == "__new__" and args[0] is torch.Tensor):  # which Python may have seen
                return original(*args, **kwargs)
            recorder = self.recorder
            if recorder is not None and not recorder.local.busy:
                recorder.unrecorded[shown] = recorder.unrecorded.get(shown, 0) + 1
            with self._suspended(*called, *(_TANGENT_CHECKS if wrapped_numbers.forward_mode() else ())):
                return original(*args, **kwargs)

        dispatcher.hide_from_compiler(construct)
        return construct if name == "as_subclass" else staticmethod(construct)

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """A block whose operators are the tracer's own and are not recorded."""
        recorder = self.recorder
        if recorder is None or recorder.local.busy:
            yield
            return
        local = recorder.local
        try:
            local.busy = True
            yield
        finally:
            local.busy = False


def _with_tensors(args: tuple[Any, ...], positions: frozenset[int]) -> tuple[Any, ...]:
    """The arguments, with tensors instead of numbers where the schema says Tensor."""
    numbers = [index for index, value in enumerate(args) if index in positions and type(value) in _NUMBERS]
    tensors = list(args)
    for index, tensor in zip(numbers, wrapped_numbers.tensors_of([args[index] for index in numbers]), strict=True):
        tensors[index] = args[index] if tensor is None else tensor
    return tuple(tensors)


def _as_tensor(result: wrapped_numbers.Number) -> Any:
    """The tensor of a kernel's result that Python got as a number."""
    return _with_tensors((result,), frozenset({0}))[0]


def _steppable(operator: str, key: str, registration: dispatcher.Registration) -> bool:
    """Whether the kernel itself computes on a CPU, instead of calling other operators."""
    on_cpu = key.endswith("CPU") and not key.startswith(("Autograd", "Autocast"))
    computes = operator.partition(".")[0] not in _ALLOCATE_OR_VIEW
    return on_cpu and computes and (registration.kind == "kernel" or operator == "aten::copy_")


# Kernels that call operators from the worker threads of a parallel region. A shim there would wait for the interpreter
# lock, which the thread that entered the kernel keeps until the region ends: a deadlock. So these kernels run on one
# thread. Their regions are split by sample or head, so one thread computes the same bits.
_CALL_FROM_WORKERS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose2d.out",
    }
)


def _on_one_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    def on_one_thread(*args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return on_one_thread


# Kernels that wait for threads which call operators themselves (gloo's): a shim would keep the interpreter lock from
# them.
WAIT_FOR_THREADS = frozenset({"_c10d_functional::wait_tensor", "_dtensor::shard_dim_alltoall"})
_RANDOM_AT = frozenset({"CPU", "CUDA", "Meta"})  # where a kernel may hold the lock of a generator


def _alone(run: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        with _holding_torchs_lock:
            return run(*args, **kwargs)

    return alone


_ALLOCATE_OR_VIEW = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_", "set_")
)

_PLAIN_NUMBERS = frozenset({int, float, bool, complex})
_NUMBERS = _PLAIN_NUMBERS.union(wrapped_numbers.SYMBOLS)
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")


class _Signature:
    """The part of an operator's schema that a shim needs, read when it is first needed."""

    def __init__(self, operator: str) -> None:
        self._operator = operator

    @cached_property
    def _schema(self) -> Any:
        return dispatcher.schema(self._operator)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self._schema.arguments)

    @cached_property
    def tensor_positions(self) -> frozenset[int]:
        arguments = enumerate(self._schema.arguments)
        return frozenset(index for index, argument in arguments if str(argument.type) in _TENSOR_TYPES)

    @cached_property
    def takes_generator(self) -> bool:
        return "Generator" in str(self._schema)

    @cached_property
    def returns_tensor(self) -> bool:
        returns = self._schema.returns
        return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _leave_in_second_map(cell: Cell, function: Callable[..., Any], *, with_keyset: bool) -> None:
    """Change what torch calls in place of a cell's Python kernel under a Python mode, and nothing else."""
    operator, key = cell
    namespace, _, name = operator.partition("::")
    library = dispatcher.registrar(namespace)
    library.impl(name, key, function, with_keyset)
    library.reset()  # takes the function out of the table, and leaves it in the map


@cache
def _list_overridable_functions() -> None:
    """Let torch.overrides fill its lists, which it keeps, from torch's own functions and not from the tracer's."""
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)
    torch.overrides.get_testing_overrides()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back torch's warning about the first kernel of the process that is overridden: that is a shim's purpose.

    Only the first time by a filter: after a change of the filters Python repeats the warnings that it gave once.
    """
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(False)
    try:
        if _has_warned.is_set():
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
            )
            yield
    finally:
        torch.set_warn_always(always)


_has_warned = threading.Event()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals with a Python handler (Ctrl-C, a timeout) wait: half a removal would leave shims in the process."""
    received: list[int] = []
    handlers = wrapped_numbers.python_handlers()
    for number in handlers:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _raise_again(list(dict.fromkeys(received)))


def _raise_again(signals: Sequence[int]) -> None:
    """Let the handler of each signal run, also after one that raises."""
    if signals:
        try:
            signal.raise_signal(signals[0])
        finally:
            _raise_again(signals[1:])


@contextmanager
def _deeper_stack() -> Iterator[None]:
    """A block in which code that nearly reaches the limit of recursion has room for the shims."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _FRAMES)
    try:
        yield
    finally:
        if sys.getrecursionlimit() == limit + _FRAMES:
            sys.setrecursionlimit(limit)


@contextmanager
def _not_collected() -> Iterator[None]:
    """A block whose new objects stay alive, tens of thousands, so that a collection would find nothing.

    They are moved to the oldest generation: three collections of the traced code would visit them all before they got
    there, 50 µs a hop at the start.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
    finally:
        if collecting:
            gc.enable()


@contextmanager
def installed(scope: Scope = "all", *, only: Iterable[str] | None = None) -> Iterator[Shims]:
    """Install the shims, and remove them when the block ends, also when it raises.

    Args:
        scope: Which keys to watch; see :func:`dispatcher_trace.capture.key_sets.watched_keys`.
        only: Operators to shim; all by default.

    Raises:
        RuntimeError: If shims are installed already, here or on another thread: the tables belong to the process.
    """
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "a trace is active already; dispatch tables belong to the whole process, so leave that block first (also "
            "when it runs on another thread)"
        )
    try:
        shims = Shims(scope)
        try:
            with _not_collected(), _quiet():
                shims.install(only)
            with (
                _deeper_stack(),
                shims_are_invisible(shims.added),
                registrations_watched(shims.without),
                wrapped_numbers.signals_between_conversions(),
            ):
                yield shims
        finally:
            with _uninterrupted(), _quiet():
                shims.remove()
    finally:
        _active.release()

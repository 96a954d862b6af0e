"""Shims: each kernel of the dispatch tables wrapped by a Python function that notes the hop and calls it.

``torch.library.get_kernel`` gives the kernel that a table holds now; registering a wrapper under the same (operator,
key) puts it in that kernel's place, and is handed the exact key set of the hop; ``call_boxed`` runs the kernel as the
dispatcher would have. Taking the registrations back restores the tables.

All operators are shimmed at once: finding out first which a callable uses would need a dry run, which changes random
state, parameters and caches, and a walk would miss what the second run does differently. The registrations cost about
18 µs each (NOTES.md), and a complete set is the only one that can miss nothing.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dispatcher_trace.capture import dispatcher
from dispatcher_trace.capture.native_step import Stepper
from dispatcher_trace.capture.recorder import RawHop, Recorder
from dispatcher_trace.capture.scope import Scope, watched_keys

# torch.Tensor's constructors of subclasses take a fresh view that Python must not have seen before; a shim shows every
# result to Python. So the shims of what they call stand aside while they run, as those of the operator that makes
# wrapped numbers do.
_CONSTRUCTORS = {"_make_subclass": "aten::detach", "as_subclass": "aten::alias"}
_SUSPENDABLE = frozenset({*_CONSTRUCTORS.values(), *dispatcher.WRAPPING_OPERATORS})

_NUMBER_UNDER_GRAD = (
    "dispatcher_trace cannot follow {operator} with the number {value} under torch.func.grad or jvp: no tensor takes "
    "its place exactly. Write the number as a tensor of the operand's dtype."
)

_active = threading.Lock()


class Shims:
    """The shims of one installation; :func:`installed` makes them and takes them back.

    Attributes:
        recorder: where hops go; None while nothing is recorded.
        stepper: steps through CPU kernels while a recording asks for it; else None.
        tables: the dispatch table of every operator as it was before.
        scope: which keys are watched.
        count: how many (operator, key) pairs are shimmed.
        number_labels: the text of each wrapped number, by ``id``.
    """

    def __init__(self, scope: Scope) -> None:
        dispatcher.require_apis()
        self.scope = scope
        self.recorder: Recorder | None = None
        self.stepper: Stepper | None = None
        self._stepped: RawHop | None = None
        self.tables: dict[str, dispatcher.Table] = {}
        self.count = 0
        self._libraries: dict[str, Any] = {}
        self._wrappers: dict[str, list[tuple[str, Callable[..., Any]]]] = {}
        # By type and text, as 1, 1.0 and True are equal; a symbol by its node, which its tensor keeps alive.
        self._numbers: dict[int | tuple[type, str], torch.Tensor] = {}
        self._plain_numbers: dict[tuple[type, str, torch.dtype], torch.Tensor] = {}
        self.number_labels: dict[int, str] = {}
        self._suspending = threading.RLock()

    def install(self, only: Iterable[str] | None = None) -> None:
        """Put the shims in.

        Args:
            only: the operators; by default all there are.
        """
        watched = watched_keys(self.scope)
        pending = []
        # Fetch every kernel before registering any: a new CPU registration changes what a composite operator resolves
        # to at AutogradCPU.
        for operator in dispatcher.operators() if only is None else only:
            self.tables[operator] = table = dispatcher.table(operator)
            for key, registration in table.items():
                if key in watched and not registration.fallthrough and not registration.torch_python:
                    pending.append((operator, key, dispatcher.kernel_of(operator, key)))
        for operator, key, kernel in pending:
            self._wrappers.setdefault(operator, []).append((key, self._wrap(operator, key, kernel)))
        self.count = len(pending)
        for operator in self._wrappers:
            self._register(operator)
        for name, operator in _CONSTRUCTORS.items():
            if operator in self._wrappers:
                setattr(torch.Tensor, name, self._constructor(name, operator))

    def remove(self) -> None:
        """Take the shims out: the tables hold what they held before."""
        for name in _CONSTRUCTORS:
            if name in vars(torch.Tensor):
                delattr(torch.Tensor, name)
        for library in self._libraries.values():
            library.reset()
        self._libraries.clear()
        self._wrappers.clear()

    def _register(self, operator: str) -> None:
        namespace, _, name = operator.partition("::")
        own = operator if operator in _SUSPENDABLE else namespace
        if own not in self._libraries:
            self._libraries[own] = dispatcher.registrar(namespace)
        for key, wrapper in self._wrappers[operator]:
            self._libraries[own].impl(name, key, wrapper, True)

    def _wrap(self, operator: str, key: str, kernel: Any) -> Callable[..., Any]:
        """The function that stands at (operator, key): note the hop, run the kernel, note how it ended.

        Python is handed a wrapped number as a plain one, in arguments and in results; it goes on as it came.
        """
        run = kernel.call_boxed
        facts = _Signature(operator)
        steppable = _steppable(operator, key, self.tables[operator][key])
        if key == "CPU" and operator in _CALL_FROM_WORKERS:
            run = _on_one_thread(run)

        def shim(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if any(type(value) in _NUMBERS for value in args):
                args = self._with_numbers(operator, key, args, facts.tensor_positions)
            recorder = self.recorder
            if (
                recorder is None
                or recorder.busy
                or (key == "ADInplaceOrView" and recorder.is_artefact(key, args, kwargs))
            ):
                result = run(keyset, *args, **kwargs)
                return self._wrapped(result) if type(result) in _NUMBERS and facts.returns_tensor else result
            hop = recorder.enter(operator, key, keyset, facts.names, args, kwargs)
            result = None
            error: BaseException | None = None
            try:
                free = self.stepper is not None and self._stepped is None
                if steppable and free and recorder.first_of_its_kind(hop):
                    result = self._stepping(hop, lambda: run(keyset, *args, **kwargs))
                else:
                    result = run(keyset, *args, **kwargs)
                if type(result) in _NUMBERS and facts.returns_tensor:
                    result = self._wrapped(result)
            except BaseException as raised:
                error = raised
                raise
            finally:
                recorder.leave(hop, result, args, kwargs, error)
                if self._stepped is not None and hop.parent is self._stepped and self.stepper is not None:
                    self.stepper.resume()  # control is about to go back to the kernel
            return result

        # Between graph breaks Dynamo compiles every Python frame there is; the tracer's are none of the user's.
        dispatcher.hide_from_compiler(shim)
        return shim

    def _stepping(self, hop: RawHop, call: Callable[[], Any]) -> Any:
        """Make the call, stepping through its kernel; what that calls in turn runs at full speed."""
        assert self.stepper is not None
        self._stepped = hop
        try:
            result, hop.native_step = self.stepper.step(call)
        finally:
            self._stepped = None
        return result

    @contextmanager
    def _suspended(self, *operators: str) -> Iterator[None]:
        """Take the shims of these operators out for the length of the block."""
        with self._suspending:
            taken = [operator for operator in operators if operator in self._libraries]
            for operator in taken:
                self._libraries.pop(operator).reset()
            try:
                with dispatcher.own_work():
                    yield
            finally:
                with _quiet():
                    for operator in taken:
                        self._register(operator)

    def _constructor(self, name: str, operator: str) -> Any:
        original = dispatcher.tensor_constructor(name)

        def construct(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder
            if recorder is not None and not recorder.busy:
                recorder.unrecorded[operator] = recorder.unrecorded.get(operator, 0) + 1
            with self._suspended(operator):
                return original(*args, **kwargs)

        return staticmethod(construct) if name == "_make_subclass" else construct

    def _with_numbers(
        self, operator: str, key: str, args: tuple[Any, ...], positions: frozenset[int]
    ) -> tuple[Any, ...]:
        """The arguments with tensors in place of the numbers that stand where the schema says Tensor."""
        make = self._wrapped
        if key == "FuncTorchDynamicLayerFrontMode" and dispatcher.differentiating():
            # What comes next wraps the number in a tensor of functorch's that keeps the mark of a wrapped number;
            # torch, about to hand that to the next shim as a plain number, would find no number in it.
            operands = [value for value in args if isinstance(value, torch.Tensor)]

            def make(value: dispatcher.Number) -> torch.Tensor:
                return self._plain(operator, value, operands)

        return tuple(
            make(value) if index in positions and type(value) in _NUMBERS else value for index, value in enumerate(args)
        )

    def _plain(self, operator: str, value: dispatcher.Number, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        number = None
        if not isinstance(value, dispatcher.SYMBOLS):  # a plain tensor has a value
            with self._unrecorded():
                number = dispatcher.plain_number(value, self._wrapped(value), operands)
        if number is None:
            raise RuntimeError(_NUMBER_UNDER_GRAD.format(operator=operator, value=value))
        known = self._plain_numbers.setdefault((type(value), repr(value), number.dtype), number)
        self.number_labels[id(known)] = repr(value)
        return known

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Operators in the block are the tracer's own."""
        recorder = self.recorder
        if recorder is None or recorder.busy:
            yield
            return
        recorder.busy = True
        try:
            yield
        finally:
            recorder.busy = False

    def _wrapped(self, value: dispatcher.Number) -> torch.Tensor:
        """The wrapped number that Python unwrapped, made once for each value."""
        known = id(value.node) if isinstance(value, dispatcher.SYMBOLS) else (type(value), repr(value))
        if known not in self._numbers:
            with self._unrecorded(), self._suspended(*dispatcher.WRAPPING_OPERATORS):
                number = (
                    dispatcher.wrapped_symbol(value)
                    if isinstance(value, dispatcher.SYMBOLS)
                    else dispatcher.wrapped_number(value)
                )
            self.number_labels[id(number)] = repr(value)
            self._numbers[known] = number
        return self._numbers[known]


def _steppable(operator: str, key: str, registration: dispatcher.Registration) -> bool:
    """Whether the kernel is one that computes on a CPU, rather than one that calls other operators to do it."""
    on_cpu = key.endswith("CPU") and not key.startswith(("Autograd", "Autocast"))
    computes = operator.partition(".")[0] not in _ALLOCATE_OR_VIEW
    return on_cpu and computes and (registration.kind == "kernel" or operator == "aten::copy_")


# Kernels that call operators from the worker threads of a parallel region. There a shim waits for the interpreter's
# lock, which the thread that entered the kernel holds until the region ends. Their regions go over whole samples or
# heads, so that one thread computes the same bits.
_CALL_FROM_WORKERS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose2d.out",
    }
)


def _on_one_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    def alone(*args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return alone


_ALLOCATE_OR_VIEW = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "as_strided", "view", "_reshape_alias", "resize_", "set_")
)

_NUMBERS = frozenset({int, float, bool, complex, *dispatcher.SYMBOLS})
_TENSOR_TYPES = ("Tensor", "Optional[Tensor]")


class _Signature:
    """What a shim needs of an operator's schema, looked up at its first call."""

    __slots__ = ("_operator", "_parsed")

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._parsed: tuple[tuple[str, ...], frozenset[int], bool] | None = None

    def _read(self) -> tuple[tuple[str, ...], frozenset[int], bool]:
        if self._parsed is None:
            schema = dispatcher.schema(self._operator)
            arguments = schema.arguments
            self._parsed = (
                tuple(argument.name for argument in arguments),
                frozenset(i for i, argument in enumerate(arguments) if str(argument.type) in _TENSOR_TYPES),
                len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor",
            )
        return self._parsed

    @property
    def names(self) -> tuple[str, ...]:
        return self._read()[0]

    @property
    def tensor_positions(self) -> frozenset[int]:
        return self._read()[1]

    @property
    def returns_tensor(self) -> bool:
        return self._read()[2]


@contextmanager
def _quiet() -> Iterator[None]:
    """Registering over a kernel is this package's purpose; torch warns of the first."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
        )
        yield


@contextmanager
def installed(scope: Scope = "all", *, only: Iterable[str] | None = None) -> Iterator[Shims]:
    """Install the shims, and take them out at the end of the block, however it ends.

    Args:
        scope: as :func:`dispatcher_trace.capture.scope.watched_keys` has it.
        only: shim these operators alone.

    Raises:
        RuntimeError: when shims are installed already, here or on another thread: the tables belong to the process.
    """
    if not _active.acquire(blocking=False):
        raise RuntimeError(
            "a trace is active already; dispatch tables belong to the whole process, so leave that block first "
            "(also when it runs on another thread)"
        )
    try:
        shims = Shims(scope)
        collecting = gc.isenabled()
        gc.disable()  # tens of thousands of new objects that live on: collections in between find nothing
        try:
            with _quiet():
                shims.install(only)
            if collecting:
                gc.enable()
            yield shims
        finally:
            shims.remove()
            if collecting:
                gc.enable()
    finally:
        _active.release()

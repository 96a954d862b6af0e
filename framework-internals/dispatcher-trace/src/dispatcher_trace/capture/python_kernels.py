"""The dispatcher as torch's Python code sees it: kernels that are Python functions, and answers that are remembered.

Torch keeps every Python kernel twice: in the dispatch table, and in a second map by operator and key. A kernel that is
reached while a Python mode is active, or with a tensor of a Python subclass, is not called itself: torch calls what the
second map has for its operator and key. To register a shim overwrites that entry, and to remove the shim does not bring
it back, so the tracer has to register the function again. Torch has no way to ask for it. Here the kernel is called
with made-up arguments under a profile function that ends the call where the first Python frame begins, before any of
its code runs.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from dispatcher_trace.capture import dispatcher, key_sets, wrapped_numbers


@dataclass(frozen=True)
class PythonKernel:
    """A Python function that is registered as a kernel.

    Attributes:
        function: What was registered.
        with_keyset: Whether it gets the key set as its first argument.
    """

    function: Callable[..., Any]
    with_keyset: bool

    def run(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the function as the dispatcher would."""
        return self.function(keyset, *args, **kwargs) if self.with_keyset else self.function(*args, **kwargs)


Cell = tuple[str, str]
"""Operator and key."""


@dataclass
class _Entry:
    """The first Python frame that a kernel entered: its code and local names, and what the kernel was called with."""

    code: CodeType
    names: dict[str, Any]
    given: list[Any]
    keywords: frozenset[str]


def python_kernels(
    kernels: Mapping[Cell, Any], unrecorded: Callable[[], AbstractContextManager[None]]
) -> dict[Cell, PythonKernel]:
    """The functions behind kernels that the dispatch tables show as registered from Python.

    A kernel is left out if it has an argument of a type that cannot be made up here, or if it is no Python function and
    no callable that leads to one (a builtin function, a partial).

    Args:
        kernels: The kernels of the cells.
        unrecorded: Makes a context in which calls of operators on its thread are not recorded.
    """
    if not kernels:
        return {}
    entries: dict[Cell, _Entry] = {}

    def enter_all() -> None:
        with unrecorded():
            for cell, kernel in kernels.items():
                entry = _first_frame(cell, kernel)
                if entry is not None:
                    entries[cell] = entry

    # A thread of its own has no mode, no transform, and no profiler of the user.
    thread = threading.Thread(target=enter_all, name="dispatcher_trace kernels")
    thread.start()
    thread.join()
    functions = _functions({entry.code for entry in entries.values()})
    known = {cell: _kernel_of(entry, functions.get(entry.code, [])) for cell, entry in entries.items()}
    return {cell: kernel for cell, kernel in known.items() if kernel is not None}


def _functions(codes: set[CodeType]) -> dict[CodeType, list[FunctionType]]:
    """All functions that run each code."""
    functions: dict[CodeType, list[FunctionType]] = {}

    def search() -> None:
        missing = codes - functions.keys()
        for holder in gc.get_referrers(*missing) if missing else ():
            if isinstance(holder, FunctionType):
                functions.setdefault(holder.__code__, []).append(holder)

    search()
    if codes - functions.keys() and gc.get_freeze_count():  # a search does not see frozen objects
        gc.unfreeze()
        search()
        gc.freeze()
    return functions


class _Entered(BaseException):
    """Ends a call where its first Python frame begins."""


def _first_frame(cell: Cell, kernel: Any) -> _Entry | None:
    operator, key = cell
    arguments = _made_up(operator)
    if arguments is None:
        return None
    args, kwargs = arguments
    keyset = key_sets.key_set(key_sets.bits_of(key))
    entered: list[tuple[CodeType, dict[str, Any]]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in wrapped_numbers.CONVERTING:
            entered.append((frame.f_code, dict(frame.f_locals)))
            raise _Entered

    call = kernel.call_boxed
    sys.setprofile(profile)
    try:
        call(keyset, *args, **kwargs)
    except _Entered:
        pass
    except Exception:  # no Python frame was entered: what is registered is no Python function
        return None
    finally:
        sys.setprofile(None)
    return _Entry(*entered[0], given=args, keywords=frozenset(kwargs)) if entered else None


_MADE_UP: dict[str, Callable[[], Any]] = {
    "TensorType": lambda: _made_up_tensor(),
    "IntType": lambda: 0,
    "SymIntType": lambda: 0,
    "FloatType": lambda: 0.0,
    "SymFloatType": lambda: 0.0,
    "BoolType": lambda: False,
    "SymBoolType": lambda: False,
    "ComplexType": lambda: 0j,
    "NumberType": lambda: 0,
    "StringType": lambda: "",
    "DeviceObjType": lambda: torch.device("cpu"),
    "ScalarTypeType": lambda: torch.float32,
    "LayoutType": lambda: torch.strided,
    "MemoryFormatType": lambda: torch.contiguous_format,
    "GeneratorType": lambda: torch.default_generator,
    "OptionalType": lambda: None,
    "DictType": dict,
}


_MARK = object()


def _made_up_tensor() -> torch.Tensor:
    """A tensor that Python code gets as :data:`_MARK`, which every function of a C++ extension refuses."""
    tensor = dispatcher.a_wrapped_number()
    assert tensor is not None
    vars(tensor)[wrapped_numbers.ASKED_FOR] = _MARK
    return tensor


def _made_up(operator: str) -> tuple[list[Any], dict[str, Any]] | None:
    """An argument for each parameter without a default; None if one has a type that cannot be made up."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in dispatcher.schema(operator).arguments:
        if argument.has_default_value():
            continue
        kind = argument.type.kind()
        if kind == "ListType":
            element = _MADE_UP.get(argument.type.getElementType().kind())
            value = [] if argument.N is None or element is None else [element() for _ in range(argument.N)]
        elif kind in _MADE_UP:
            value = _MADE_UP[kind]()
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _kernel_of(entry: _Entry, functions: Sequence[FunctionType]) -> PythonKernel | None:
    """The registered callable, whose function's frame the kernel entered; None if it cannot be told."""
    alike = [function for function in functions if _closes_over(function, entry.names)]
    got = positional = _positional(entry)
    owner: Any = None
    if got and type(got[0]) is not torch._C.DispatchKeySet and not _begins_with(got, entry.given):
        owner, *got = got  # a method, or an object that can be called
    with_keyset = bool(got) and type(got[0]) is torch._C.DispatchKeySet
    given = len(positional) - len(got) + with_keyset + len(entry.given)
    alike = [function for function in alike if _others_are_defaults(function, entry, given)]
    if not _begins_with(got[with_keyset:], entry.given) or len({id(function.__globals__) for function in alike}) != 1:
        return None
    function: Callable[..., Any] = alike[0]
    if len(got) < len(positional):
        is_called = getattr(type(owner).__call__, "__code__", None) is entry.code
        function = owner if is_called else types.MethodType(function, owner)
    return PythonKernel(function, with_keyset)


def _others_are_defaults(function: FunctionType, entry: _Entry, given: int) -> bool:
    """Whether the frame has the function's defaults where the kernel's call gave nothing: a partial gives more."""
    code = entry.code
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    with_default = zip(reversed(named[: code.co_argcount]), reversed(function.__defaults__ or ()), strict=False)
    defaults = {**dict(with_default), **(function.__kwdefaults__ or {})}
    others = [name for name in named[min(given, code.co_argcount) :] if name not in entry.keywords]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = entry.names[code.co_varnames[len(named) + bool(code.co_flags & inspect.CO_VARARGS)]]
        others += [name for name in rest if name not in entry.keywords]
    return all(name in defaults and entry.names[name] is defaults[name] for name in others)


def _closes_over(function: FunctionType, names: Mapping[str, Any]) -> bool:
    """Whether the function's closure has the values that the frame had."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if name in names and names[name] is not value:
            return False
    return True


def _positional(entry: _Entry) -> list[Any]:
    """The positional arguments that the frame got."""
    code = entry.code
    values = [entry.names[name] for name in code.co_varnames[: code.co_argcount] if name in entry.names]
    if code.co_flags & inspect.CO_VARARGS:
        values += entry.names[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
    return values


def _begins_with(values: Sequence[Any], given: Sequence[Any]) -> bool:
    pairs = list(zip(values, given, strict=False))
    return len(pairs) == len(given) and all(
        (value is _MARK) == isinstance(argument, torch.Tensor) for value, argument in pairs
    )


# -- questions about the tables, and what is remembered of the answers ------------------------------------------------


@contextmanager
def shims_are_invisible(added: Callable[[str, str], bool]) -> Iterator[None]:
    """A block in which torch's Python code learns of no shim, and after which it has forgotten what it learned.

    A shim is a kernel at the very key. Torch's Python dispatcher, ``register_fake`` and ``opcheck`` ask whether an
    operator has one there, and would take another way if it has.

    Args:
        added: Whether the kernel of an operator at a key is there because of a shim alone.
    """
    before, rules = _remembered(), _dynamo_rules()
    at_key = torch._C._dispatch_has_kernel_for_dispatch_key
    at_any_key = torch._C._dispatch_has_kernel_for_any_dispatch_key

    def has_kernel(operator: str, key: Any) -> bool:
        return at_key(operator, key) and not added(operator, key if isinstance(key, str) else key.name)

    def has_kernel_for_any(operator: str, keys: Any) -> bool:
        if not at_any_key(operator, keys):
            return False
        possible = [key for key in dispatcher.table(operator) if key_sets.known_key(key)]
        return any(keys.has(key_sets.key_member(key)) and has_kernel(operator, key) for key in possible)

    torch._C._dispatch_has_kernel_for_dispatch_key = has_kernel  # type: ignore[assignment]
    torch._C._dispatch_has_kernel_for_any_dispatch_key = has_kernel_for_any  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._C._dispatch_has_kernel_for_dispatch_key = at_key
        torch._C._dispatch_has_kernel_for_any_dispatch_key = at_any_key
        _forget_all_but(before)
        if _dynamo_rules() != rules:  # Dynamo's table of functions was made inside the block
            sys.modules["torch._dynamo.trace_rules"].clear_lru_cache()


def _remembered() -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Torch's caches that depend on the tables, each with a copy of what it holds."""
    caches = [operator._dispatch_cache for operator in torch._ops.get_cached_ops()]
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        caches.append(fake.FakeTensorMode.cache)
    return [(cache, dict(cache)) for cache in caches]


def _forget_all_but(before: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    copies = {id(cache): copy for cache, copy in before}
    for cache, _ in _remembered():
        copy = copies.get(id(cache), {})
        for key in [key for key, value in list(cache.items()) if copy.get(key) is not value]:
            cache.pop(key, None)  # another thread may have


def _dynamo_rules() -> Any:
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return None if rules is None else rules.get_torch_obj_rule_map.cache_info().currsize


# -- what the traced code registers ------------------------------------------------------------------------------------


@contextmanager
def registrations_watched(changing: Callable[[Iterable[str]], AbstractContextManager[None]]) -> Iterator[None]:
    """A block in which a ``torch.library.Library`` defines operators and adds and removes kernels within ``changing``.

    Args:
        changing: Makes the context from the names of the operators.
    """
    library: Any = torch.library.Library
    define, impl, destroy = library.define, library.impl, library._destroy

    def watched_define(self: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        with changing([_qualified(self, schema.partition("(")[0].strip())]):
            return define(self, schema, *args, **kwargs)

    def watched_impl(self: Any, op_name: Any, *args: Any, **kwargs: Any) -> None:
        with changing([_qualified(self, op_name if isinstance(op_name, str) else op_name.name())]):
            impl(self, op_name, *args, **kwargs)

    def watched_destroy(self: Any) -> None:
        with changing({"::".join(cell.split("/")[:2]) for cell in self._op_impls} | self._op_defs):
            destroy(self)

    library.define, library.impl, library._destroy = watched_define, watched_impl, watched_destroy
    try:
        yield
    finally:
        library.define, library.impl, library._destroy = define, impl, destroy


def _qualified(library: Any, name: str) -> str:
    return f"{library.ns}::{name.rpartition('::')[2]}"

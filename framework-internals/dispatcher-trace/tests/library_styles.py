"""Operators in each style of ``torch.library``, what can be done with them, and the state of torch behind them."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from dispatcher_trace.capture import dispatcher, key_sets

NAMESPACE = "dispatcher_trace_styles"
_numbers = itertools.count()


@dataclass(frozen=True)
class Operator:
    """One operator ``(Tensor x) -> Tensor`` that doubles.

    Attributes:
        name: ``namespace::name``.
        call: Calls it.
        keep: What must stay alive for it to exist.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    keep: Any


_Doubling = Callable[[Callable[..., Any]], Callable[[Tensor], Tensor]]


def _as_it_is(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return operator


def _in_place(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        copy = x.clone()
        operator(copy)
        return copy

    return call


def _added(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + operator(x)


def _second_result(operator: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: operator(x)[1]


def _library(
    register: Callable[[torch.library.Library, str], None],
    schema: str = "(Tensor x) -> Tensor",
    calling: _Doubling = _as_it_is,
) -> Callable[[], Operator]:
    """Makes an operator that is defined in a Library; ``register`` gets that and the operator's name."""

    def make() -> Operator:
        short = f"library_{next(_numbers)}"
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        library.define(short + schema)
        register(library, short)
        return Operator(f"{NAMESPACE}::{short}", calling(getattr(getattr(torch.ops, NAMESPACE), short)), library)

    return make


def _sum(x: Tensor) -> Tensor:
    return x + x


def _custom(
    decorate: Callable[..., Any],
    finish: Callable[[Any], None],
    body: Callable[[Tensor], Any] = _sum,
    calling: _Doubling = _as_it_is,
    **options: Any,
) -> Callable[[], Operator]:
    """Makes an operator from a function by a decorator; ``finish`` gets the operator."""

    def make() -> Operator:
        name = f"{NAMESPACE}::custom_{next(_numbers)}"
        operator = decorate(name, **{"mutates_args": (), **options})(body)
        finish(operator)
        return Operator(name, calling(operator), operator)

    return make


def _twice(x: Tensor) -> Tensor:
    return x * 2


def _double(x: Tensor) -> None:
    x.mul_(2)


def _itself_and_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), x * 2


def _writing(library: torch.library.Library, name: str) -> None:
    library.impl(name, _double, "CPU")
    library.impl(name, lambda x: None, "Meta")


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Callable:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def method(self, x: Tensor) -> Tensor:
        return x * 2


def _cpu_and_meta(library: torch.library.Library, name: str) -> None:
    library.impl(name, lambda x: x * 2, "CPU")
    library.impl(name, lambda x: torch.empty_like(x), "Meta")


def _below_autograd(keys: Any, x: Tensor) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return x * 2


def _autograd(library: torch.library.Library, name: str) -> None:
    _cpu_and_meta(library, name)
    library.impl(name, _below_autograd, "AutogradCPU", with_keyset=True)


def _explicit(library: torch.library.Library, name: str) -> None:
    library.impl(name, _twice, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _like, lib=library)


def _by_decorator(library: torch.library.Library, name: str) -> None:
    torch.library.impl(f"{NAMESPACE}::{name}", "cpu")(_twice)
    torch.library.register_fake(f"{NAMESPACE}::{name}")(_like)


def _every_registration(library: torch.library.Library, name: str) -> None:
    qualified = f"{NAMESPACE}::{name}"
    _cpu_and_meta(library, name)
    torch.library.register_autograd(qualified, lambda ctx, gradient: gradient * 2, lib=library)
    torch.library.register_autocast(qualified, "cpu", torch.bfloat16)
    torch.library.register_vmap(qualified, lambda info, dims, x: (x * 2, dims[0]), lib=library)


def _everything_custom(operator: Any) -> None:
    operator.register_fake(_like)
    operator.register_autograd(lambda ctx, gradient: gradient * 2)
    operator.register_vmap(lambda info, dims, x: (x * 2, dims[0]))
    operator.register_kernel("cpu")(lambda x: x * 2)
    operator.register_autocast("cpu", torch.bfloat16)


STYLES: dict[str, Callable[[], Operator]] = {
    "impl CPU, Meta": _library(_cpu_and_meta),
    "impl AutogradCPU": _library(_autograd),
    "impl of a method": _library(lambda library, name: library.impl(name, _Callable().method, "CPU")),
    "impl of an object": _library(lambda library, name: library.impl(name, _Callable(), "CPU")),
    "impl of a builtin": _library(lambda library, name: library.impl(name, torch.neg, "CPU")),
    "impl CompositeImplicitAutograd": _library(
        lambda library, name: library.impl(name, _twice, "CompositeImplicitAutograd")
    ),
    "impl CompositeExplicitAutograd, register_fake": _library(_explicit),
    "torch.library.impl, register_fake": _library(_by_decorator),
    "register_autograd, register_autocast, register_vmap": _library(_every_registration),
    "impl that writes": _library(_writing, "(Tensor(a!) x) -> ()", _in_place),
    "impl of a view": _library(
        lambda library, name: library.impl(name, lambda x: x.view(x.shape), "CompositeExplicitAutograd"),
        "(Tensor(a) x) -> Tensor(a)",
        _added,
    ),
    "custom_op": _custom(torch.library.custom_op, lambda operator: operator.register_fake(_like)),
    "custom_op of a device": _custom(
        torch.library.custom_op, lambda operator: operator.register_fake(_like), device_types="cpu"
    ),
    "custom_op with everything": _custom(torch.library.custom_op, _everything_custom),
    "custom_op that writes": _custom(
        torch.library.custom_op,
        lambda operator: operator.register_fake(lambda x: None),
        _double,
        _in_place,
        mutates_args=("x",),
    ),
    "custom_op of two results": _custom(
        torch.library.custom_op,
        lambda operator: operator.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x))),
        _itself_and_twice,
        _second_result,
    ),
    "triton_op": _custom(torch.library.triton_op, lambda operator: None),
}


class _PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _under(context: Callable[[], Any]) -> Callable[[Operator], Any]:
    def use(operator: Operator) -> Any:
        with context():
            return operator.call(torch.ones(3))

    return use


def _fake(operator: Operator) -> Any:
    with FakeTensorMode() as mode:
        result = operator.call(mode.from_tensor(torch.ones(3)))
        return type(result).__name__, tuple(result.shape)


def _backward(operator: Operator) -> Any:
    x = torch.ones(3, requires_grad=True)
    operator.call(x).sum().backward()
    return x.grad


def _fx(mode: str) -> Callable[[Operator], Any]:
    return lambda operator: make_fx(operator.call, tracing_mode=mode)(torch.ones(3)).code


def _compiled(backend: str) -> Callable[[Operator], Any]:
    def use(operator: Operator) -> Any:
        torch._dynamo.reset()
        return torch.compile(operator.call, backend=backend, fullgraph=True)(torch.ones(3))

    return use


def _checked(operator: Operator) -> Any:
    overload = getattr(getattr(torch.ops, NAMESPACE), operator.name.partition("::")[2]).default
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    return torch.library.opcheck(
        overload, (torch.ones(3, requires_grad=True),), test_utils=tests, raise_exception=False
    )


USES: dict[str, Callable[[Operator], Any]] = {
    "call": lambda operator: operator.call(torch.ones(3)),
    "backward": _backward,
    "fake tensor": _fake,
    "make_fx": _fx("real"),
    "make_fx, fake": _fx("fake"),
    "make_fx, symbolic": _fx("symbolic"),
    "dispatch mode": _under(_PassThrough),
    "inference mode": _under(torch.inference_mode),
    "autocast": _under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "vmap": lambda operator: torch.vmap(operator.call)(torch.ones(2, 3)),
    "functionalize": lambda operator: torch.func.functionalize(operator.call)(torch.ones(3)),
    "func.grad": lambda operator: torch.func.grad(lambda x: operator.call(x).sum())(torch.ones(3)),
    "func.jvp": lambda operator: torch.func.jvp(operator.call, (torch.ones(3),), (torch.ones(3),)),
    "compile": _compiled("aot_eager"),
    "compile, eager": _compiled("eager"),
    "opcheck": _checked,
}


def outcome(use: str, operator: Operator) -> str:
    """What a use gives, as text: its result, or its error, without addresses and the operator's number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            text = str(USES[use](operator))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return text.replace(operator.name.partition("::")[2], "operator").partition("0x")[0]


# -- the state of torch that a trace changes and restores -------------------------------------------------------------


class _Entered(BaseException):
    pass


def _second_map(operator: str, key: str) -> Any:
    """The code of what torch calls in place of a Python kernel under a mode; None if the kernel is none of Python's."""
    entered: list[Any] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code)
            raise _Entered

    kernel, keys = dispatcher.kernel_of(operator, key), key_sets.key_set(key_sets.bits_of(key))
    x = torch.empty(0)
    with _PassThrough():
        sys.setprofile(profile)
        try:
            kernel.call_boxed(keys, x)
        except _Entered:
            pass
        except Exception:  # noqa: S110 # no Python function
            pass
        finally:
            sys.setprofile(None)
    return entered[0] if entered else None


def state(names: list[str]) -> dict[str, Any]:
    """All that a trace must leave as it was, for these operators; the dispatch tables of all others too."""
    overloads = [getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default for name in names]
    python = [
        (name, key)
        for name in names
        for key, cell in dispatcher.table(name).items()
        if cell.python and key_sets.known_key(key)
    ]
    return {
        "tables": dispatcher.dumps(),
        "second map": {cell: _second_map(*cell) for cell in python},
        "py_kernels": [dict(overload.py_kernels) for overload in overloads],
        "_dispatch_cache": [dict(overload._dispatch_cache) for overload in overloads],
        "cached operators": {str(op): dict(op._dispatch_cache) for op in torch._ops.get_cached_ops()},
        "fake tensors": dict(FakeTensorMode.cache),
        "questions": (
            torch._C._dispatch_has_kernel_for_dispatch_key,
            torch._C._dispatch_has_kernel_for_any_dispatch_key,
        ),
        "torch.Tensor": dict(vars(torch.Tensor)),
        "torch.library": dict(vars(torch.library.Library)),
    }

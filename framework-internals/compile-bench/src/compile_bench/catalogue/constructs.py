"""Constructs of the language, and what the code itself asks for."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.cause import Repro, Theme

constructs = Theme("Constructs of Python")
requests = Theme("What the code asks for")
_VECTOR = (torch.ones(4),)
_PRINTED = r"Failed to trace builtin operator"


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    yield


def _sine_and_cosine(x: Tensor) -> Tensor:
    return x.sin().cos()


@constructs.cause(
    "break-in-loop",
    "any break inside a loop",
    pattern=_PRINTED,
    why="Dynamo cannot resume in the middle of a loop: the whole function runs eagerly, for good.",
    advice="Mend the inner break, or move the loop's body into a function of its own.",
)
def _in_loop() -> Repro:
    def broken(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin()
            print(end="")
        return x

    def fixed(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.sin()
        return x

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "break-in-try",
    "any break inside try",
    pattern=_PRINTED,
    why="Nor can it resume inside of a try block.",
    advice="Keep what breaks out of the block.",
)
def _in_try() -> Repro:
    def broken(x: Tensor) -> Tensor:
        try:
            x = x.sin()
            print(end="")
            return x.cos()
        finally:
            x = torch.empty(0)

    return Repro(broken, _sine_and_cosine, [_VECTOR])


@constructs.cause(
    "break-in-with",
    "any break inside a with block of one's own",
    pattern=_PRINTED,
    why="Nor inside of a context manager that it does not know.",
    advice="Mend the inner break, or make the block smaller.",
)
def _in_with() -> Repro:
    def broken(x: Tensor) -> Tensor:
        with _scope():
            x = x.sin()
            print(end="")
            return x.cos()

    def fixed(x: Tensor) -> Tensor:
        with _scope():
            return x.sin().cos()

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "code-executed",
    "exec() or __import__()",
    pattern=rf"{_PRINTED}|marked as skipped",
    code=r"\b(exec|__import__)\(",
    why="Code that does not exist yet cannot be traced.",
    advice="Define the function ahead of time.",
)
def _exec() -> Repro:
    def broken(x: Tensor) -> Tensor:
        names: dict[str, Any] = {}
        exec("def double(x):\n    return x * 2", names)
        return names["double"](x)

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "class-defined",
    "a class defined in the model",
    pattern=r"__build_class__|marked as skipped",
    code=r"\bclass\b",
    why="Making a class runs its metaclass.",
    advice="Define it at module level.",
)
def _class() -> Repro:
    def broken(x: Tensor) -> Tensor:
        class Pair:
            first = 2

        return x * Pair.first

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "dataclass-made",
    "a dataclass made by make_dataclass",
    pattern=r".",
    code=r"make_dataclass\(",
    why="make_dataclass executes source text.",
    advice="Define it at module level.",
)
def _dataclass() -> Repro:
    def broken(x: Tensor) -> Tensor:
        point = dataclasses.make_dataclass("point", ["value"])
        return x * point(2).value

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "globals-read",
    "globals()",
    pattern=_PRINTED,
    code=r"\bglobals\(",
    why="The dict of all globals cannot be guarded.",
    advice="Name the global.",
)
def _globals() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(globals()["_VECTOR"])

    def fixed(x: Tensor) -> Tensor:
        return x * len(_VECTOR)

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "cache-made",
    "functools.lru_cache() applied in the model",
    pattern=r"Unsupported method call|marked as skipped",
    code=r"lru_cache\(",
    why="A cache made in the call is a C object without a source. (Functions cached at module level are traced.)",
    advice="Decorate at module level.",
)
def _cache() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * functools.lru_cache(None)(lambda n: n)(2)

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "weak-dictionary",
    "a WeakValueDictionary",
    pattern=r"Unsupported method call|super\(\)",
    code=r"Weak|\[",
    why="Weak containers rely on callbacks in C.",
    advice="Keep the tensor in an attribute or return it.",
)
def _weak() -> Repro:
    kept: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()

    def broken(x: Tensor) -> Tensor:
        kept["x"] = x
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "module-copied",
    "copy.deepcopy() of a module or tensor",
    pattern=r"copy\.deepcopy|deepcopy",
    code=r"deepcopy\(",
    why="A copy inside of a graph would be a new parameter with every call.",
    advice="Copy in __init__; clone() a tensor.",
)
def _deepcopy() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return copy.deepcopy(x).sin()

    def fixed(x: Tensor) -> Tensor:
        return x.clone().sin()

    return Repro(broken, fixed, [_VECTOR])


@constructs.cause(
    "signature-read",
    "inspect.signature()",
    pattern=r"Observed exception|marked as skipped|Unsupported method call|id\(\) with",
    code=r"signature\(",
    why="Reflection over functions is not traced.",
    advice="Do it in __init__.",
)
def _signature() -> Repro:
    import inspect

    def broken(x: Tensor) -> Tensor:
        return x * len(inspect.signature(nn.functional.relu).parameters)

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@requests.cause(
    "graph-break-call",
    "torch._dynamo.graph_break()",
    pattern=r"graph_break\(\)",
    code=r"graph_break\(",
    why="It does what it says.",
    advice="Remove it.",
)
def _asked() -> Repro:
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    return Repro(broken, _sine_and_cosine, [_VECTOR])


@requests.cause(
    "disabled-function",
    "@torch.compiler.disable",
    pattern=r"torch\.compiler\.disable",
    why="The function, and all that it calls, stays out of graphs.",
    advice="Remove the decorator where its reason is gone; or make the function a custom operator.",
)
def _disabled() -> Repro:
    @torch.compiler.disable
    def kept_out(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor) -> Tensor:
        return kept_out(x.sin()).cos()

    def fixed(x: Tensor) -> Tensor:
        return (x.sin() * 2).cos()

    return Repro(broken, fixed, [_VECTOR])


@requests.cause(
    "foreign-call",
    "a C extension on a tensor's memory",
    pattern=r"marked as skipped|Unsupported method call|ndarray",
    code=r"tobytes\(|memoryview\(|ctypes|scipy",
    why="Dynamo traces Python and NumPy's array functions, no other C code.",
    advice="torch.library.custom_op with a fake implementation makes it an operator that a graph can call.",
)
def _foreign() -> Repro:
    def length(x: Tensor) -> Tensor:
        return torch.tensor(float(len(x.numpy().tobytes())))

    # Defined once a process: a second definition of an operator is an error.
    if not hasattr(torch.ops.compile_bench_catalogue, "bytes_of"):
        defined = torch.library.custom_op(
            "compile_bench_catalogue::bytes_of", mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        defined(length).register_fake(lambda x: x.new_empty(()))

    def broken(x: Tensor) -> Tensor:
        return x * len(x.numpy().tobytes())

    def fixed(x: Tensor) -> Tensor:
        return x * torch.ops.compile_bench_catalogue.bytes_of(x)

    return Repro(broken, fixed, [_VECTOR])

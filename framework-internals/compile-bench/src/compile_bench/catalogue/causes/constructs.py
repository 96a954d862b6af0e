"""Python constructs that Dynamo cannot trace, and breaks that the code asks for."""

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

from compile_bench.catalogue.cause import Advice, Repro, Theme
from compile_bench.catalogue.conditions import of_calls, of_constructs, of_places, of_values
from compile_bench.catalogue.use import UsedAs

constructs = Theme("Python constructs")
requests = Theme("Breaks that the code asks for")
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
    why="Dynamo cannot resume in the middle of a loop. It skips the frame: the whole function runs eagerly from then "
    "on.",
    advice="Fix the inner break, or move the loop's body into a separate function.",
    when=of_places.IN_LOOP,
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
    why="Dynamo cannot resume inside a try block, so it skips the whole frame.",
    advice="Move the code that breaks out of the try block.",
    when=of_places.IN_TRY,
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
    "any break inside a with block of your own context manager",
    pattern=_PRINTED,
    why="Dynamo cannot resume inside a context manager that it does not know, so it skips the whole frame.",
    advice="Fix the inner break, or make the block smaller.",
    when=of_places.IN_WITH,
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
    why="Dynamo cannot trace source text that is compiled at run time.",
    advice="Define the function ahead of time.",
    when=of_constructs.constant_argument("exec", "__import__"),
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
    "a class that is defined in the model",
    pattern=r"__build_class__|marked as skipped",
    code=r"\bclass\b",
    why="Defining a class runs its metaclass, which Dynamo does not trace.",
    advice="Define the class at module level.",
    when=of_constructs.CLASS_OF_ITS_OWN,
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
    "make_dataclass()",
    pattern=r".",
    code=r"make_dataclass\(",
    why="make_dataclass() runs source text that it generates.",
    advice="Define the dataclass at module level.",
    when=of_calls.independent("make_dataclass"),
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
    why="Dynamo cannot guard the dict of all globals.",
    advice="Use the global by its name.",
    when=of_constructs.NAMED_GLOBAL,
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
    why="A cache that is made during the call is a C object without a source, so Dynamo cannot guard it. (Dynamo "
    "traces functions that are cached at module level.)",
    advice="Decorate the function at module level.",
    when=of_calls.INDEPENDENT,
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
    advice="Keep the tensor in an attribute, or return it.",
    when=of_constructs.STORED_ONLY,
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
    why="A copy inside a graph would make new parameters in every call.",
    advice="Call clone() on the tensor.",
    when=of_constructs.COPIES_ARGUMENT,
    others=(Advice("Copy the module in __init__.", of_constructs.COPIES_OWN_MODULE),),
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
    why="Dynamo does not trace reflection over functions.",
    advice="Read the signature in __init__.",
    when=of_calls.independent("signature"),
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
    why="The call asks for a graph break.",
    advice="Remove the call.",
    when=of_calls.UNUSED,
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
    why="The function and everything that it calls stay out of graphs.",
    advice="Remove the decorator if it is no longer needed.",
    when=of_places.TRACEABLE_BODY,
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
    why="Dynamo traces Python code and NumPy's array functions. It cannot trace other C code.",
    advice="Make it a custom operator, which a graph can call: torch.library.custom_op with a fake implementation.",
    when=of_values.never(UsedAs.KEPT, UsedAs.UNUSED),
)
def _foreign() -> Repro:
    def length(x: Tensor) -> Tensor:
        return torch.tensor(float(len(x.numpy().tobytes())))

    # Defining an operator a second time in a process is an error.
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

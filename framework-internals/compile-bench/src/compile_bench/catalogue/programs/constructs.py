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

from compile_bench.catalogue.programs import Repro, broken, program
from compile_bench.catalogue.programs.shared import VECTOR, doubled, sine, sine_and_cosine

_VECTOR = VECTOR  # a global of this module, for the cause "globals-read"


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    yield


@program("break-in-loop")
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

    return Repro(broken, fixed, [VECTOR])


@broken("break-in-try", fixed=sine_and_cosine)
def _in_try(x: Tensor) -> Tensor:
    try:
        x = x.sin()
        print(end="")
        return x.cos()
    finally:
        x = torch.empty(0)


@program("break-in-with")
def _in_with() -> Repro:
    def broken(x: Tensor) -> Tensor:
        with _scope():
            x = x.sin()
            print(end="")
            return x.cos()

    def fixed(x: Tensor) -> Tensor:
        with _scope():
            return x.sin().cos()

    return Repro(broken, fixed, [VECTOR])


@broken("code-executed", fixed=doubled)
def _exec(x: Tensor) -> Tensor:
    names: dict[str, Any] = {}
    exec("def double(x):\n    return x * 2", names)
    return names["double"](x)


@broken("class-defined", fixed=doubled)
def _class(x: Tensor) -> Tensor:
    class Pair:
        first = 2

    return x * Pair.first


@broken("dataclass-made", fixed=doubled)
def _dataclass(x: Tensor) -> Tensor:
    point = dataclasses.make_dataclass("point", ["value"])
    return x * point(2).value


@broken("globals-read", fixed=lambda x: x * len(_VECTOR))
def _globals(x: Tensor) -> Tensor:
    return x * len(globals()["_VECTOR"])


@broken("cache-made", fixed=doubled)
def _cache(x: Tensor) -> Tensor:
    return x * functools.lru_cache(None)(lambda n: n)(2)


@program("weak-dictionary")
def _weak() -> Repro:
    kept: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()

    def broken(x: Tensor) -> Tensor:
        kept["x"] = x
        return x.sin()

    return Repro(broken, sine, [VECTOR])


@broken("module-copied", fixed=lambda x: x.clone().sin())
def _deepcopy(x: Tensor) -> Tensor:
    return copy.deepcopy(x).sin()


@program("signature-read")
def _signature() -> Repro:
    import inspect

    def broken(x: Tensor) -> Tensor:
        return x * len(inspect.signature(nn.functional.relu).parameters)

    return Repro(broken, doubled, [VECTOR])


@broken("graph-break-call", fixed=sine_and_cosine)
def _asked(x: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


@program("disabled-function")
def _disabled() -> Repro:
    @torch.compiler.disable
    def kept_out(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor) -> Tensor:
        return kept_out(x.sin()).cos()

    return Repro(broken, lambda x: (x.sin() * 2).cos(), [VECTOR])


@program("foreign-call")
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

    return Repro(broken, lambda x: x * torch.ops.compile_bench_catalogue.bytes_of(x), [VECTOR])

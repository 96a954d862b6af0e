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

from compile_bench.catalogue.programs import Repro, program
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


@program("break-in-try")
def _in_try() -> Repro:
    def broken(x: Tensor) -> Tensor:
        try:
            x = x.sin()
            print(end="")
            return x.cos()
        finally:
            x = torch.empty(0)

    return Repro(broken, sine_and_cosine, [VECTOR])


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


@program("code-executed")
def _exec() -> Repro:
    def broken(x: Tensor) -> Tensor:
        names: dict[str, Any] = {}
        exec("def double(x):\n    return x * 2", names)
        return names["double"](x)

    return Repro(broken, doubled, [VECTOR])


@program("class-defined")
def _class() -> Repro:
    def broken(x: Tensor) -> Tensor:
        class Pair:
            first = 2

        return x * Pair.first

    return Repro(broken, doubled, [VECTOR])


@program("dataclass-made")
def _dataclass() -> Repro:
    def broken(x: Tensor) -> Tensor:
        point = dataclasses.make_dataclass("point", ["value"])
        return x * point(2).value

    return Repro(broken, doubled, [VECTOR])


@program("globals-read")
def _globals() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(globals()["_VECTOR"])

    return Repro(broken, lambda x: x * len(_VECTOR), [VECTOR])


@program("cache-made")
def _cache() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * functools.lru_cache(None)(lambda n: n)(2)

    return Repro(broken, doubled, [VECTOR])


@program("weak-dictionary")
def _weak() -> Repro:
    kept: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()

    def broken(x: Tensor) -> Tensor:
        kept["x"] = x
        return x.sin()

    return Repro(broken, sine, [VECTOR])


@program("module-copied")
def _deepcopy() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return copy.deepcopy(x).sin()

    return Repro(broken, lambda x: x.clone().sin(), [VECTOR])


@program("signature-read")
def _signature() -> Repro:
    import inspect

    def broken(x: Tensor) -> Tensor:
        return x * len(inspect.signature(nn.functional.relu).parameters)

    return Repro(broken, doubled, [VECTOR])


@program("graph-break-call")
def _asked() -> Repro:
    def broken(x: Tensor) -> Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    return Repro(broken, sine_and_cosine, [VECTOR])


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

"""Output and other side effects inside a model."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compile_bench.catalogue.programs import Repro, broken, program
from compile_bench.catalogue.programs.shared import sine, sine_and_cosine

_log = logging.getLogger("compile_bench.catalogue")


@program("print")
def _print() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        print(end="")
        return y.cos()

    def fixed(x: Tensor) -> Tensor:
        y = x.sin()
        if not torch.compiler.is_compiling():
            print(end="")
        return y.cos()

    return Repro(broken, fixed, [(torch.ones(8),)])


@program("logging")
def _logging() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        _log.info("between")
        return y.cos()

    def fixed(x: Tensor) -> Tensor:
        y = x.sin()
        if not torch.compiler.is_compiling():
            _log.info("between")
        return y.cos()

    return Repro(broken, fixed, [(torch.ones(8),)])


@program("warning")
def _warning() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        with_warning = y * 2
        warnings.warn("scaled", stacklevel=2)
        return with_warning

    def fixed(x: Tensor) -> Tensor:
        y = x.sin()
        if not torch.compiler.is_compiling():
            warnings.warn("scaled", stacklevel=2)
        return y * 2

    return Repro(broken, fixed, [(torch.ones(8),)])


@broken("write", fixed=sine_and_cosine, calls=[(torch.ones(8),)])
def _write(x: Tensor) -> Tensor:
    y = x.sin()
    sys.stdout.write("")
    return y.cos()


@broken("clock", fixed=sine, calls=[(torch.ones(8),)])
def _clock(x: Tensor) -> Tensor:
    start = time.perf_counter()
    y = x.sin()
    return y + 0.0 * (time.perf_counter() - start)


@broken("sleep", fixed=sine_and_cosine, calls=[(torch.ones(8),)])
def _sleep(x: Tensor) -> Tensor:
    y = x.sin()
    time.sleep(0)
    return y.cos()


@broken("file", fixed=sine, calls=[(torch.ones(8),)])
def _file(x: Tensor) -> Tensor:
    with open(os.devnull, "w") as stream:  # noqa: PTH123 (this is the cause)
        stream.write("a line")
    return x.sin()


@program("save")
def _save() -> Repro:
    target = io.BytesIO()

    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch.save(y, target)
        return y

    return Repro(broken, sine, [(torch.ones(8),)])


@program("path")
def _path() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.sin() if os.path.exists("/") else x.cos()  # noqa: PTH110 (this is the cause)

    there = Path("/").exists()

    return Repro(broken, lambda x: x.sin() if there else x.cos(), [(torch.ones(8),)])


@broken("environment-written", fixed=sine_and_cosine, calls=[(torch.ones(8),)])
def _environment(x: Tensor) -> Tensor:
    y = x.sin()
    os.environ["COMPILE_BENCH_CATALOGUE"] = "1"
    return y.cos()


@broken("upkeep", fixed=sine_and_cosine, calls=[(torch.ones(8),)])
def _upkeep(x: Tensor) -> Tensor:
    y = x.sin()
    gc.collect()
    return y.cos()


@broken("stack-inspected", fixed=lambda x: x * 1, calls=[(torch.ones(8),)])
def _stack(x: Tensor) -> Tensor:
    return x * len(traceback.format_stack()[:1])


@program("stream-redirected")
def _redirected() -> Repro:
    import contextlib

    def broken(x: Tensor) -> Tensor:
        with contextlib.redirect_stdout(io.StringIO()):
            y = x.sin()
        return y.cos()

    return Repro(broken, sine_and_cosine, [(torch.ones(8),)])


@program("temporary-file")
def _process() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (os.getpid() > 0)

    own = os.getpid()

    return Repro(broken, lambda x: x * (own > 0), [(torch.ones(8),)])


@program("function-attribute")
def _function_attribute() -> Repro:
    def counted(x: Tensor) -> Tensor:
        itself.calls += 1
        return x.sin().cos()

    itself: Any = counted
    itself.calls = 0
    return Repro(counted, sine_and_cosine, [(torch.ones(8),)])

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

from compile_bench.catalogue.cause import Repro, Theme
from compile_bench.catalogue.conditions import of_calls, of_constructs, of_places, of_values
from compile_bench.catalogue.use import UsedAs

theme = Theme("Output and side effects")
SKIPPED = r"marked as skipped|Unsupported method call"
_log = logging.getLogger("compile_bench.catalogue")


def _sine_and_cosine(x: Tensor) -> Tensor:
    return x.sin().cos()


@theme.cause(
    "print",
    "print() in the middle",
    pattern="Failed to trace builtin operator",
    code=r"\b(pprint|print)\(",
    why="A graph cannot print. Dynamo ends the graph before the print and begins another one after it.",
    advice="Print only while not compiling: `if not torch.compiler.is_compiling():`; or print what the model returns.",
    when=of_calls.UNUSED,
)
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


@theme.cause(
    "logging",
    "a call of a logger's method",
    pattern="logging.Logger method not supported",
    code=r"\.(debug|info|warning|error|critical|exception|log)\(",
    why="Whether a logger writes depends on handlers and levels that no guard watches.",
    advice="Log only while not compiling, or add the method to torch._dynamo.config.ignore_logging_functions.",
    when=of_calls.UNUSED,
)
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


@theme.cause(
    "warning",
    "warnings.warn()",
    pattern=SKIPPED,
    code=r"\bwarn\(",
    why="warnings.warn() is a C function with its own registry. Dynamo calls it outside the graph.",
    advice="Warn only while not compiling, or in __init__ if the reason is known there.",
    when=of_calls.UNUSED,
)
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


@theme.cause(
    "write",
    "sys.stdout.write() or flush()",
    pattern=SKIPPED,
    code=r"\bsys\.(stdout|stderr)\.",
    why="A stream is a C object that Dynamo does not trace into.",
    advice="Write only while not compiling.",
    when=of_calls.UNUSED,
)
def _write() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        sys.stdout.write("")
        return y.cos()

    return Repro(broken, _sine_and_cosine, [(torch.ones(8),)])


@theme.cause(
    "clock",
    "a reading of the clock",
    pattern=rf"{SKIPPED}|time function",
    code=r"\b(time\.time|(time\.)?(perf_counter|monotonic|process_time|thread_time))(_ns)?\(",
    why="Time is not a function of the inputs. Besides, operations between two readings may be queued, fused or moved.",
    advice="Measure around the call, with CUDA events or torch.profiler. Inside, read the clock only while not "
    "compiling.",
    when=of_constructs.TIMES_DECIDE_NOTHING,
)
def _clock() -> Repro:
    def broken(x: Tensor) -> Tensor:
        start = time.perf_counter()
        y = x.sin()
        return y + 0.0 * (time.perf_counter() - start)

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "sleep",
    "time.sleep()",
    pattern=SKIPPED,
    code=r"\bsleep\(",
    why="Sleeping is a side effect of a C function.",
    advice="Sleep outside the compiled function.",
    when=of_calls.UNUSED,
)
def _sleep() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        time.sleep(0)
        return y.cos()

    return Repro(broken, _sine_and_cosine, [(torch.ones(8),)])


@theme.cause(
    "file",
    "a file that is opened, read or written",
    pattern="Failed to trace builtin operator",
    code=r"\bopen\(",
    why="A graph cannot use files. `with open(…)` makes Dynamo skip the whole frame.",
    advice="Read the file before the call and pass its content in. Return what you want to write, and write it "
    "outside.",
    when=of_calls.independent("open"),
)
def _file() -> Repro:
    def broken(x: Tensor) -> Tensor:
        with open(os.devnull, "w") as stream:  # noqa: PTH123 (this is the cause)
            stream.write("a line")
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "save",
    "torch.save() in the model",
    pattern=SKIPPED,
    code=r"\btorch\.save\(",
    why="torch.save() needs the values, so the graph has to end and run before it.",
    advice="Return the tensor and save it outside.",
    when=of_calls.UNUSED & of_calls.ONCE_A_CALL,
)
def _save() -> Repro:
    target = io.BytesIO()

    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch.save(y, target)
        return y

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "path",
    "a query of the file system",
    pattern=SKIPPED,
    code=r"\b(exists|is_file|listdir|getcwd|glob)\(",
    why="The file system can change between calls, and no guard watches it.",
    advice="Query it once, in __init__, and keep the result.",
    when=of_calls.independent("exists", "is_file", "listdir", "getcwd", "glob"),
)
def _path() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.sin() if os.path.exists("/") else x.cos()  # noqa: PTH110 (this is the cause)

    there = Path("/").exists()

    def fixed(x: Tensor) -> Tensor:
        return x.sin() if there else x.cos()

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "environment-written",
    "an environment variable that is set",
    pattern=SKIPPED,
    code=r"\bos\.environ\[",
    why="Setting a variable calls putenv(), a C function. (Dynamo traces and guards the reading of a variable.)",
    advice="Set variables before the model is built.",
    when=of_calls.STATEMENT_INDEPENDENT,
)
def _environment() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        os.environ["COMPILE_BENCH_CATALOGUE"] = "1"
        return y.cos()

    return Repro(broken, _sine_and_cosine, [(torch.ones(8),)])


@theme.cause(
    "upkeep",
    "a run of the garbage collector",
    pattern=SKIPPED,
    code=r"\b(gc\.collect|empty_cache|synchronize)\(",
    why="Collecting, synchronising and freeing caches are side effects of C functions, and slow ones.",
    advice="Do it between steps, or only while not compiling.",
    when=of_calls.UNUSED,
)
def _upkeep() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        gc.collect()
        return y.cos()

    return Repro(broken, _sine_and_cosine, [(torch.ones(8),)])


@theme.cause(
    "stack-inspected",
    "an inspection of the call stack",
    pattern=SKIPPED,
    code=r"\b(format_stack|extract_stack|_getframe|currentframe|stack)\(",
    why="A graph has no call stack.",
    advice="Inspect the stack only while not compiling, or remove this.",
    when=of_values.never(UsedAs.BRANCH, UsedAs.INDEX, UsedAs.KEPT),
)
def _stack() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(traceback.format_stack()[:1])

    def fixed(x: Tensor) -> Tensor:
        return x * 1

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "stream-redirected",
    "contextlib.redirect_stdout()",
    pattern=r"Unsupported method call|contextlib",
    code=r"\bredirect_std(out|err)\(",
    why="Dynamo enters only the context managers that it knows. It does not know this one, so it skips the whole "
    "frame.",
    advice="Redirect around the call of the model.",
    when=of_places.AROUND_CALL,
)
def _redirected() -> Repro:
    import contextlib

    def broken(x: Tensor) -> Tensor:
        with contextlib.redirect_stdout(io.StringIO()):
            y = x.sin()
        return y.cos()

    return Repro(broken, _sine_and_cosine, [(torch.ones(8),)])


@theme.cause(
    "temporary-file",
    "a subprocess, a temporary file, a process number",
    pattern=SKIPPED,
    code=r"\b(getpid|subprocess\.\w+|NamedTemporaryFile|mkstemp|mkdtemp)\(",
    why="These functions call the operating system.",
    advice="Call it once, in __init__, and keep the result.",
    when=of_calls.independent("getpid"),
)
def _process() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (os.getpid() > 0)

    own = os.getpid()

    def fixed(x: Tensor) -> Tensor:
        return x * (own > 0)

    return Repro(broken, fixed, [(torch.ones(8),)])


@theme.cause(
    "function-attribute",
    "an attribute of a function, such as a decorator's counter",
    pattern=r"setattr\(\) on unsupported type|Failed to trace builtin operator",  # the second in 2.10 and 2.11
    code=r"^(?!self\b)[\w.]+\.\w+ [-+*/|]?= ",
    why="Dynamo does not track attributes of functions. It would also compile the count in as a constant.",
    advice="Count outside the model, or in a buffer.",
    when=of_constructs.COUNTS_ON_FUNCTION,
)
def _function_attribute() -> Repro:
    def counted(x: Tensor) -> Tensor:
        itself.calls += 1
        return x.sin().cos()

    itself: Any = counted
    itself.calls = 0
    return Repro(counted, _sine_and_cosine, [(torch.ones(8),)])

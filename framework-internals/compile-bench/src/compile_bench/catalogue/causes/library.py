"""Python's standard library and random numbers inside a model."""

from __future__ import annotations

import contextvars
import datetime
import decimal
import hashlib
import json
import pickle
import queue
import random
import threading
import uuid
import zlib

import numpy as np
import torch
from torch import Tensor

from compile_bench.catalogue.cause import Repro, Theme
from compile_bench.catalogue.conditions import of_calls, of_constructs, of_places, of_values
from compile_bench.catalogue.use import UsedAs

library = Theme("Python's standard library")
numbers = Theme("Random numbers")
SKIPPED = r"marked as skipped|Unsupported method call|Unsupported function call"
_VECTOR = (torch.ones(4),)
_gain = contextvars.ContextVar("gain", default=2.0)


@library.cause(
    "json",
    "json.loads() and other parsers in C",
    pattern=rf"{SKIPPED}|no traceable __call__",
    code=r"\bjson\.",
    why="The parser is a C extension.",
    advice="Parse in __init__, or mark the function with @torch.compiler.assume_constant_result.",
    when=of_calls.INDEPENDENT,
)
def _json() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * json.loads("[2]")[0]

    @torch.compiler.assume_constant_result
    def factor() -> int:
        return int(json.loads("[2]")[0])

    def fixed(x: Tensor) -> Tensor:
        return x * factor()

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "pickle",
    "pickle.dumps()",
    pattern=SKIPPED,
    code=r"\bpickle\.",
    why="Pickle is a C extension.",
    advice="Pickle outside the model.",
    when=of_calls.INDEPENDENT,
)
def _pickle() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(pickle.dumps(1)[:1])

    def fixed(x: Tensor) -> Tensor:
        return x * 1

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "hash-computed",
    "hashlib, zlib, uuid",
    pattern=SKIPPED,
    code=r"\b(hashlib|zlib|uuid)\.",
    why="They are C functions that Dynamo does not know.",
    advice="Compute identifiers outside the model.",
    when=of_calls.INDEPENDENT,
)
def _hashed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (len(hashlib.md5(b"a").hexdigest()) + zlib.crc32(b"") + (uuid.uuid4() is None))

    def fixed(x: Tensor) -> Tensor:
        return x * 32

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "date",
    "datetime.now()",
    pattern=SKIPPED,
    code=r"datetime",
    why="The date is not a function of the inputs.",
    advice="Compute what depends on the date outside, and pass it in.",
    when=of_calls.INDEPENDENT,
)
def _date() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (datetime.datetime.now().year > 0)

    def fixed(x: Tensor) -> Tensor:
        return x * True

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "decimal",
    "decimal.Decimal",
    pattern=rf"{SKIPPED}|vectorcall",
    code=r"Decimal\(",
    why="Decimal is a C extension.",
    advice="Use plain floats, or compute the number in __init__.",
    when=of_calls.INDEPENDENT,
)
def _decimal() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(decimal.Decimal("1.5") + 1)

    def fixed(x: Tensor) -> Tensor:
        return x * 2.5

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "context-variable",
    "contextvars.ContextVar",
    pattern=SKIPPED,
    code=r"\.get\(\)",
    why="A context variable is looked up in C, and no guard watches it.",
    advice="Pass the value as an argument, or keep it in an attribute.",
    when=of_calls.INDEPENDENT & of_places.without_calls("set", text="the function does not set it"),
)
def _context_variable() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * _gain.get()

    def fixed(x: Tensor, gain: float) -> Tensor:
        return x * gain

    return Repro(broken, fixed, [_VECTOR], [(*_VECTOR, 2.0)])


@library.cause(
    "lock",
    "a lock",
    pattern="Unsupported context manager",
    code=r"(?i)\bwith\b.*(lock|mutex|semaphore|condition)",
    why="Dynamo does not enter context managers that are written in C, so it skips the whole frame.",
    advice="Take the lock around the call of the model.",
    when=of_places.TAKEN_ONCE,
)
def _lock() -> Repro:
    lock = threading.Lock()

    def broken(x: Tensor) -> Tensor:
        with lock:
            return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@library.cause(
    "thread",
    "a thread or a queue",
    pattern=rf"{SKIPPED}|Unsupported context manager",
    code=r"\b(Thread|queue|Queue)\b",
    why="Threads and queues use locks, which Dynamo does not trace.",
    advice="Pass results on outside the model.",
    when=of_places.without_calls("get", "get_nowait", "join", text="the function takes nothing back from it"),
)
def _thread() -> Repro:
    def broken(x: Tensor) -> Tensor:
        handed: queue.Queue[int] = queue.Queue()
        handed.put(1)
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "python-random",
    "random.random(), choice(), shuffle() …",
    pattern=SKIPPED,
    code=r"\brandom\.",
    equal=False,
    why="Python keeps the generator's state. (Dynamo traces a module-level random.random() from torch 2.15 on.)",
    advice="Draw with torch, or draw outside and pass the number as a tensor.",
    when=of_values.only(UsedAs.ARITHMETIC),
)
def _python_random() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * random.random()

    def fixed(x: Tensor) -> Tensor:
        return x * torch.rand(())

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "python-seed",
    "random.seed()",
    pattern=SKIPPED,
    code=r"\brandom\.seed\(",
    why="Seeding changes the state of the process.",
    advice="Seed before the loop.",
    when=of_calls.UNUSED & of_calls.INDEPENDENT & of_calls.ONCE_A_CALL,
)
def _python_seed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        random.seed(0)
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "numpy-random",
    "float() of a random number from NumPy",
    pattern=r"Data dependent operator|item",
    code=r"np\.random\.",
    equal=False,
    why="Dynamo traces np.random.rand() itself, but float() needs its value, which does not exist while tracing.",
    advice="Draw with torch and keep the tensor.",
    when=of_values.only(UsedAs.ARITHMETIC),
)
def _numpy_random() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.random.rand())

    def fixed(x: Tensor) -> Tensor:
        return x * torch.rand(())

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "numpy-generator",
    "np.random.default_rng()",
    pattern=r"numpy function unsupported|Unsupported method call",
    code=r"default_rng\(",
    equal=False,
    why="Dynamo does not trace NumPy's generator objects.",
    advice="Draw with torch.",
    when=of_values.only(UsedAs.ARITHMETIC),
)
def _numpy_generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.random.default_rng(0).normal())

    def fixed(x: Tensor) -> Tensor:
        return x * torch.randn(())

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "torch-seed",
    "torch.manual_seed()",
    pattern=SKIPPED,
    code=r"manual_seed\(",
    equal=False,
    why="Seeding changes the state of the process. Inside a graph, Inductor draws from a separate state.",
    advice="Seed outside the model.",
    when=of_calls.UNUSED & of_calls.INDEPENDENT & of_calls.ONCE_A_CALL,
)
def _torch_seed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)

    def fixed(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "random-state",
    "get_rng_state(), set_rng_state(), fork_rng()",
    pattern=rf"{SKIPPED}|returned non-Tensor|Unsupported context manager",
    code=r"rng_state\(|fork_rng\(|initial_seed\(",
    equal=False,
    why="The generator's state cannot be a value of the graph.",
    advice="Fork the generator around the call of the model.",
    when=of_constructs.SAVES_AND_RESTORES,
)
def _random_state() -> Repro:
    def broken(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = x + torch.randn(4)
        torch.set_rng_state(state)
        return y

    def fixed(x: Tensor) -> Tensor:
        return x + torch.randn(4)

    return Repro(broken, fixed, [_VECTOR])


@numbers.cause(
    "generator",
    "a torch.Generator that is made or passed inside the model",
    pattern=r"opaque object|Failed to convert args|marked as skipped|Unsupported method call",
    code=r"[Gg]enerator",
    equal=False,
    why="A generator cannot be an argument of an operator in a graph.",
    advice="Draw from the default generator, or draw outside and pass the noise.",
    when=of_calls.INDEPENDENT,
)
def _generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=torch.Generator().manual_seed(0))

    def fixed(x: Tensor, noise: Tensor) -> Tensor:
        return x + noise

    return Repro(broken, fixed, [_VECTOR], [(*_VECTOR, torch.zeros(4))])

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

from compile_bench.catalogue.programs import Repro, program
from compile_bench.catalogue.programs.shared import VECTOR, sine

_gain = contextvars.ContextVar("gain", default=2.0)


@program("json")
def _json() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * json.loads("[2]")[0]

    @torch.compiler.assume_constant_result
    def factor() -> int:
        return int(json.loads("[2]")[0])

    def fixed(x: Tensor) -> Tensor:
        return x * factor()

    return Repro(broken, fixed, [VECTOR])


@program("pickle")
def _pickle() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(pickle.dumps(1)[:1])

    def fixed(x: Tensor) -> Tensor:
        return x * 1

    return Repro(broken, fixed, [VECTOR])


@program("hash-computed")
def _hashed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (len(hashlib.md5(b"a").hexdigest()) + zlib.crc32(b"") + (uuid.uuid4() is None))

    def fixed(x: Tensor) -> Tensor:
        return x * 32

    return Repro(broken, fixed, [VECTOR])


@program("date")
def _date() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (datetime.datetime.now().year > 0)

    def fixed(x: Tensor) -> Tensor:
        return x * True

    return Repro(broken, fixed, [VECTOR])


@program("decimal")
def _decimal() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(decimal.Decimal("1.5") + 1)

    def fixed(x: Tensor) -> Tensor:
        return x * 2.5

    return Repro(broken, fixed, [VECTOR])


@program("context-variable")
def _context_variable() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * _gain.get()

    def fixed(x: Tensor, gain: float) -> Tensor:
        return x * gain

    return Repro(broken, fixed, [VECTOR], [(*VECTOR, 2.0)])


@program("lock")
def _lock() -> Repro:
    lock = threading.Lock()

    def broken(x: Tensor) -> Tensor:
        with lock:
            return x.sin()

    return Repro(broken, sine, [VECTOR])


@program("thread")
def _thread() -> Repro:
    def broken(x: Tensor) -> Tensor:
        handed: queue.Queue[int] = queue.Queue()
        handed.put(1)
        return x.sin()

    return Repro(broken, sine, [VECTOR])


@program("python-random")
def _python_random() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * random.random()

    def fixed(x: Tensor) -> Tensor:
        return x * torch.rand(())

    return Repro(broken, fixed, [VECTOR])


@program("python-seed")
def _python_seed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        random.seed(0)
        return x.sin()

    return Repro(broken, sine, [VECTOR])


@program("numpy-random")
def _numpy_random() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.random.rand())

    def fixed(x: Tensor) -> Tensor:
        return x * torch.rand(())

    return Repro(broken, fixed, [VECTOR])


@program("numpy-generator")
def _numpy_generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.random.default_rng(0).normal())

    def fixed(x: Tensor) -> Tensor:
        return x * torch.randn(())

    return Repro(broken, fixed, [VECTOR])


@program("torch-seed")
def _torch_seed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)

    def fixed(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    return Repro(broken, fixed, [VECTOR])


@program("random-state")
def _random_state() -> Repro:
    def broken(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = x + torch.randn(4)
        torch.set_rng_state(state)
        return y

    def fixed(x: Tensor) -> Tensor:
        return x + torch.randn(4)

    return Repro(broken, fixed, [VECTOR])


@program("generator")
def _generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=torch.Generator().manual_seed(0))

    def fixed(x: Tensor, noise: Tensor) -> Tensor:
        return x + noise

    return Repro(broken, fixed, [VECTOR], [(*VECTOR, torch.zeros(4))])

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

    return Repro(broken, lambda x: x * factor(), [VECTOR])


@program("pickle")
def _pickle() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(pickle.dumps(1)[:1])

    return Repro(broken, lambda x: x * 1, [VECTOR])


@program("hash-computed")
def _hashed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (len(hashlib.md5(b"a").hexdigest()) + zlib.crc32(b"") + (uuid.uuid4() is None))

    return Repro(broken, lambda x: x * 32, [VECTOR])


@program("date")
def _date() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (datetime.datetime.now().year > 0)

    return Repro(broken, lambda x: x * True, [VECTOR])


@program("decimal")
def _decimal() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(decimal.Decimal("1.5") + 1)

    return Repro(broken, lambda x: x * 2.5, [VECTOR])


@program("context-variable")
def _context_variable() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * _gain.get()

    return Repro(broken, lambda x, gain: x * gain, [VECTOR], [(*VECTOR, 2.0)])


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

    return Repro(broken, lambda x: x * torch.rand(()), [VECTOR])


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

    return Repro(broken, lambda x: x * torch.rand(()), [VECTOR])


@program("numpy-generator")
def _numpy_generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.random.default_rng(0).normal())

    return Repro(broken, lambda x: x * torch.randn(()), [VECTOR])


@program("torch-seed")
def _torch_seed() -> Repro:
    def broken(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x + torch.randn_like(x)

    return Repro(broken, lambda x: x + torch.randn_like(x), [VECTOR])


@program("random-state")
def _random_state() -> Repro:
    def broken(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        y = x + torch.randn(4)
        torch.set_rng_state(state)
        return y

    return Repro(broken, lambda x: x + torch.randn(4), [VECTOR])


@program("generator")
def _generator() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x + torch.randn(4, generator=torch.Generator().manual_seed(0))

    return Repro(broken, lambda x, noise: x + noise, [VECTOR], [(*VECTOR, torch.zeros(4))])

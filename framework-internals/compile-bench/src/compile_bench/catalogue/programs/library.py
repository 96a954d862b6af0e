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

from compile_bench.catalogue.programs import Repro, broken, program
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


@broken("pickle", fixed=lambda x: x * 1)
def _pickle(x: Tensor) -> Tensor:
    return x * len(pickle.dumps(1)[:1])


@broken("hash-computed", fixed=lambda x: x * 32)
def _hashed(x: Tensor) -> Tensor:
    return x * (len(hashlib.md5(b"a").hexdigest()) + zlib.crc32(b"") + (uuid.uuid4() is None))


@broken("date", fixed=lambda x: x * True)
def _date(x: Tensor) -> Tensor:
    return x * (datetime.datetime.now().year > 0)


@broken("decimal", fixed=lambda x: x * 2.5)
def _decimal(x: Tensor) -> Tensor:
    return x * float(decimal.Decimal("1.5") + 1)


@broken("context-variable", fixed=lambda x, gain: x * gain, fixed_calls=[(*VECTOR, 2.0)])
def _context_variable(x: Tensor) -> Tensor:
    return x * _gain.get()


@program("lock")
def _lock() -> Repro:
    lock = threading.Lock()

    def broken(x: Tensor) -> Tensor:
        with lock:
            return x.sin()

    return Repro(broken, sine, [VECTOR])


@broken("thread", fixed=sine)
def _thread(x: Tensor) -> Tensor:
    handed: queue.Queue[int] = queue.Queue()
    handed.put(1)
    return x.sin()


@broken("python-random", fixed=lambda x: x * torch.rand(()))
def _python_random(x: Tensor) -> Tensor:
    return x * random.random()


@broken("python-seed", fixed=sine)
def _python_seed(x: Tensor) -> Tensor:
    random.seed(0)
    return x.sin()


@broken("numpy-random", fixed=lambda x: x * torch.rand(()))
def _numpy_random(x: Tensor) -> Tensor:
    return x * float(np.random.rand())


@broken("numpy-generator", fixed=lambda x: x * torch.randn(()))
def _numpy_generator(x: Tensor) -> Tensor:
    return x * float(np.random.default_rng(0).normal())


@broken("torch-seed", fixed=lambda x: x + torch.randn_like(x))
def _torch_seed(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.randn_like(x)


@broken("random-state", fixed=lambda x: x + torch.randn(4))
def _random_state(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = x + torch.randn(4)
    torch.set_rng_state(state)
    return y


@broken("generator", fixed=lambda x, noise: x + noise, fixed_calls=[(*VECTOR, torch.zeros(4))])
def _generator(x: Tensor) -> Tensor:
    return x + torch.randn(4, generator=torch.Generator().manual_seed(0))

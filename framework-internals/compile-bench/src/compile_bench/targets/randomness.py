"""Seeds random generators, and finds out whether a result depends on random numbers."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

# Many seeds are needed: a layer that is dropped with probability 0.1 changes nothing under most of them.
_SEEDS = 16


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    # torch.manual_seed formats and keeps the stack of every call for each kind of device that there may be later.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed)


def changes_with_the_seed(compute: Callable[[], Tensor]) -> bool:
    """Whether a result depends on random numbers.

    A changed generator state is no proof, because some models draw a number and never use it. The result is one float64
    vector; it is computed twice if that draws no number, and otherwise up to nineteen times.
    """

    def distance(seed: int) -> float:
        seed_everything(seed)
        again = squeezed(compute())
        return torch.linalg.vector_norm(again - first).item() if again.shape == first.shape else math.inf

    seed_everything(0)
    before = generators()
    first = squeezed(compute())
    drew = generators() != before
    size = torch.linalg.vector_norm(first).item()
    # Atomic additions and batch statistics change a result by rounding errors. Random numbers change it by more.
    same = max(distance(0), distance(0)) if drew else distance(0)
    if same > 1e-3 * size:  # it draws from another generator
        return True
    return drew and any(distance(seed) > 10 * same + 1e-6 * size for seed in range(1, _SEEDS + 1))


def squeezed(values: Tensor) -> Tensor:
    """The values with their logarithms in place of large ones: what fills masked places would hide all others."""
    return (values.sign() * values.abs().log1p()).nan_to_num(nan=0.0, posinf=1e3, neginf=-1e3)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the default generators of torch, Python and NumPy after a block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def generators() -> tuple[object, ...]:
    """The states of all default generators, those of Python and NumPy first."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch_states = (state.numpy().tobytes() for state in (torch.get_rng_state(), *on_devices))
    return (random.getstate(), pickle.dumps(np.random.get_state()), *torch_states)

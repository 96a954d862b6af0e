"""Operators with two lowerings: a kernel far faster than its formula, one far slower, and three behind adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from identity_kernels import many_kernel, one_kernel
from torch import Tensor

import lowering
from compile_bench.targets.target import Target


def many(x: Tensor) -> Tensor:
    """The identity, in 60 operators of the graph."""
    for _ in range(30):
        x = (x + 1.0) - 1.0
    return x


def slow_formula(x: Tensor) -> Tensor:
    """The identity beside sorts, which Inductor neither fuses nor leaves out."""
    y = x
    for _ in range(40):
        y = y.neg().sort(dim=-1).values
    return x + 0.0 * y


def doubled(x: Tensor) -> Tensor:
    """What a wrong kernel of the identity computes."""
    return 2.0 * x


def fails(x: Tensor) -> Tensor:
    """What a kernel that cannot be used here does."""
    raise RuntimeError("no such kernel on this machine")


in_use = SimpleNamespace(wrong=torch.clone, failing=torch.clone, plain=many)


class Adapter:
    """An operator whose lowering is an attribute of :data:`in_use`, as a library keeps it in a registry."""

    def __init__(self, name: str, kernel: Callable[[Tensor], Tensor]) -> None:
        self.name = name
        self._kernel = kernel

    @contextmanager
    def select(self, choice: lowering.Choice) -> Iterator[None]:
        """Replace the attribute while the kernel is selected."""
        before = getattr(in_use, self.name)
        if choice == "kernel":
            setattr(in_use, self.name, self._kernel)
        try:
            yield
        finally:
            setattr(in_use, self.name, before)


def model(x: Tensor) -> Tensor:
    """Use every operator."""
    sizes = (("rows", x.shape[0]), ("columns", x.shape[1]))
    x = lowering.lower("better", None, slow_formula, one_kernel, x, sizes=sizes)
    x = lowering.lower("worse", None, torch.clone, many_kernel, x, sizes=sizes)
    return in_use.plain(in_use.failing(in_use.wrong(x)))


def make() -> Target:
    """The model with its arguments and adapters."""
    torch.manual_seed(0)
    adapters = (Adapter("plain", torch.clone), Adapter("wrong", doubled), Adapter("failing", fails))
    return Target(model, (torch.randn(4, 8, requires_grad=True),), operators=adapters)  # type: ignore[arg-type]


def two() -> Target:
    """The operators of :func:`lowering.lower` alone."""
    return Target(model, make().args)  # type: ignore[arg-type]


def none() -> tuple[object, ...]:
    """A model without such an operator."""
    return torch.nn.Linear(2, 2), (torch.ones(1, 2),)

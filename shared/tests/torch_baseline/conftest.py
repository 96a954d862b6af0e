from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torch_baseline.config import GPTConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Products this small gain nothing from a second thread, and spinning threads on a busy machine lose a lot.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small() -> GPTConfig:
    """A model whose step takes a few milliseconds; three heads, so that nothing rests on powers of two."""
    return GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32)


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    """Compares nested state bit for bit."""
    return _assert_same


def _assert_same(first: Any, second: Any, path: str = "state") -> None:
    assert type(first) is type(second), path
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            _assert_same(first[name], second[name], f"{path}.{name}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            _assert_same(one, other, f"{path}[{index}]")
    else:
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second, path

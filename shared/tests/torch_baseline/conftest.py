from collections.abc import Iterator

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

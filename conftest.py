"""Which tests can run on this machine, and what all of them share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_imported_is_not_garbage() -> None:
    """Let collections pass over what earlier tests left: with three frameworks in a process a full one takes a second,
    and there is one before every timing.
    """
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs where there are too few, and say so."""
    needed = {"gpu": 1, "multi_gpu": 2}
    if not any(item.get_closest_marker(marker) for item in items for marker in needed):
        return
    import torch

    found = torch.cuda.device_count()
    for item in items:
        for marker, count in needed.items():
            if item.get_closest_marker(marker) and found < count:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA GPU(s), torch sees {found}"))

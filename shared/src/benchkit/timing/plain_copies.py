"""A copy beside which a kernel is timed, with the same bytes and the same kind of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from benchkit.device import Device
from benchkit.timing.clocks import Inputs
from benchkit.timing.comparison import compare, last_level_cache
from benchkit.timing.vector_copies import Stores, vector_copies

_CHOICE_SECONDS = 0.05  # sampling time to find the faster of two copies


def plain_copy(device: Device, inputs: Inputs, *, reads: Literal[1, 2] = 1) -> Callable[..., Any]:
    """A read of the first tensor of a call, or of the first two, and a write to new memory, by the fastest way.

    On a GPU, ``clone`` in a CUDA graph is a memcpy node, which beyond 256 MiB is up to a third slower than a kernel
    (H200, driver 580). A kernel that changes the sign moves the same bytes. On a CPU, PyTorch's operator or one by
    vectors, see :mod:`benchkit.timing.vector_copies`. Like the kernels of this repository, it uses streaming stores if
    the result takes at least half of the last-level cache. A smaller result stays in the cache for its reader.

    Args:
        device: Device of the tensors.
        inputs: Tuples of tensors for calls; the first one's size decides how a CPU stores.
        reads: How many tensors a call reads.

    Returns:
        A function of at least ``reads`` tensors; further ones are ignored.
    """
    import torch

    ways: dict[str, Callable[..., Any]] = {
        "torch": (lambda x, *_: x.clone()) if reads == 1 else (lambda x, y, *_: x + y)
    }
    if device == "cuda" and reads == 1:
        ways["kernel"] = lambda x, *_: torch.neg(x)
    if device == "cpu":
        stores: Stores = "streaming" if inputs[0][0].nbytes >= last_level_cache() / 2 else "ordinary"
        if (copies := vector_copies(stores)) is not None:
            move: Callable[..., Any] = copies.copy if reads == 1 else copies.combine
            ways["vectors"] = lambda *tensors: move(*tensors[:reads], torch.empty_like(tensors[0]))
    if len(ways) == 1:
        return ways["torch"]
    timings = compare(ways, device=device, inputs=inputs, seconds=_CHOICE_SECONDS)
    return ways[min(ways, key=lambda way: timings[way].median)]

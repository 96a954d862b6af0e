"""What an operator launches and moves, worked out before it is measured.

Every operand counts once, whatever a cache may save or a write may fetch: the least that the operation needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """Launches and memory traffic of one call.

    Attributes:
        launches: kernels started.
        read: bytes.
        written: bytes.
    """

    launches: int = 0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        """Read and written together."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.launches + other.launches, self.read + other.read, self.written + other.written)


def elementwise(like: Tensor, *, inputs: int) -> Traffic:
    """One kernel that reads ``inputs`` operands like ``like`` and writes one; none at all for an empty tensor."""
    size = like.numel() * like.element_size()
    return Traffic(1, inputs * size, size) if size else Traffic()


def vector_add_traffic(a: Tensor, b: Tensor) -> Traffic:
    """One kernel of 3·N·itemsize bytes, and before it one copy of 2·N·itemsize for each operand not contiguous."""
    copies = sum((elementwise(x, inputs=1) for x in (a, b) if not x.is_contiguous()), Traffic())
    return copies + elementwise(a, inputs=2)


def axpb_traffic(x: Tensor, b: Tensor) -> Traffic:
    """The same as :func:`vector_add_traffic`: the multiplication rides along."""
    return vector_add_traffic(x, b)


def axpb_unfused_traffic(x: Tensor) -> Traffic:
    """``alpha * x`` then ``+ b``, contiguous: two kernels, 5·N·itemsize bytes."""
    return elementwise(x, inputs=1) + elementwise(x, inputs=2)


# On a CPU the profiler sees operators, not kernels: these are the ones of this package's examples that walk the data.
_CPU_KERNELS = {"aten::add", "aten::mul", "aten::clone", "custom_ops::vector_add", "custom_ops::axpb"}


def count_launches(function: Callable[[], object], *, device: str) -> int:
    """Count the kernels that one call starts, as ``torch.profiler`` sees them.

    Args:
        function: called once before, so that nothing is built or set up while it is watched.
        device: ``"cuda"``: kernels on the GPU; ``"cpu"``: operators that walk the data.
    """
    from torch.profiler import ProfilerActivity, profile

    function()
    if device == "cuda":
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:  # without it some versions warn of clearing
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiler.events() or []
    if device == "cuda":
        names = [event.name for event in events if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    return sum(event.name in _CPU_KERNELS for event in events)

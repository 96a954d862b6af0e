"""What an operator launches and moves, worked out before it is measured.

Every operand counts once, whatever a cache may save or a write may fetch: the least that the operation needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchkit.timing.profiling import quiet_profiler


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


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def kernel(*, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> Traffic:
    """One kernel that reads some tensors and writes others; none at all where there is nothing to write."""
    written = sum(size_of(x) for x in writes)
    return Traffic(1, sum(size_of(x) for x in reads), written) if written else Traffic()


def elementwise(like: Tensor, *, inputs: int) -> Traffic:
    """One kernel that reads ``inputs`` operands like ``like`` and writes one."""
    return kernel(reads=(like,) * inputs, writes=(like,))


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


def scale_traffic(x: Tensor) -> Traffic:
    """One kernel of 2·N·itemsize bytes: nothing to fuse, the floor of a rung."""
    return elementwise(x, inputs=1)


def bias_gelu_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """One kernel: x and the bias read, y written."""
    return kernel(reads=(x, bias), writes=(x,))


def bias_gelu_unfused_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """``x + bias`` written and read again by the GELU: two kernels, twice the bytes."""
    return kernel(reads=(x, bias), writes=(x,)) + elementwise(x, inputs=1)


def bias_gelu_backward_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """Gradient, x and bias read, dx and dbias written; the partial sums of dbias are not counted.

    Two kernels on a GPU, the second for dbias; on a CPU one operator is all that a profiler sees.
    """
    if not x.is_cuda:
        return kernel(reads=(x, x, bias), writes=(x, bias))
    return kernel(reads=(x, x, bias), writes=(x,)) + kernel(reads=(), writes=(bias,))


def bias_gelu_backward_unfused_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """What autograd does for ``gelu(x + bias)``: the derivative from the saved sum, and the sum of its result."""
    return elementwise(x, inputs=2) + kernel(reads=(x,), writes=(bias,))


def scale_shift_relu_traffic(y: Tensor) -> Traffic:
    """After the convolution: its result read and written once, in place; the channels' numbers are not counted."""
    return elementwise(y, inputs=1)


def batch_norm_relu_traffic(y: Tensor) -> Traffic:
    """The same as two operators: each reads and writes all of it."""
    return elementwise(y, inputs=1) + elementwise(y, inputs=1)


# On a CPU the profiler sees operators, not kernels: these are the ones of this package's examples that walk the data.
_CPU_KERNELS = {
    "aten::add", "aten::mul", "aten::clone", "aten::gelu", "aten::gelu_backward", "aten::sum", "aten::relu",
    "aten::native_batch_norm",
}  # fmt: skip
_OURS = ("custom_ops::", "custom_ops_kernels::")


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
    # Without acc_events some versions warn of clearing.
    with quiet_profiler(), profile(activities=activities, acc_events=True) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiler.events() or []
    if device == "cuda":
        names = [event.name for event in events if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    return sum(event.name in _CPU_KERNELS or event.name.startswith(_OURS) for event in events)

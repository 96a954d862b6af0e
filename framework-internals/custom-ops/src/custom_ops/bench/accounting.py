"""The kernel launches and memory traffic of each operator, predicted before they are measured.

Every operand is counted once. Caches may save traffic and writes may fetch lines first; neither is modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchkit.timing.profiling import quiet_profiler
from custom_ops.builds.runtime_compiled import rows_are_few


@dataclass(frozen=True)
class Traffic:
    """Launches and memory traffic of one call.

    Attributes:
        launches: Number of kernels launched.
        read: Bytes read.
        written: Bytes written.
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

    def __rmul__(self, times: int) -> Traffic:
        return Traffic(times * self.launches, times * self.read, times * self.written)


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def kernel(*, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> Traffic:
    """One kernel that reads some tensors and writes others; no kernel at all if there is nothing to write."""
    written = sum(size_of(x) for x in writes)
    return Traffic(1, sum(size_of(x) for x in reads), written) if written else Traffic()


def elementwise(like: Tensor, *, inputs: int) -> Traffic:
    """One kernel that reads ``inputs`` operands like ``like`` and writes one."""
    return kernel(reads=(like,) * inputs, writes=(like,))


def vector_add_traffic(a: Tensor, b: Tensor) -> Traffic:
    """One kernel of 3·N·itemsize bytes, after a copy of 2·N·itemsize for each operand that is not contiguous.

    A GPU's kernel reads a transposed matrix as it lies.
    """
    copied = [x for x in (a, b) if not x.is_contiguous() and not (x.is_cuda and x.dim() == 2 and x.stride(0) == 1)]
    return sum((elementwise(x, inputs=1) for x in copied), Traffic()) + elementwise(a, inputs=2)


def axpb_traffic(x: Tensor, b: Tensor) -> Traffic:
    """The same as :func:`vector_add_traffic`: the multiplication needs no traffic."""
    return vector_add_traffic(x, b)


def axpb_unfused_traffic(x: Tensor) -> Traffic:
    """``alpha * x`` then ``+ b``, contiguous: two kernels, 5·N·itemsize bytes."""
    return elementwise(x, inputs=1) + elementwise(x, inputs=2)


def scale_traffic(x: Tensor) -> Traffic:
    """One kernel of 2·N·itemsize bytes; there is nothing to fuse."""
    return elementwise(x, inputs=1)


def bias_gelu_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """One kernel that reads x and the bias and writes y."""
    return kernel(reads=(x, bias), writes=(x,))


def bias_gelu_unfused_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """Two kernels: the sum ``x + bias`` is written, and GELU reads it again; twice the bytes."""
    return kernel(reads=(x, bias), writes=(x,)) + elementwise(x, inputs=1)


def bias_gelu_backward_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """Reads the gradient, x and the bias, writes dx and dbias; the partial sums of dbias are not counted.

    On a GPU these are two kernels, the second for dbias, unless the rows are few. On a CPU, one operator is seen.
    """
    columns, at_once = bias.numel(), 16 // x.element_size()
    width = 1 if columns % at_once else at_once
    if not x.is_cuda or rows_are_few(x.numel() // max(1, columns), columns, width, x.device):
        return kernel(reads=(x, x, bias), writes=(x, bias))
    return kernel(reads=(x, x, bias), writes=(x,)) + kernel(reads=(), writes=(bias,))


def bias_gelu_backward_unfused_traffic(x: Tensor, bias: Tensor) -> Traffic:
    """Autograd's kernels for ``gelu(x + bias)``: the derivative at the saved sum, and the reduction to dbias."""
    return elementwise(x, inputs=2) + kernel(reads=(x,), writes=(bias,))


def glu_traffic(gate: Tensor, up: Tensor) -> Traffic:
    """One kernel that reads the gate and the other factor and writes their product."""
    return kernel(reads=(gate, up), writes=(gate,))


def glu_unfused_traffic(gate: Tensor, up: Tensor) -> Traffic:
    """Two kernels: the activation is written, and the product reads it again; 5·N·itemsize bytes."""
    return elementwise(gate, inputs=1) + elementwise(gate, inputs=2)


def glu_backward_traffic(grad: Tensor, gate: Tensor, up: Tensor) -> Traffic:
    """One kernel that reads the gradient and both operands and writes both gradients; nothing else was saved."""
    return kernel(reads=(grad, gate, up), writes=(gate, up))


def glu_backward_unfused_traffic(grad: Tensor, gate: Tensor, up: Tensor) -> Traffic:
    """Autograd's kernels: the gradient times the saved activation, times the other factor, and the derivative."""
    return 3 * elementwise(gate, inputs=2)


def rotary_traffic(x: Tensor, cos: Tensor, sin: Tensor) -> Traffic:
    """One kernel that reads x and the tables and writes y."""
    return kernel(reads=(x, cos, sin), writes=(x,))


def rotary_unfused_traffic(x: Tensor, cos: Tensor, sin: Tensor) -> Traffic:
    """Four products of half of x with a table, a difference, a sum, and their concatenation: seven kernels.

    Tensors of 16 bits are cast to the dtype of the tables before and back after: nine kernels.
    """
    whole = torch.empty_like(x, dtype=cos.dtype)
    half = whole[..., : x.shape[-1] // 2]
    products = 2 * (kernel(reads=(half, cos), writes=(half,)) + kernel(reads=(half, sin), writes=(half,)))
    traffic = products + 2 * elementwise(half, inputs=2) + elementwise(whole, inputs=1)
    if x.dtype != cos.dtype:
        traffic += kernel(reads=(x,), writes=(whole,)) + kernel(reads=(whole,), writes=(x,))
    return traffic


def cross_entropy_traffic(logits: Tensor, targets: Tensor) -> Traffic:
    """One kernel that reads the logits and the targets, and writes the losses and the gradient over the logits."""
    rows = logits.numel() // logits.shape[1]
    losses = Traffic(written=rows * (8 if logits.dtype == torch.float64 else 4))
    return kernel(reads=(logits, targets), writes=(logits,)) + losses


def cross_entropy_unfused_traffic(logits: Tensor, targets: Tensor) -> Traffic:
    """Autograd's kernels for ``F.cross_entropy`` of float32 logits.

    They compute the log-softmax; its element at each target; the gradient of that, which is zero elsewhere; and the
    gradient of the logits. On a GPU a separate kernel writes the zeros.
    """
    of_rows = logits.new_empty(targets.shape)
    zeros = kernel(reads=(), writes=(logits,))
    chosen = kernel(reads=(of_rows, targets), writes=(of_rows,))
    back = chosen + zeros if logits.is_cuda else chosen + Traffic(written=zeros.written)
    return elementwise(logits, inputs=1) + chosen + back + elementwise(logits, inputs=2)


# On a CPU the profiler sees operators, not kernels. Of those in this package's examples, these pass over the data.
_CPU_KERNELS = {
    "aten::add", "aten::sub", "aten::mul", "aten::cat", "aten::clone", "aten::gelu", "aten::gelu_backward", "aten::sum",
    "aten::silu", "aten::silu_backward",
    "aten::relu", "aten::native_batch_norm", "aten::_log_softmax", "aten::nll_loss_forward", "aten::nll_loss_backward",
    "aten::_log_softmax_backward_data",
}  # fmt: skip
_OURS = ("custom_ops::", "custom_ops_kernels::")


def count_launches(function: Callable[[], object], *, device: str) -> int:
    """Count the kernels that one call launches on a GPU, or the operators that pass over the data on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    function()
    if device == "cuda":
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with quiet_profiler(), profile(activities=activities, acc_events=True) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiler.events() or []
    if device == "cuda":
        names = [event.name for event in events if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)
    return sum(event.name in _CPU_KERNELS or event.name.startswith(_OURS) for event in events)

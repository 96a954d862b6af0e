"""A Triton kernel with two reads and two writes per element, for which PyTorch has no operator; needs a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192


@triton.jit
def _add_and_subtract(x, y, total, difference, count, BLOCK: tl.constexpr):
    # 64-bit offsets, because a tensor may have more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    a = tl.load(x + offsets, mask=inside)
    b = tl.load(y + offsets, mask=inside)
    tl.store(total + offsets, a + b, mask=inside)
    tl.store(difference + offsets, a - b, mask=inside)


def add_and_subtract(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, difference: torch.Tensor) -> None:
    """Write x + y and x - y: two reads and two writes per element.

    Args:
        x: Contiguous tensor on a GPU, of any shape and floating dtype. The other tensors have its shape and dtype.
        y: The other operand.
        total: Receives x + y.
        difference: Receives x - y.
    """
    _add_and_subtract[(triton.cdiv(x.numel(), _BLOCK),)](x, y, total, difference, x.numel(), BLOCK=_BLOCK, num_warps=8)

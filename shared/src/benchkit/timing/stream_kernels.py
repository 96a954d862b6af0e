"""The one memory-traffic kernel that PyTorch has no operator for; imported only where a GPU is measured."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192


@triton.jit
def _add_and_subtract(x, y, total, difference, count, BLOCK: tl.constexpr):
    # 64-bit: a tensor may hold more than 2^31 elements.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    a = tl.load(x + offsets, mask=inside)
    b = tl.load(y + offsets, mask=inside)
    tl.store(total + offsets, a + b, mask=inside)
    tl.store(difference + offsets, a - b, mask=inside)


def add_and_subtract(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor, difference: torch.Tensor) -> None:
    """Write x + y and x - y: two reads and two writes an element.

    Args:
        x: contiguous, any shape and floating dtype, on a GPU; the others are like it.
        y: the other operand.
        total: receives x + y.
        difference: receives x - y.
    """
    _add_and_subtract[(triton.cdiv(x.numel(), _BLOCK),)](x, y, total, difference, x.numel(), BLOCK=_BLOCK, num_warps=8)

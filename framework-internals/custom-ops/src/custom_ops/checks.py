"""What the fake kernels refuse: the same arguments, in the same words, as the C++ ones in ``binding.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_operands(op: str, first: str, x: Tensor, b: Tensor) -> None:
    """Check that two operands go together.

    Args:
        op: name of the operator, for the message.
        first: what it calls the first operand.
        x: the first operand.
        b: the second one, which the message is about.

    Raises:
        ValueError: for different devices or shapes.
        TypeError: for different dtypes, or one that has no kernel.
    """
    if b.device != x.device:
        raise ValueError(
            f"{op}: argument 'b': expected device {x.device} like '{first}', got {b.device} (move it there with .to())"
        )
    if b.dtype != x.dtype:
        raise TypeError(
            f"{op}: argument 'b': expected dtype {x.dtype} like '{first}', got {b.dtype} "
            "(dtypes are not promoted; use .to())"
        )
    if b.shape != x.shape:
        raise ValueError(
            f"{op}: argument 'b': expected shape {list(x.shape)} like '{first}', got {list(b.shape)} "
            "(shapes are not broadcast; use .expand())"
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: argument '{first}': expected dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, "
            f"got {x.dtype}"
        )

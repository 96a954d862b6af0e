"""Two operators of the dispatcher, defined once a process.

A target's file runs again each time it is loaded. A second definition of an operator frees the first, which a model of
an earlier load would still call.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("planted::many", mutates_args=())
def many_kernel(x: Tensor) -> Tensor:
    """The identity, in 2,000 calls of operators."""
    for _ in range(1_000):
        x = x.neg().neg()
    return x.clone()


many_kernel.register_fake(torch.empty_like)
many_kernel.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("planted::one", mutates_args=())
def one_kernel(x: Tensor) -> Tensor:
    """The identity, in one call."""
    return x.clone()


one_kernel.register_fake(torch.empty_like)
one_kernel.register_autograd(lambda ctx, gradient: gradient)

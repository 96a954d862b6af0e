"""What this package takes from torch that is not public; tests/test_rmsnorm_operators.py fails where it has moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant_under_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile call ``function`` while it traces, and take the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets this attribute, but imports torch._dynamo, and with it
    Triton: seconds that ``import rmsnorm_fused`` should not take.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def reshaped(result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A contiguous result in another shape, which autograd does not take for a view.

    It refuses to have a view that an operator returns modified in place, and notes views made in the kernel of one.

    Args:
        result: Tensor to which nothing else refers.
        shape: Shape with the same number of elements.
    """
    return torch.ops.aten._unsafe_view(result, shape)


def is_refusal_of_func(error: RuntimeError) -> bool:
    """Whether torch.func refused a derivative because ``torch.library.register_autograd`` registered it.

    That makes an ``autograd.Function`` without the method that the message is about, which nobody can add to it.

    Args:
        error: Exception raised by a call of the operator.
    """
    return "functorch transforms" in str(error) and "setup_context" in str(error)


def kept_graphs() -> AbstractContextManager[None]:
    """Have torch.compile make backward passes that can be run again and again on a graph that is kept.

    By default a compiled backward pass writes over what the forward pass saved, and refuses ``retain_graph``.
    """
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)

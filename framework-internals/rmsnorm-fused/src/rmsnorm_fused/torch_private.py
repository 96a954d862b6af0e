"""The private parts of torch that this package uses; tests/test_rmsnorm_operators.py fails if one moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad


def reshaped(result: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Reshape a contiguous result without making it a view in autograd's sense.

    Autograd tracks views made inside an operator's kernel, and forbids in-place changes of a view that an operator
    returns.
    """
    return torch.ops.aten._unsafe_view(result, shape)


def forward_mode_is_on() -> bool:
    """Whether a forward-mode derivative is being computed, by torch.autograd.forward_ad or torch.func.jvp."""
    return forward_ad._current_level >= 0


def nothing_watches() -> bool:
    """Whether no mode, transform of torch.func or forward-mode level would see a call of an operator."""
    return (
        forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_torch_function_mode_enabled()
        and functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def is_refusal_of_func(error: RuntimeError) -> bool:
    """Whether torch.func rejected a derivative that ``torch.library.register_autograd`` registered.

    That function makes an ``autograd.Function`` without ``setup_context``, the method that the error message names, and
    the method cannot be added afterwards.
    """
    return "functorch transforms" in str(error) and "setup_context" in str(error)


def kept_graphs() -> AbstractContextManager[None]:
    """Make torch.compile generate backward passes that can run repeatedly on a retained graph.

    By default a compiled backward pass overwrites what the forward pass saved, and does not support ``retain_graph``.
    """
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)


def functionalisation() -> type:
    """The dispatch mode in which torch traces what it compiles; ``torch.library.triton_op`` opens operators in it."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    return FunctionalTensorMode

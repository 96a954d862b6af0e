"""Tensors that stand for Python numbers ("wrapped numbers" in torch's C++).

A Python kernel gets such an argument as a plain number, and ``call_boxed`` refuses a number where the schema says
Tensor. So a shim has to make the tensor again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dispatcher_trace.capture.key_sets import bits_of, key_set

# The operators that making a wrapped number calls with that very number.
WRAPPING_OPERATORS = ("aten::mul.Tensor", "aten::to.dtype", "aten::_to_copy", "aten::copy_")

Symbol = torch.SymInt | torch.SymFloat | torch.SymBool
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Number = complex | Symbol


def wrapped_number(value: complex) -> torch.Tensor:
    """The tensor that torch's C++ makes of a Python number: zero-dimensional, and weak in type promotion.

    An ordinary zero-dimensional tensor would change results: ``x / 2.0`` with a zero-dimensional float32 ``x`` stays
    float32 only because the wrapped 2.0 is weak. Torch has no public function for it. A multiplication saves such a
    tensor for its backward, and this returns that one. :data:`WRAPPING_OPERATORS` must not be shimmed meanwhile.

    Args:
        value: An int, float, bool or complex.
    """
    with _outside_transforms(), torch.inference_mode(False), torch.enable_grad():
        factor = torch.ones((), dtype=torch.float64, device="cpu", requires_grad=True)
        return (factor * value).grad_fn._saved_other  # type: ignore[union-attr]


def wrapped_symbol(symbol: Symbol) -> torch.Tensor:
    """The tensor that torch's C++ makes of a symbolic size (``x * x.shape[0]`` under symbolic tracing).

    It is a wrapped number of the symbol's kind. Nobody reads its value: code that unwraps it takes the symbol from an
    attribute of the Python object. :data:`WRAPPING_OPERATORS` must not be shimmed meanwhile.

    Args:
        symbol: The symbolic number.
    """
    placeholder = {torch.SymInt: 7777777, torch.SymFloat: float("nan"), torch.SymBool: True}[type(symbol)]
    number = wrapped_number(placeholder)
    number._wrapped_number = symbol  # type: ignore[attr-defined]
    return number


def plain_number(value: complex, wrapped: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """An ordinary zero-dimensional tensor that has the same effect as a wrapped number in one call; None if none has.

    It must promote the operands to the same dtype and reach the kernel with the same value. If operands have
    dimensions, a tensor of the widest dtype of its kind is as weak as a wrapped number. If all are zero-dimensional, it
    must have the dtype of the operation; and, as kernels compute half precision in float32, hold the value exactly.
    Under jvp it must also have the number's own dtype, because the tangent that the number gets has it.

    Args:
        value: The number.
        wrapped: The same number as a wrapped number.
        operands: The other tensors of the call.
    """
    with _outside_transforms():
        like = [torch.empty((1,) * min(operand.dim(), 1), dtype=operand.dtype) for operand in operands]
        meant = _promoted(like, wrapped)
        has_tangent = forward_mode() and not isinstance(value, int)
        for dtype in (wrapped.dtype,) if has_tangent else (wrapped.dtype, meant):
            plain = torch.tensor(value, dtype=dtype)
            half = dtype in (torch.float16, torch.bfloat16)
            if _promoted(like, plain) == meant and not (half and plain.item() != value):
                return plain
    return None


def _promoted(operands: Sequence[torch.Tensor], number: torch.Tensor) -> torch.dtype:
    """The dtype of a call; vmap also casts a number alone, for a tensor without dimensions."""
    types = [torch.result_type(operand, number) for operand in operands]
    return functools.reduce(torch.promote_types, types or [number.dtype])


def forward_mode() -> bool:
    """Whether this code runs under forward-mode differentiation: ``torch.func.jvp`` or ``forward_ad.dual_level``."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    jvp = any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)
    return jvp or torch.autograd.forward_ad._current_level >= 0


def differentiating() -> bool:
    """Whether the innermost functorch transform of this thread is ``grad``, ``vjp`` or ``jvp``."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return interpreter is not None and interpreter.key() in (kinds.Grad, kinds.Jvp)


def _outside_transforms() -> AbstractContextManager[None]:
    """A context with the thread state of ordinary code: nothing that functorch or a mode includes or excludes."""
    guard: Callable[..., Any] = torch._C._ForceDispatchKeyGuard
    return guard(key_set(bits_of("BackendSelect", "ADInplaceOrView")), key_set(0))

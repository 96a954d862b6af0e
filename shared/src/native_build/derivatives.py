"""Kernels of operators for the key ``Autograd`` that refuse what they have no derivative for, instead of dropping it.

This module holds all that the package uses of what is private to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _any_requires_grad as any_requires_grad
from torch._C import _functorch as functorch
from torch._library.autograd import Info, make_autograd_impl
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves


def has_tangent(*arguments: Any) -> bool:
    """Whether an argument carries a tangent of forward-mode differentiation, including that of ``torch.func``."""
    if forward_ad._current_level < 0:
        return False
    stack = functorch.get_interpreter_stack() or []
    under_jvp = any(interpreter.key() == functorch.TransformType.Jvp for interpreter in stack)
    for tensor in tree_leaves(arguments):
        if not isinstance(tensor, torch.Tensor):
            continue
        while functorch.is_functorch_wrapped_tensor(tensor):
            if under_jvp:  # an inner vmap does not tell whether it maps over a tangent
                return True
            tensor = functorch.get_unwrapped(tensor)
        if forward_ad.unpack_dual(tensor).tangent is not None:
            return True
    return False


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether ``torch.vmap`` maps over a tensor, as it does over the gradients of ``is_grads_batched=True``."""
    if torch.compiler.is_dynamo_compiling():  # which knows the first of these
        return functorch.is_batchedtensor(tensor)
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, as under ``FakeTensorMode`` and in ``torch.export``."""
    return isinstance(tensor, FakeTensor)


def derivative_kernel(
    operator: OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
    *,
    remedy: str = "use reverse mode",
) -> Callable[..., Any]:
    """The kernel that ``torch.library.register_autograd`` registers, which also refuses tangents.

    torch's own passes a call on below autograd if no argument requires a gradient, and drops a tangent on the way:
    ``torch.func.jvp`` returns zeros.

    Args:
        operator: The operator.
        backward: Its derivative, for ``register_autograd``.
        setup_context: Likewise.
        remedy: What to do instead, for the error.

    Returns:
        A kernel for the key ``Autograd``; it takes the key set first.
    """
    kernel = make_autograd_impl(_with_schema_read_once(operator), Info(backward, setup_context))

    def derivative(keys: Any, *arguments: Any, **named: Any) -> Any:
        if has_tangent(*arguments):
            raise NotImplementedError(f"{operator.name()} has no forward-mode derivative; {remedy}")
        return kernel(keys, *arguments, **named)

    return derivative


class _Delegate:
    """An object with some attributes of its own; the others are those of another object."""

    def __init__(self, of: Any, **own: Any) -> None:
        vars(self).update(own, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _with_schema_read_once(operator: OpOverload) -> Any:
    """The operator, with its schema's arguments in a list.

    ``schema.arguments`` makes an object of every argument at each reading. torch fills in defaults at every call that
    needs a gradient and reads it once for each argument: 190 µs for 13 of them, of a call of 240.
    """
    schema = operator._schema
    return _Delegate(operator, _schema=_Delegate(schema, arguments=list(schema.arguments)))


def without_derivative(operator: OpOverload, *, public: bool) -> Callable[..., Any]:
    """A kernel for the key ``Autograd`` that refuses tangents, and of a public operator gradients in the backward pass.

    Without one, torch drops a tangent, and warns in the backward pass that it drops a gradient. The results of an
    operator that is not public need no gradient.
    """

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        if has_tangent(*arguments):
            raise NotImplementedError(f"{operator.name()} has no forward-mode derivative")

        def below() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **named)

        if public and torch.is_grad_enabled() and any_requires_grad(*(leaves := tree_leaves(arguments))):
            return _NotDifferentiable.apply(operator, below, *leaves)  # type: ignore[no-untyped-call]
        return below()

    return kernel


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: OpOverload, below: Callable[[], Any], *arguments: Any) -> Any:
        ctx.operator = operator
        return below()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"derivative for {ctx.operator.name()} is not implemented")

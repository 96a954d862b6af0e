"""The private parts of torch that this package and its tests use; a test fails if one moves."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C import _any_requires_grad as any_requires_grad
from torch._C import _are_functorch_transforms_active as transforms_active
from torch._C import _dispatch_get_all_op_names as operator_names
from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as set_excluded
from torch._C import _functorch as functorch
from torch._library.autograd import Info, make_autograd_impl
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

__all__ = [
    "OpOverload",
    "TorchVersion",
    "any_requires_grad",
    "below_autograd",
    "check_cuda_version",
    "derivative_kernel",
    "graph_break",
    "has_tangent",
    "in_cpp",
    "operator_names",
    "operator_namespaces",
    "transforms_active",
    "without_derivative",
]


def graph_break() -> type[Exception]:
    """The error of ``torch.compile(fullgraph=True)`` at a graph break; torch._dynamo takes over a second to import."""
    from torch._dynamo.exc import Unsupported

    return Unsupported


def check_cuda_version(compiler: str, version: TorchVersion) -> None:
    """Compare nvcc's version with that of torch's CUDA, as torch does; its module imports setuptools."""
    from torch.utils.cpp_extension import _check_cuda_version

    _check_cuda_version(compiler, version)


def in_cpp(overload: OpOverload) -> Callable[..., Any]:
    """Return the C++ callable of an overload, which skips its Python wrapper (0.3 µs per call)."""
    return overload._op


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


def derivative_kernel(
    operator: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> Callable[..., Any]:
    """The kernel that ``torch.library.register_autograd`` registers, which also refuses tangents.

    torch's own passes a call on below autograd if no argument requires a gradient, and drops a tangent on the way.

    Returns:
        A kernel for the key ``Autograd``; it takes the key set first.
    """
    kernel = make_autograd_impl(operator, Info(backward, setup_context))

    def derivative(keys: Any, *arguments: Any, **named: Any) -> Any:
        if has_tangent(*arguments):
            raise NotImplementedError(f"{operator.name()} has no forward-mode derivative; use reverse mode")
        return kernel(keys, *arguments, **named)

    return derivative


def below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call an operator without its kernel for autograd; torch's context manager takes three times as long."""

    def call(*arguments: Any) -> Any:
        outside = is_excluded(DispatchKey.AutogradFunctionality)
        set_excluded(DispatchKey.AutogradFunctionality, True)
        try:
            return function(*arguments)
        finally:
            set_excluded(DispatchKey.AutogradFunctionality, outside)

    return call


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


def operator_namespaces() -> frozenset[str]:
    """All names in ``torch.ops``: the namespaces of operators, and its other attributes."""
    return frozenset(dir(torch.ops)).union(name.split("::")[0] for name in operator_names())

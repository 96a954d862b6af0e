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
from torch._ops import OpOverload
from torch.torch_version import TorchVersion

__all__ = [
    "OpOverload",
    "TorchVersion",
    "any_requires_grad",
    "below_autograd",
    "check_cuda_version",
    "graph_break",
    "in_cpp",
    "operator_names",
    "operator_namespaces",
    "transforms_active",
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


def operator_namespaces() -> frozenset[str]:
    """All names in ``torch.ops``: the namespaces of operators, and its other attributes and those of a namespace."""
    others = (*dir(torch.ops), *dir(type(torch.ops)), *vars(torch._ops._OpNamespace("")))
    return frozenset(others).union(name.split("::")[0] for name in operator_names())

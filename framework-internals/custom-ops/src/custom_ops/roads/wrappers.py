"""Ways to expose one compiled function to users, from a plain function to an operator with derivatives.

All of them except torch's own run the same kernel, so a difference in time is the overhead of the call.

A registration has no place for a forward-mode derivative. Left to itself torch then drops a tangent: ``torch.func.jvp``
returns zeros. The operators with a derivative refuse it here; ``library_only`` shows what plain ``torch.library`` does,
and has no derivative of either kind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from custom_ops.builds.loading import load
from custom_ops.operators.checks import check_operands
from custom_ops.operators.elementwise import vector_add
from custom_ops.roads.just_in_time import load as extension
from native_build.derivatives import derivative_kernel

AddFunction = Callable[[Tensor, Tensor], Tensor]

# This package's registrations of vector_add: the function itself, and its operators with and without derivatives.
SHIPPED = "custom_ops.vector_add"
STABLE = "stable ABI, no autograd"
STABLE_AUTOGRAD = "stable ABI, with autograd"


def wrappers() -> Mapping[str, AddFunction]:
    """All ways by name: first torch's own operator, then from the plainest to the most complete."""
    load()
    return {
        "torch.add": torch.add,
        "pybind11 function": extension().vector_add,
        "autograd.Function": _autograd_function,
        "torch.library, no autograd": torch.ops.custom_ops_roads.library_only.default,
        "torch.library + register_autograd": torch.ops.custom_ops_roads.with_autograd.default,
        "custom_op decorator": _decorated,
        STABLE: torch.ops.custom_ops_kernels.vector_add.default,
        STABLE_AUTOGRAD: torch.ops.custom_ops.vector_add.default,
        SHIPPED: vector_add,
    }


class _AddFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return extension().vector_add(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        a, b = tangents
        return b if a is None else a.clone() if b is None else a + b


def _autograd_function(a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = _AddFunction.apply(a, b)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op("custom_ops_roads::decorated", mutates_args=())
def _decorated(a: Tensor, b: Tensor) -> Tensor:
    return extension().vector_add(a, b)


@_decorated.register_fake
def _fake(a: Tensor, b: Tensor) -> Tensor:
    check_operands("vector_add", "a", a, b)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _add(a: Tensor, b: Tensor) -> Tensor:
    return extension().vector_add(a, b)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


_decorated.register_autograd(_backward)
for _name in ("custom_ops_roads::library_only", "custom_ops_roads::with_autograd"):
    torch.library.define(_name, "(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_name, ("cpu", "cuda"), _add)
    torch.library.register_fake(_name, _fake)

# In place of register_autograd's kernel, and of the decorator's, of which the dispatcher warns.
_library = torch.library.Library("custom_ops_roads", "FRAGMENT")
for _operator in (torch.ops.custom_ops_roads.with_autograd.default, torch.ops.custom_ops_roads.decorated.default):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*other operators may also be overridden", category=UserWarning)
        _kernel = derivative_kernel(_operator, _backward)
        _library.impl(_operator.name(), _kernel, "Autograd", with_keyset=True, allow_override=True)

"""Ways to hand one built function to users, each with what the others lack; the measurements call them side by side.

All of them end in the same ``vector_add`` of the built module, so that what they cost is what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from custom_ops.builds import extension
from custom_ops.checks import check_operands
from custom_ops.vector_add import vector_add

AddFunction = Callable[[Tensor, Tensor], Tensor]

SHIPPED = "torch.library + register_autograd"  # how this package registers vector_add


def wrappers() -> Mapping[str, AddFunction]:
    """Every way by name: torch's own operator first, then from the barest to those with everything."""
    return {
        "torch.add": torch.add,
        "pybind11 function": extension().vector_add,
        "autograd.Function": _autograd_function,
        "torch.library, no autograd": torch.ops.custom_ops_roads.library_only.default,
        SHIPPED: vector_add,
        "custom_op decorator": _decorated,
    }


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return extension().vector_add(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0]


def _autograd_function(a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = _Add.apply(a, b)  # type: ignore[no-untyped-call]
    return result


torch.library.define(
    "custom_ops_roads::library_only", "(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl("custom_ops_roads::library_only", ("cpu", "cuda"))
def _library_only(a: Tensor, b: Tensor) -> Tensor:
    return extension().vector_add(a, b)


@torch.library.custom_op("custom_ops_roads::decorated", mutates_args=())
def _decorated(a: Tensor, b: Tensor) -> Tensor:
    return extension().vector_add(a, b)


@torch.library.register_fake("custom_ops_roads::library_only")
@_decorated.register_fake
def _fake(a: Tensor, b: Tensor) -> Tensor:
    check_operands("vector_add", "a", a, b)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return gradient, gradient


_decorated.register_autograd(_backward)

"""What Python registers for the operators of the library: fake kernels, derivatives and autocast rules.

The library defines every operator in two namespaces. ``custom_ops`` is public and has derivatives. For the elementwise
operators and bias_gelu these are autograd nodes in C++, if they could be compiled
(:mod:`custom_ops.builds.autograd_nodes`). The others have torch's kernel in Python, which costs every call 6 µs, even a
call that needs no gradient. ``custom_ops_kernels`` has no derivatives; the functions of this
package call it when no gradient is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAMESPACES = ("custom_ops", "custom_ops_kernels")


@dataclass(frozen=True)
class Autograd:
    """The derivative of an operator: the arguments of ``torch.library.register_autograd``."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


@dataclass(frozen=True)
class Rules:
    """What is registered for one operator.

    Attributes:
        name: Name of the operator, without its namespace.
        fake: Fake kernel: returns results of the right shape, dtype and strides, and raises the kernel's errors.
        autograd: The derivative; None if the operator has none.
        autocast: Maps (arguments, dtype) to the arguments under autocast; None leaves them as they are.
        overloads: Names of overloads with additional arguments; they share ``fake``.
        batched: Computes the operator for a whole ``torch.vmap`` from (operator, arguments, which of them are mapped
            over, number of samples). The dimension that is mapped over comes first. Where it is missing or returns
            None, each sample is computed by itself.
    """

    name: str
    fake: Callable[..., Any]
    autograd: Autograd | None = None
    autocast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]] | None = None
    overloads: tuple[str, ...] = ()
    batched: Callable[..., Any] | None = None


_libraries: list[torch.library.Library] = []  # a registration lasts as long as its object


def register(rules: Rules, *, derivative: Callable[..., Callable[..., Any]] | None) -> None:
    """Register the rules of an operator that a library has defined, in both namespaces.

    Args:
        rules: What to register for the operator.
        derivative: Makes an autograd kernel from (operator, backward, setup_context); None if ``autograd_nodes`` has
            registered one.
    """
    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for overload in ("", *(f".{name}" for name in rules.overloads)):
            torch.library.register_fake(f"{namespace}::{rules.name}{overload}", rules.fake, lib=library)
        if not rules.name.endswith("_"):
            operator = getattr(getattr(torch.ops, namespace), rules.name).default
            rule = partial(_mapped, operator, rules.batched)
            torch.library.register_vmap(f"{namespace}::{rules.name}", rule, lib=library)
        if rules.autocast is not None:
            _register_autocast(library, namespace, rules.name, rules.autocast)
        if rules.autograd is not None and derivative is not None and namespace == NAMESPACES[0]:
            operator = getattr(getattr(torch.ops, namespace), rules.name).default
            kernel = derivative(operator, rules.autograd.backward, rules.autograd.setup_context)
            library.impl(rules.name, kernel, "Autograd", with_keyset=True)


def _mapped(operator: Any, batched: Callable[..., Any] | None, info: Any, dims: Any, *arguments: Any) -> Any:
    """The rule of ``torch.library.register_vmap``."""
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, dims, strict=True)]
    mapped = [dim is not None for dim in dims]
    found = None if batched is None else batched(operator, moved, mapped, info.batch_size)
    if found is None:
        samples = [
            operator(*(x[index] if over else x for x, over in zip(moved, mapped, strict=True)))
            for index in range(info.batch_size)
        ]
        several = isinstance(samples[0], tuple)
        found = tuple(map(torch.stack, zip(*samples, strict=True))) if several else torch.stack(samples)
    return found, (0,) * len(found) if isinstance(found, tuple) else 0


def elementwise_batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Any:
    """The ``batched`` rule of an operator whose tensors have one shape."""
    return operator(
        *(
            x.expand(size, *x.shape) if isinstance(x, Tensor) and not over else x
            for x, over in zip(arguments, mapped, strict=True)
        )
    )


def _register_autocast(
    library: torch.library.Library,
    namespace: str,
    name: str,
    cast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]],
) -> None:
    operator = getattr(getattr(torch.ops, namespace), name).default
    for device_type in ("cpu", "cuda"):

        def kernel(*arguments: Any, device_type: str = device_type, **named: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            with torch.autocast(device_type, enabled=False):
                return operator(*cast(arguments, dtype), **named)

        library.impl(name, kernel, f"Autocast{device_type.upper()}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of ``x``; None where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def to_lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating-point tensor to autocast's dtype; float64 and integers stay, as under torch's own rules."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


def to_widest(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the widest of their dtypes: autocast's rule for operators with several operands."""
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]

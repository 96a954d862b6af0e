"""What the operators of the library get from Python: fake kernels, derivatives, rules for autocast.

The library defines every operator twice. ``custom_ops`` is the public namespace, with derivatives. Those of the small
operators are nodes in C++ where they could be compiled (:mod:`custom_ops.builds.autograd_nodes`). The kernel that
``torch.library.register_autograd`` puts in for the others is written in Python, and every call passes it, whether a
gradient is wanted or not: 6 µs. ``custom_ops_kernels`` does without; the functions of this package take it for calls
of those that need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMESPACES = ("custom_ops", "custom_ops_kernels")


@dataclass(frozen=True)
class Autograd:
    """The derivative of an operator, as ``torch.library.register_autograd`` takes it."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


@dataclass(frozen=True)
class Rules:
    """What is registered for one operator.

    Attributes:
        name: Name of the operator, without its namespace.
        fake: returns results of the right shape, dtype and strides without computing them; raises what the kernel does.
        autograd: The derivative; None if the operator has none.
        autocast: (arguments, dtype) → the arguments to call it with under autocast; None: as they are.
        overloads: Names of overloads with additional arguments; they share ``fake``.
    """

    name: str
    fake: Callable[..., Any]
    autograd: Autograd | None = None
    autocast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]] | None = None
    overloads: tuple[str, ...] = ()


_libraries: list[torch.library.Library] = []  # a registration ends with its object


def register(rules: Rules, *, derivative: bool = True) -> None:
    """Register the rules of an operator that a library has defined, in both namespaces.

    Args:
        rules: What to register for the operator.
        derivative: from Python too; False where the library ``autograd_nodes`` has brought it.
    """
    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for overload in ("", *(f".{name}" for name in rules.overloads)):
            torch.library.register_fake(f"{namespace}::{rules.name}{overload}", rules.fake, lib=library)
        if rules.autocast is not None:
            _register_autocast(library, namespace, rules.name, rules.autocast)
        if rules.autograd is not None and derivative and namespace == NAMESPACES[0]:
            torch.library.register_autograd(
                f"{namespace}::{rules.name}",
                rules.autograd.backward,
                setup_context=rules.autograd.setup_context,
                lib=library,
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


def to_lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating tensor in autocast's dtype; float64 and integers are left alone, as torch's own rules do."""
    takes_part = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if takes_part else tensor


def to_widest(*tensors: Tensor) -> list[Tensor]:
    """Tensors in the widest of their dtypes: autocast's rule for operators that take operands together."""
    widest = tensors[0].dtype
    for tensor in tensors[1:]:
        widest = torch.promote_types(widest, tensor.dtype)
    return [tensor.to(widest) for tensor in tensors]

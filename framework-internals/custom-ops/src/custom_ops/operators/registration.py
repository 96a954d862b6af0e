"""What Python registers for the operators at import: schemas, fake kernels, derivatives, autocast and vmap rules.

Every operator is in two namespaces. ``custom_ops`` is public and has derivatives. For the elementwise operators,
bias_gelu, swiglu, geglu, rotary, mm and flash_attention these are autograd nodes in C++, if they could be compiled
(:mod:`custom_ops.builds.autograd_nodes`). The others have torch's kernel in Python, which costs every call 6 µs, even a
call that needs no gradient. ``custom_ops_kernels`` has no derivatives and refuses tangents; the functions of this
package call it when no gradient is needed, below autograd if its kernel there is Python's.

All of this stands before there is a library. The first call of an operator that reaches a device loads the build, which
is compiled first if needed, and then runs the kernel that the build has registered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils import _pytree as pytree

NAMESPACES = ("custom_ops", "custom_ops_kernels")

# The library includes the same file (csrc/stable/library.cpp).
SCHEMAS = tuple(re.findall(r'^"(.+)",$', Path(__file__).with_name("schemas.inc").read_text("utf-8"), re.MULTILINE))

_AUTOCAST_DEVICES = ("cpu", "cuda")

# Names the process in which Python has defined the operators, so that a library which is loaded there does not.
PROCESS_VARIABLE = "CUSTOM_OPS_DEFINED_IN"


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
        fake: Fake kernel: returns results of the right shape, dtype and strides, and raises the kernel's errors. The
            operator's overloads have additional arguments and share it.
        autograd: The derivative; None if the operator has none.
        autocast: Maps (arguments, dtype) to the arguments under autocast; None leaves them as they are.
        batched: Computes the operator for a whole ``torch.vmap`` from (operator, arguments, which of them are mapped
            over, number of samples). The dimension that is mapped over comes first. Where it is missing or returns
            None, each sample is computed by itself.
        schema: Schema of an operator that Python implements, which the library does not know; else None.
        kernel: What computes that operator, on every device.
    """

    name: str
    fake: Callable[..., Any]
    autograd: Autograd | None = None
    autocast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]] | None = None
    batched: Callable[..., Any] | None = None
    schema: str | None = None
    kernel: Callable[..., Any] | None = None


_libraries: list[torch.library.Library] = []  # a registration lasts as long as its object


def register(
    operators: Iterable[Rules],
    derivative: Callable[[Any, Autograd | None], Callable[..., Any]],
    load: Callable[[], object],
) -> None:
    """Define the operators in both namespaces and register their rules, and a first call that loads the build.

    Args:
        operators: What to register for each operator.
        derivative: Makes the autograd kernel of an operator from its derivative, or None if it has none.
        load: Loads a build, which registers kernels; the first call of an operator calls it.
    """
    name_process()
    os.register_at_fork(after_in_child=name_process)  # a forked process inherits the operators
    operators = tuple(operators)
    for namespace in NAMESPACES:
        defined = hasattr(getattr(torch.ops, namespace), operators[0].name)  # by a library that was loaded before
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for schema in () if defined else SCHEMAS:
            library.define(schema)
        for rules in operators:
            if rules.schema is not None:
                library.define(rules.schema)
        for rules in operators:
            _register(library, namespace, rules, derivative, load)


def name_process() -> None:
    """Tell a library that is loaded in this process not to define the operators."""
    os.environ[PROCESS_VARIABLE] = str(os.getpid())


def _register(
    library: torch.library.Library,
    namespace: str,
    rules: Rules,
    derivative: Callable[[Any, Autograd | None], Callable[..., Any]],
    load: Callable[[], object],
) -> None:
    packet = getattr(getattr(torch.ops, namespace), rules.name)
    for overload in map(partial(getattr, packet), packet.overloads()):
        name = overload.name()
        torch.library.register_fake(name, rules.fake, lib=library)
        # Kernels for a device have precedence over one of this key, so the build's kernels replace it without a gap.
        on_devices = rules.kernel or _first_call(overload, load)
        library.impl(name, on_devices, "CompositeExplicitAutograd", with_keyset=rules.kernel is None)
        differentiable = namespace == NAMESPACES[0] and overload is packet.default
        kernel = derivative(overload, rules.autograd if differentiable else None)
        library.impl(name, kernel, "Autograd", with_keyset=True)
    operator = packet.default
    if not rules.name.endswith("_"):
        torch.library.register_vmap(operator.name(), partial(_mapped, operator, rules.batched), lib=library)
    if rules.autocast is not None:
        _register_autocast(library, operator, rules.autocast)


def _first_call(operator: Any, load: Callable[[], object]) -> Callable[..., Any]:
    """The kernel of an operator on every device for which no kernel is registered yet, or ever."""

    def kernel(keys: Any, *arguments: Any, **named: Any) -> Any:
        load()
        device = keys.highestPriorityTypeId()
        if not operator.has_kernel_for_dispatch_key(device):
            raise NotImplementedError(
                f"{operator.name()}: the build in use has no kernels for {device.name} tensors "
                "(custom_ops.build_info() says why)"
            )
        return operator.redispatch(keys, *arguments, **named)

    return kernel


def _mapped(operator: Any, batched: Callable[..., Any] | None, info: Any, dims: Any, *arguments: Any) -> Any:
    """The rule of ``torch.library.register_vmap``."""
    leaves, tree = pytree.tree_flatten(arguments)  # a stride is a list of numbers, and some operators take many tensors
    leaf_dims = pytree.tree_leaves(dims)
    moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(leaves, leaf_dims, strict=True)]
    mapped = [dim is not None for dim in leaf_dims]

    def call(*leaves: Any) -> Any:
        return operator(*pytree.tree_unflatten(leaves, tree))

    results = None if batched is None or info.batch_size == 0 else batched(call, moved, mapped, info.batch_size)
    if results is None:
        results = each_sample(call, moved, mapped, info.batch_size)
    return results, (0,) * len(results) if isinstance(results, tuple) else 0


def each_sample(function: Callable[..., Any], arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Any:
    """Call a function for each sample, which lie in the first dimension of mapped arguments, and stack the results."""
    if size == 0:  # a sample of zeros tells the shapes
        sums = [x.sum(0, keepdim=True).to(x.dtype) if over else x for x, over in zip(arguments, mapped, strict=True)]
        results = each_sample(function, sums, mapped, 1)
        return tuple(result[:0] for result in results) if isinstance(results, tuple) else results[:0]
    samples = [
        function(*(x[index] if over else x for x, over in zip(arguments, mapped, strict=True))) for index in range(size)
    ]
    several = isinstance(samples[0], tuple)
    return tuple(map(torch.stack, zip(*samples, strict=True))) if several else torch.stack(samples)


def elementwise_batched(operator: Any, arguments: Sequence[Any], mapped: Sequence[bool], size: int) -> Any:
    """The ``batched`` rule of an operator whose tensors have one shape."""
    return operator(
        *(
            x.expand(size, *x.shape) if isinstance(x, Tensor) and not over else x
            for x, over in zip(arguments, mapped, strict=True)
        )
    )


def _register_autocast(
    library: torch.library.Library, operator: Any, cast: Callable[[Sequence[Any], torch.dtype], Sequence[Any]]
) -> None:
    for device_type in _AUTOCAST_DEVICES:

        def kernel(*arguments: Any, device_type: str = device_type, **named: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            with torch.autocast(device_type, enabled=False):
                return operator(*cast(arguments, dtype), **named)

        library.impl(operator.name(), kernel, f"Autocast{device_type.upper()}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of ``x``; None where autocast is off."""
    kind = x.device.type
    has_autocast = kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)  # torch raises for "meta"
    return torch.get_autocast_dtype(kind) if has_autocast else None


def as_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Operands as autocast passes them on: in its dtype where it is on, on the device of the first."""
    dtype = autocast_dtype(x)
    return (x, *others) if dtype is None else tuple(y if y is None else to_lower(y, dtype) for y in (x, *others))


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without the casts of autocast, for a backward pass that is called under it; a compiler has its own."""
    off = is_dynamo_compiling() or autocast_dtype(x) is None
    return nullcontext() if off else torch.autocast(x.device.type, enabled=False)


def to_lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a floating-point tensor to autocast's dtype; float64 and integers stay, as under torch's own rules."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


def to_widest(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the widest of their dtypes: autocast's rule for operators with several operands."""
    widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(widest) for tensor in tensors]

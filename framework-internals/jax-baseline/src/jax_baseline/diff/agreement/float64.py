"""A function computed in float64 throughout, casts to narrower types and narrower constants among them.

In float64 rounding hides almost nothing. A function that casts to float16 inside rounds there as coarsely as ever, even
if its inputs are float64: here such a cast gives float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import Primitive, primitives
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


@contextmanager
def torch_in_float64() -> Iterator[None]:
    """Compute in float64 in torch. Attention takes its formula, because fused kernels lack float64 on a GPU."""
    with sdpa_kernel(SDPBackend.MATH), _InFloat64():
        yield


class _InFloat64(TorchDispatchMode):
    """Replaces every narrower floating tensor and dtype among the arguments of each operation by float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Tensors from outside the function, such as a model's weights: what writes into one writes into its copy.
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        args, kwargs = tree_map(self._argument, (args, kwargs or {}))
        return tree_map(_widened, func(*args, **kwargs))

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype == _wide(value.dtype):
            return _widened(value)
        if id(value) not in self._outside:
            self._outside[id(value)] = value, _widened(value)
        return self._outside[id(value)][1]


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _wide(value)
    return value.to(_wide(value.dtype)) if isinstance(value, torch.Tensor) else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


@contextmanager
def jax_in_float64() -> Iterator[None]:
    """Trace in float64 in JAX; 64-bit mode must be on. A literal after a cast is then one of float64 too."""
    with ExitStack() as stack:
        # It means "highest". Under this name jit keeps what is traced here apart from what others trace.
        stack.enter_context(jax.default_matmul_precision("float32"))
        for primitive, name in (
            (primitives.convert_element_type_p, "new_dtype"),
            (primitives.dot_general_p, "preferred_element_type"),
            (primitives.conv_general_dilated_p, "preferred_element_type"),
        ):
            stack.enter_context(_widening(primitive, name))
        yield


@contextmanager
def _widening(primitive: Primitive, name: str) -> Iterator[None]:
    """Replace one parameter of a primitive, a dtype, where it is floating. The attribute hides the method."""
    bind = primitive.bind

    def wide(*operands: Any, **parameters: Any) -> Any:
        if parameters[name] is not None and jax.numpy.issubdtype(parameters[name], np.inexact):
            complex_ = jax.numpy.issubdtype(parameters[name], np.complexfloating)
            parameters[name] = np.dtype(np.complex128 if complex_ else np.float64)
        return bind(*operands, **parameters)

    primitive.bind = wide
    try:
        yield
    finally:
        del primitive.bind

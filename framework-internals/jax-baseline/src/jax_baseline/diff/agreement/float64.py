"""A function computed in float64 throughout, casts to narrower types and narrower constants among them.

In float64 rounding hides almost nothing. A function that casts to float16 inside rounds there as coarsely as ever, even
if its inputs are float64: here such a cast gives float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Primitive
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

# Parameters that name the dtype of a result. The one of bitcast_convert_type has to have the size of the operand.
_DTYPES = {"convert_element_type": "new_dtype"} | dict.fromkeys(
    ("dot_general", "conv_general_dilated"), "preferred_element_type"
)


@contextmanager
def torch_in_float64(exact: bool = False) -> Iterator[None]:
    """Compute in float64 in torch. On a GPU attention takes its formula, because fused kernels lack float64 there.

    Args:
        exact: Whether rounding noise leaves tensors from outside alone, and does not move narrow ones by their own ε.
    """
    widened = _Widened(exact)
    formula = sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_available() else nullcontext()
    with formula, _InOperations(widened), _InFunctions(widened):
        yield


class _Widened:
    """Replaces narrower floating tensors and dtypes by float64.

    A tensor from outside the function, such as a model's weight, has one copy: what writes into it writes into that.
    """

    def __init__(self, exact: bool) -> None:
        self._convert = torch.ops.aten.to.dtype if exact else torch.ops.aten._to_copy.default
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _wide(value)
        if not isinstance(value, torch.Tensor) or value.dtype == (dtype := _wide(value.dtype)):
            return value
        if id(value) not in self._outside:
            self._outside[id(value)] = value, self._convert(value, dtype=dtype)
        return self._outside[id(value)][1]


class _InFunctions(TorchFunctionMode):
    """Widens the arguments of torch's functions, some of which ask that their dtypes are equal."""

    def __init__(self, widened: _Widened) -> None:
        super().__init__()
        self._widened = widened

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function in float64."""
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        return func(*args, **kwargs)


class _InOperations(TorchDispatchMode):
    """Widens the operands of each operation: casts by name, such as ``half``, are seen here only."""

    def __init__(self, widened: _Widened) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._widened = widened

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, _result, func(*args, **kwargs))


def _result(made: torch.Tensor) -> torch.Tensor:
    dtype = _wide(made.dtype)
    return made if made.dtype == dtype else made.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


@contextmanager
def jax_in_float64() -> Iterator[None]:
    """Trace in float64 in JAX; 64-bit mode must be on. A literal after a cast is then one of float64 too."""
    bind = Primitive.bind

    def wide(self: Primitive, *operands: Any, **parameters: Any) -> Any:
        if parameters.get(name := _DTYPES.get(self.name, "")) is not None:
            parameters[name] = _jax_wide(parameters[name])
        dtypes = {jnp.result_type(one) for one in operands if hasattr(one, "dtype")}
        # Functions of their own, such as jitted ones, were traced for the dtypes that they are given.
        if jnp.dtype("float64") in dtypes and not any("jaxpr" in name for name in parameters):
            operands = tuple(_jax_widened(one) for one in operands)
        return bind(self, *operands, **parameters)

    # "float32" means "highest". Under this name jit keeps what is traced here apart from what others trace.
    with jax.default_matmul_precision("float32"):
        Primitive.bind = wide
        try:
            yield
        finally:
            Primitive.bind = bind


def _jax_widened(operand: Any) -> Any:
    """Widen an operand. Python's numbers are weakly typed and stay."""
    narrow = hasattr(operand, "dtype") and operand.dtype != _jax_wide(operand.dtype)
    return jax.lax.convert_element_type(operand, jnp.float64) if narrow else operand


def _jax_wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype

"""A function computed in float64 throughout, casts to narrower types and narrower constants among them.

In float64 rounding hides almost nothing. A function that casts to float16 inside rounds there as coarsely as ever, even
if its inputs are float64: here such a cast gives float64.
"""

from __future__ import annotations

from collections import Counter
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

from jax_baseline.parity.rounding.source_lines import running_line

# Parameters that name the dtype of a result. The one of bitcast_convert_type has to have the size of the operand.
_DTYPES = {"convert_element_type": "new_dtype"} | dict.fromkeys(
    ("dot_general", "conv_general_dilated"), "preferred_element_type"
)
_FRACTION, _EXPONENT = 52, 11  # bits of float64
# Functions inside an operation were traced for the dtypes of the operands as they are.
_INNER = ("jaxpr", "branches")


class Widening:
    """Replaces narrower floating tensors, arrays and dtypes by float64, and keeps count of the casts it replaced.

    A tensor from outside the function, such as a model's buffer, has one copy: what writes into it writes into that. An
    object that serves several runs keeps the copies between them. If it is ``exact``, rounding noise leaves tensors
    from outside alone; otherwise it moves narrow ones by their own ε. ``seed`` is that of the noise of arrays from
    outside in JAX; None for no noise.

    Attributes:
        casts: Number of casts to a narrower type that were computed in float64, by type and line of the user's code.
        outside: Whether narrow tensors or arrays with a fraction came from outside.
    """

    def __init__(self, exact: bool = False, seed: int | None = None) -> None:
        self.casts: Counter[tuple[str, str]] = Counter()
        self.outside = False
        self.exact = exact
        self._convert = torch.ops.aten.to.dtype if exact else torch.ops.aten._to_copy.default
        self._generator = None if seed is None else np.random.Generator(np.random.PCG64(seed))
        self._outside: dict[int, tuple[Any, Any]] = {}

    def of_torch(self, value: Any) -> Any:
        """Widen a tensor or a dtype of torch; anything else stays."""
        if isinstance(value, torch.dtype):
            if (dtype := _wide(value)) != value:
                self.casts[str(value).removeprefix("torch."), running_line()] += 1
            return dtype
        if not isinstance(value, torch.Tensor) or value.dtype == (dtype := _wide(value.dtype)):
            return value
        if id(value) not in self._outside:
            self.outside = True
            self._outside[id(value)] = value, self._convert(value, dtype=dtype)
        return self._outside[id(value)][1]

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor from outside, which is what the function wrote into; the tensor if it has none."""
        return self._outside[id(tensor)][1] if id(tensor) in self._outside else tensor

    def jax_dtype(self, dtype: Any) -> Any:
        """Widen a dtype of JAX."""
        if (wide := _jax_wide(dtype)) != dtype:
            self.casts[str(np.dtype(dtype)), running_line()] += 1
        return wide

    def of_jax(self, operand: Any) -> Any:
        """Widen an operand of JAX. Python's numbers are weakly typed and stay."""
        if not hasattr(operand, "dtype") or operand.dtype == _jax_wide(operand.dtype):
            return operand
        if not isinstance(operand, jax.core.Tracer):
            if id(operand) not in self._outside:
                self._outside[id(operand)] = operand, self._from_outside(operand)
            operand = self._outside[id(operand)][1]
        return jax.lax.convert_element_type(operand, _jax_wide(operand.dtype))

    def _from_outside(self, operand: Any) -> Any:
        """An array of JAX, moved by its own ε if there is a seed; whole numbers have no rounding."""
        if jnp.issubdtype(operand.dtype, jnp.complexfloating):
            return operand
        given = np.asarray(operand)
        wide = given.astype(np.float64)
        fraction = np.isfinite(wide) & (wide != np.rint(wide))
        self.outside |= bool(fraction.any())
        if self._generator is None or not fraction.any():
            return operand
        move = self._generator.uniform(-1, 1, wide.shape) * float(jnp.finfo(given.dtype).eps)
        return np.where(fraction, wide * (1 + move), wide)


@contextmanager
def torch_in_float64(widening: Widening | None = None) -> Iterator[None]:
    """Compute in float64 in torch. On a GPU attention takes its formula, because fused kernels lack float64 there."""
    widening = Widening() if widening is None else widening
    formula = sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_available() else nullcontext()
    with formula, _InOperations(widening), _InFunctions(widening):
        yield


class _InFunctions(TorchFunctionMode):
    """Widens the arguments of torch's functions, some of which ask that their dtypes are equal."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()
        self._widening = widening

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function in float64."""
        args, kwargs = tree_map(self._widening.of_torch, (args, kwargs or {}))
        return func(*args, **kwargs)


class _InOperations(TorchDispatchMode):
    """Widens the operands of each operation: casts by name, such as ``half``, are seen here only."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._widening = widening

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        args, kwargs = tree_map(self._widening.of_torch, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, _result, func(*args, **kwargs))


def _result(made: torch.Tensor) -> torch.Tensor:
    dtype = _wide(made.dtype)
    return made if made.dtype == dtype else made.to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


@contextmanager
def jax_in_float64(widening: Widening | None = None) -> Iterator[None]:
    """Trace in float64 in JAX; 64-bit mode must be on. A literal after a cast is then one of float64 too."""
    widening = Widening() if widening is None else widening
    bind = Primitive.bind

    def wide(self: Primitive, *operands: Any, **parameters: Any) -> Any:
        if parameters.get(name := _DTYPES.get(self.name, "")) is not None:
            parameters[name] = widening.jax_dtype(parameters[name])
        if self.name == "reduce_precision" and parameters["mantissa_bits"] < _FRACTION:
            parameters |= {"mantissa_bits": _FRACTION, "exponent_bits": _EXPONENT}
        # A conversion says what it makes of its operand; to widen that too would be a conversion again.
        if self.name != "convert_element_type" and not any(inner in name for name in parameters for inner in _INNER):
            operands = tuple(map(widening.of_jax, operands))
        return bind(self, *operands, **parameters)

    # "float32" means "highest". Under this name jit keeps what is traced here apart from what others trace.
    with jax.default_matmul_precision("float32"):
        Primitive.bind = wide
        try:
            yield
        finally:
            Primitive.bind = bind


def _jax_wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype

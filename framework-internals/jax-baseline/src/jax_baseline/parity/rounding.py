"""What rounding does to a function: controls with noise of one unit in the last place, and the function in float64.

A run with noise on the operands of each operation is a *control*: it differs from the function by rounding and by
nothing else, whatever the function computes. Noise on the operands covers the rounding of each result, which the next
operation reads, the order of the terms of a sum, cancellation, and library functions that are accurate to about one
unit (Parker, "Monte Carlo Arithmetic", 1997).

In float64 rounding hides almost nothing. A function that casts to float16 inside rounds there as coarsely as ever, even
if its inputs are float64: here such a cast gives float64, and so do narrower constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import core
from jax.extend.core import Primitive
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jax_baseline.user_code import running_line

# Operations whose result jumps where an operand moves: a control must not take another branch than the function.
_JUMPS = frozenset({
    "floor", "ceil", "round", "trunc", "sign", "sgn", "remainder", "fmod", "floor_divide", "eq", "ne", "lt", "gt", "le",
    "ge", "argmax", "argmin", "sort", "topk", "nonzero", "isnan", "isinf", "isfinite", "bernoulli", "rem", "is_finite",
    "reduce_precision", "argsort", "top_k", "bitcast_convert_type", "_local_scalar_dense",
})  # fmt: skip
# Operations whose result is an element of an operand: it is exact, and a derivative asks which one it equals.
_SELECT = frozenset({
    "max", "min", "maximum", "minimum", "fmax", "fmin", "amax", "amin", "aminmax", "clamp", "clamp_min", "clamp_max",
    "clip", "median", "nanmedian", "reduce_max", "reduce_min", "cummax", "cummin", "scatter-max", "scatter-min",
    "gather",
})  # fmt: skip
_SELECT_BY = (np.inf, -np.inf, "amax", "amin")  # arguments that make a norm, or a reduction into an index, such a one
# Operations of JAX that only arrange elements, as the views of torch do.
_ARRANGE = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice"})
_EXACT = _JUMPS | _SELECT | _ARRANGE
# Of those that jump, they order elements. Which of equal ones is first is often open: torch's sort is not stable.
_ORDERS = frozenset({"argmax", "argmin", "sort", "topk", "top_k", "argsort"})
_TINY = 1e-300  # what a zero becomes where noise orders equal elements at random
_AUTOCAST = ("linear", "mm", "matmul", "conv", "scaled_dot_product_attention")  # parts of what autocast narrows
# Operands that an operation writes into though its schema does not say so: running statistics.
_WRITTEN = dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), (3, 4))
_POOL = np.random.Generator(np.random.PCG64(0)).uniform(-1, 1, 1 << 18).astype(np.float32)

_WHOLE = 2.0**-10  # in multiples of 1/ε: numbers up to there are not whole for want of bits

# Parameters that name the dtype of a result. The one of bitcast_convert_type has to have the size of the operand.
_DTYPES = {"convert_element_type": "new_dtype"} | dict.fromkeys(
    ("dot_general", "conv_general_dilated"), "preferred_element_type"
)
_FRACTION, _EXPONENT = 52, 11  # bits of float64
# Functions inside an operation were traced for the dtypes of the operands as they are.
_INNER = ("jaxpr", "branches")
# Functions inside these run on a part of each operand: on that of a device, or of a block.
WHOLE = ("shard_map", "pallas_call")


class FloatingTypes(TorchDispatchMode):
    """Collects the floating dtypes of what operations of torch return.

    Attributes:
        names: Their names, such as ``bfloat16``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at its results."""
        results = func(*args, **(kwargs or {}))
        found = (result.dtype for result in tree_leaves(results) if isinstance(result, torch.Tensor))
        self.names |= {str(dtype).removeprefix("torch.") for dtype in found if dtype.is_floating_point}
        return results


class Noise(TorchDispatchMode):
    """Moves the floating operands of every operation, in the forward and the backward pass, by up to one ε · |x|.

    Arrays of whole numbers stay as they are, for they are exact. In-place operations, such as an optimizer's, read
    their operands as they are. With ``exact_constants``, single numbers that are not made from arrays stay as they
    are: noise of a constant moves a result by the same factor everywhere, which rounding does not. With ``ties``, for
    float64, operations that order elements read them moved too, so that equal ones come in a random order.
    """

    def __init__(self, seed: int, exact_constants: bool = False, ties: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computed, self._ties = _Computed() if exact_constants else None, ties
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._factors: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on moved operands."""
        exact, orders, written = _kind(func)
        exact = exact or any(argument in _SELECT_BY for argument in args if isinstance(argument, (float, str)))
        if orders and self._ties:
            args = converted(self._in_random_order, args)
        dtype = (kwargs or {}).get("dtype")  # a conversion to whole numbers jumps too
        if exact or (dtype is not None and not (dtype.is_floating_point or dtype.is_complex)):
            return self._noted(args, func(*args, **(kwargs or {})))
        moved = converted(self._moved, args)
        for position in written:
            moved = (*moved[:position], args[position], *moved[position + 1 :])
        return self._noted(args, func(*moved, **(kwargs or {})))

    def _noted(self, args: Any, results: Any) -> Any:
        if self._computed is not None:
            self._computed.add(tree_leaves(args), tree_leaves(results))
        return results

    def _moved(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        constant = self._computed is not None and x.ndim == 0 and x not in self._computed
        if not x.is_floating_point() or x.numel() == 0 or constant or _is_whole(x):
            return x
        return self._by_factors(x)

    def _in_random_order(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
            return x
        return self._by_factors(torch.where(x == 0, _TINY, x))

    def _by_factors(self, x: torch.Tensor) -> torch.Tensor:
        key = (x.dtype, x.device)
        if key not in self._factors:
            wide = torch.promote_types(x.dtype, torch.float32)
            factors = 1 + torch.from_numpy(_POOL).to(wide) * torch.finfo(x.dtype).eps
            self._factors[key] = factors.to(x.device)
        x = x.resolve_neg()  # an imaginary part of a conjugate is a view, whose sign is not applied in here
        factors, count = self._factors[key], x.numel()
        start = int(self._generator.integers(factors.numel() // 2))
        if count > factors.numel() // 2:
            factors = factors.repeat(2 + count // factors.numel())
        moved = (x * factors[start : start + count].view(x.shape)).to(x.dtype)
        return torch.where(moved.isinf(), x, moved)  # the largest number, which masks hold, stays finite


def _is_whole(x: torch.Tensor) -> bool:
    """Whether a tensor has whole numbers alone, which are exact: a rank or an index, which is no other one nearby."""
    if x[(0,) * x.ndim].item() % 1:
        return False
    return bool(((x == x.round()) & (x.abs() <= _WHOLE / torch.finfo(x.dtype).eps)).all())


@cache
def _kind(operation: Any) -> tuple[bool, bool, Sequence[int]]:
    """Whether an operation of torch reads its operands as they are, and orders them; and which it writes into."""
    schema = operation._schema
    name = schema.name.rpartition("::")[2]
    views = any(returned.alias_info for returned in schema.returns)
    return name in _EXACT or schema.is_mutable or views, name in _ORDERS, _WRITTEN.get(name, ())


def converted(convert: Callable[[Any], Any], arguments: Any) -> Any:
    """Arguments of an operation of torch, or its results, each converted; ``tree_map`` takes most of such a run."""
    if isinstance(arguments, dict):
        return {name: converted(convert, argument) for name, argument in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(converted(convert, argument) for argument in arguments)
    return convert(arguments)


def torch_noise(seed: int | None, exact_constants: bool = False, ties: bool = False) -> AbstractContextManager[object]:
    """Inside, torch computes with rounding noise; without, if the seed is None."""
    return nullcontext() if seed is None else Noise(seed, exact_constants, ties)


class _Computed:
    """Single numbers that operations made from arrays, or from other such numbers, by identity."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def add(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Keep the single numbers among the results, so that no identity is used twice."""
        if any(getattr(operand, "ndim", 0) or operand in self for operand in operands):
            self._kept |= {id(result): result for result in results if getattr(result, "ndim", 1) == 0}

    def __contains__(self, number: object) -> bool:
        return id(number) in self._kept


def with_noise(
    function: Callable[..., Any],
    seed: int,
    record: Callable[[core.JaxprEqn, Sequence[Any], Sequence[Any]], None] = lambda eqn, operands, results: None,
    exact_constants: bool = False,
    part: Callable[[Any, Any], None] = lambda made, of: None,
    ties: bool = False,
) -> Callable[..., Any]:
    """Return a JAX function that runs operation by operation on moved operands; see :class:`Noise`.

    ``record`` is called with every operation, its operands before they are moved, and its results; ``part`` as in
    :func:`interpreted`.
    """
    computed = _Computed() if exact_constants else None
    generator = np.random.Generator(np.random.PCG64(seed))

    def moved(x: Any) -> Any:
        constant = computed is not None and jnp.ndim(x) == 0 and x not in computed
        if constant or not jnp.issubdtype(jnp.result_type(x), jnp.floating) or jnp.size(x) == 0:
            return x
        # In NumPy: JAX would compile each operation for each shape.
        given = np.asarray(x if isinstance(x, jax.Array) else jnp.asarray(x))
        if ((given == np.rint(given)) & (np.abs(given) <= _WHOLE / float(jnp.finfo(given.dtype).eps))).all():
            return given
        return by_factors(given)

    def in_random_order(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating) or jnp.size(x) == 0:
            return x
        return by_factors(np.where(np.asarray(x) == 0, _TINY, np.asarray(x)))

    def by_factors(given: NDArray) -> NDArray:
        start = int(generator.integers(_POOL.size // 2))
        part = np.resize(_POOL[start : start + given.size], given.shape)  # repeated if there are not as many
        wide = jnp.promote_types(given.dtype, jnp.float32)
        factors = 1 + part.astype(wide) * float(jnp.finfo(given.dtype).eps)
        with np.errstate(all="ignore"):
            result = (given.astype(wide) * factors).astype(given.dtype)
        return np.where(np.isinf(result), given, result)

    def noisy(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        whole = not jnp.issubdtype(eqn.params.get("new_dtype", jnp.float32), jnp.inexact)
        exact = whole or eqn.primitive.name in _EXACT
        if ties and eqn.primitive.name in _ORDERS:
            operands = [*map(in_random_order, operands)]
        results = bind(eqn, operands if exact else [*map(moved, operands)])
        if computed is not None:
            computed.add(operands, results)
        record(eqn, operands, results)
        return results

    return lambda *arguments: interpreted(function, noisy, part)(*arguments)


def bind(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Run one operation of JAX and return its results."""
    if eqn.primitive.name in WHOLE:
        given = {
            atom: operand
            for atom, operand in zip(eqn.invars, operands, strict=True)
            if not isinstance(atom, core.Literal)
        }
        alone = core.Jaxpr((), [*given], eqn.outvars, [eqn], debug_info=eqn.params["jaxpr"].debug_info)
        return list(core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))(*given.values()))
    results = eqn.primitive.bind(*operands, **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def interpreted(
    function: Callable[..., Any],
    evaluate: Callable[[core.JaxprEqn, Sequence[Any]], list[Any]],
    part: Callable[[Any, Any], None] = lambda made, of: None,
) -> Callable[..., Any]:
    """Return a JAX function that calls ``evaluate`` for every operation, also inside calls, branches and loops.

    A scan takes rows of arrays and stacks results, which no operation says: ``part`` is called with each new array and
    with the one that it comes from.
    """

    def run(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
        for eqn in jaxpr.eqns:
            operands = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in eqn.invars]
            values |= zip(eqn.outvars, results_of(eqn, operands), strict=True)
        return [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in jaxpr.outvars]

    def closed(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        return run(jaxpr.jaxpr, jaxpr.consts, operands) if hasattr(jaxpr, "consts") else run(jaxpr, (), operands)

    def results_of(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        name, parameters = eqn.primitive.name, eqn.params
        if name == "cond":
            index, *rest = operands
            return closed(parameters["branches"][int(index)], rest)
        if name == "scan":
            return scan(eqn, operands)
        if name == "while":
            split = parameters["cond_nconsts"], parameters["cond_nconsts"] + parameters["body_nconsts"]
            of_condition, of_body, carry = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]
            while closed(parameters["cond_jaxpr"], [*of_condition, *carry])[0]:
                carry = closed(parameters["body_jaxpr"], [*of_body, *carry])
            return [*carry]
        inside = () if name in WHOLE else ("jaxpr", "call_jaxpr", "fun_jaxpr")
        inner = next((parameters[key] for key in inside if key in parameters), None)
        return evaluate(eqn, operands) if inner is None else closed(inner, operands)

    def scan(eqn: core.JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        parameters = eqn.params
        body = getattr(parameters["jaxpr"], "jaxpr", parameters["jaxpr"])
        # Constants, carry, stacked arrays. Versions of JAX give the numbers in different ways; what is stacked has one
        # dimension more outside.
        carried = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(eqn.outvars, body.outvars, strict=True))
        whole = sum(given.aval.ndim == inner.aval.ndim for given, inner in zip(eqn.invars, body.invars, strict=True))
        consts, carry, stacked = operands[: whole - carried], operands[whole - carried : whole], operands[whole:]
        order = range(parameters["length"])
        made: list[list[Any]] = []
        for index in reversed(order) if parameters["reverse"] else order:
            rows = [array[index] for array in stacked]
            for pair in zip(rows, stacked, strict=True):
                part(*pair)
            results = closed(parameters["jaxpr"], [*consts, *carry, *rows])
            carry = results[:carried]
            made.append(results[carried:])
        columns = [*zip(*(made[::-1] if parameters["reverse"] else made), strict=True)]
        joined = [jnp.stack(column) for column in columns]
        for array, column in zip(joined, columns, strict=True):
            part(array, column[-1])
        return [*carry, *joined]

    def call(*arguments: Any) -> Any:
        traced, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = run(traced.jaxpr, traced.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


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
        return jax.lax.convert_element_type(self.brought(operand), _jax_wide(operand.dtype))

    def brought(self, operand: Any) -> Any:
        """The copy of a narrower array of JAX from outside; anything else as it is."""
        known = isinstance(operand, jax.core.Tracer) or not hasattr(operand, "dtype")
        if known or operand.dtype == _jax_wide(operand.dtype):
            return operand
        if id(operand) not in self._outside:
            self._outside[id(operand)] = operand, self._from_outside(operand)
        return self._outside[id(operand)][1]

    def moved(self, operand: Any) -> Any:
        """The same in the dtype that the operand has, which a function was traced for."""
        moved = self.brought(operand)
        if moved is operand:
            return operand
        made = moved.astype(operand.dtype)
        self._outside[id(made)] = made, made
        return made

    def with_constants_moved(self, parameter: Any) -> Any:
        """The same of the constants of a function that was traced before, such as one with a ``jit`` of its own."""
        if self._generator is None or not isinstance(parameter, core.ClosedJaxpr):
            return parameter
        return core.ClosedJaxpr(parameter.jaxpr, [*map(self.moved, parameter.consts)])

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
    """Compute in float64 in torch. On a GPU attention takes its formula, because fused kernels lack float64 there.

    What torch makes of whole numbers, such as ``pixels / 255`` or ``linspace``, has the default dtype: float64 too, as
    it has in JAX's 64-bit mode.
    """
    widening = Widening() if widening is None else widening
    formula = sdpa_kernel(SDPBackend.MATH) if torch.cuda.is_available() else nullcontext()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with formula, _InOperations(widening), _InFunctions(widening):
            yield
    finally:
        torch.set_default_dtype(default)


class _InFunctions(TorchFunctionMode):
    """Widens the arguments of torch's functions, some of which ask that their dtypes are equal."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()
        self._widening = widening

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function in float64."""
        if torch.is_autocast_enabled("cpu") and any(name in getattr(func, "__name__", "") for name in _AUTOCAST):
            self._widening.of_torch(torch.get_autocast_dtype("cpu"))  # autocast leaves float64 alone
        args, kwargs = converted(self._widening.of_torch, (args, kwargs or {}))
        return func(*args, **kwargs)


class _InOperations(TorchDispatchMode):
    """Widens the operands of each operation: casts by name, such as ``half``, are seen here only."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._widening = widening

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        args, kwargs = converted(self._widening.of_torch, (args, kwargs or {}))
        return converted(_result, func(*args, **kwargs))


def _result(made: Any) -> Any:
    if not isinstance(made, torch.Tensor) or made.dtype == (dtype := _wide(made.dtype)):
        return made
    return made.to(dtype)


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
        if self.name == "convert_element_type":
            operands = tuple(map(widening.brought, operands))
        elif any(inner in name for name in parameters for inner in _INNER):
            operands = tuple(map(widening.moved, operands))
            parameters = {name: widening.with_constants_moved(given) for name, given in parameters.items()}
        else:
            operands = tuple(map(widening.of_jax, operands))
        return bind(self, *operands, **parameters)

    # "float32" means "highest". Under this name jit keeps what is traced here apart from what others trace.
    with jax.default_matmul_precision("float32"), patch.object(Primitive, "bind", wide):
        yield


def _jax_wide(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def in_torchs_precision() -> AbstractContextManager[object]:
    """Inside, functions that are traced multiply float32 matrices in float32, as torch does by default.

    On a GPU, JAX's default is TF32, which has 10 bits of the fraction. A precision that the user's code set stays.
    """
    if jax.config.jax_default_matmul_precision is not None:
        return nullcontext()
    return jax.default_matmul_precision("highest")

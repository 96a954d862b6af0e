"""Every operation of a run of a function in torch or in JAX, with its results, and equal results of the two."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from jax_baseline.parity.comparer import LARGEST_BOUND
from jax_baseline.parity.rounding import bind, interpreted, torch_noise, with_noise
from jax_baseline.user_code import line_of, running_line

_NOISY = 3  # runs with noise
ARGUMENT = "argument"
_PROJECTIONS = 8
TIMES = 30.0  # times what the noise does to an array: a few projections estimate a distance to a factor of about two
_UNSET = ("empty", "new_empty")
_NOT_A_NUMBER = 12345.678  # in its place, so that NaN differs from what others compute


@dataclass(frozen=True)
class Call:
    """An operation of torch, to run it again."""

    function: Any
    leaves: list[Any]  # its arguments, flattened; tensors as they were at the call
    structure: TreeSpec  # how the arguments are nested
    sources: Mapping[int, int]  # position of each operand among the leaves → number of the operation that made it

    @property
    def name(self) -> str:
        """The operator's name without its name space."""
        return str(self.function._schema.name).removeprefix("aten::")

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        args, kwargs = tree_unflatten(self.leaves, self.structure)
        given = dict(zip((argument.name for argument in self.function._schema.arguments), args, strict=False))
        return {argument.name: argument.default_value for argument in self.function._schema.arguments} | given | kwargs

    def again(self, changes: Mapping[int, torch.Tensor] | None = None, /, **arguments: Any) -> torch.Tensor | None:
        """Run the operation with other arguments, by position among the leaves or by name.

        Returns its first result; None if it does not take the arguments, or has no floating result.
        """
        first = next(iter(self.results(changes, **arguments)), None)
        return first if first is not None and first.is_floating_point() else None

    def results(self, changes: Mapping[int, torch.Tensor] | None = None, /, **arguments: Any) -> list[torch.Tensor]:
        """Run the operation with other arguments, as :meth:`again` does, and return all tensors; none if it fails.

        An operation in place writes into ``changes``.
        """
        changed = changes or {}  # not copied: what writes into a view of it writes into it
        leaves = [changed[number] if number in changed else _copied(leaf) for number, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.structure)
        for number, argument in enumerate(self.function._schema.arguments):
            if argument.name in arguments and number < len(args):
                args = (*args[:number], arguments.pop(argument.name), *args[number + 1 :])
        try:
            result = self.function(*args, **{**kwargs, **arguments})
        except (RuntimeError, IndexError, ValueError, TypeError):  # not a value of this argument
            return []
        return _tensors(result)


def _copied(value: Any) -> Any:
    """A copy, because an operation may write into its operand."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class Operation:
    """One operation of a run."""

    number: int  # its index in the run
    name: str  # name in the framework
    place: str  # module and line of the user's source
    operands: tuple[int, ...]  # numbers of the operations that made the operands
    values: list[NDArray]  # its floating results
    stray: list[float] = field(default_factory=list)  # largest distance of each result in the runs with noise
    call: Call | None = None  # of torch: the operator with its arguments
    constants: tuple[float, ...] = ()  # of JAX: the numbers among its operands

    def __str__(self) -> str:
        return f"{self.name} at {self.place}" if self.place else self.name


def arrays(operations: Iterable[Operation]) -> Iterator[tuple[NDArray, float]]:
    """All results, each with its largest distance in the runs with noise."""
    for operation in operations:
        yield from zip(operation.values, operation.stray, strict=True)


def ancestors(operations: Sequence[Operation], number: int) -> set[int]:
    """The operations that a result is computed from, itself among them."""
    reached, waiting = set[int](), [number]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            waiting += operations[current].operands
    return reached


def recorded_torch(run: Callable[[], Any]) -> list[Operation]:
    """Run torch's function, once as it is and with noise, and return its operations."""
    return _with_strays([torch_operations(run, seed) for seed in (None, *range(_NOISY))])


def torch_operations(run: Callable[[], Any], seed: int | None = None) -> list[Operation]:
    """Run torch's function once, with noise of a seed or without, and return its operations."""
    recorder = _Recorder()
    with _module_names() as recorder.modules, torch_noise(seed), recorder:
        run()
    return recorder.operations


def recorded_jax(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Operation]:
    """Run JAX's function, once as it is and with noise, and return its operations."""
    return _with_strays([jax_operations(function, arguments, seed) for seed in (None, *range(_NOISY))])


def jax_operations(function: Callable[..., Any], arguments: Sequence[Any], seed: int | None = None) -> list[Operation]:
    """Run JAX's function once, with noise of a seed or without, and return its operations."""
    tape = _JaxTape(jax.tree.leaves(arguments))
    if seed is None:
        interpreted(function, tape.run, tape.part)(*arguments)
    else:
        with_noise(function, seed, tape.record, part=tape.part)(*arguments)
    return tape.operations


class _JaxTape:
    """Records every operation of a JAX function. The place of an input that is an argument is ``ARGUMENT``."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.operations: list[Operation] = []
        self._arguments = {id(leaf) for leaf in arguments}
        self._made: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def run(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Run and record an operation."""
        results = bind(eqn, operands)
        self.record(eqn, operands, results)
        return results

    def part(self, made: Any, of: Any) -> None:
        """Note that an array which no operation made is a part of another, or has it as a part."""
        if id(of) in self._made:
            self._kept.append(made)
            self._made[id(made)] = self._made[id(of)]

    def record(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Record an operation."""
        for operand in operands:
            floating = jnp.issubdtype(jnp.result_type(operand), jnp.floating) and jnp.size(operand) > 1
            if id(operand) not in self._made and floating:
                self._kept.append(operand)
                self._made[id(operand)] = number = len(self.operations)
                place = ARGUMENT if id(operand) in self._arguments else ""
                self.operations.append(Operation(number, "input", place, (), [np.asarray(operand)]))
        self._kept += results
        by = tuple(self._made[id(operand)] for operand in operands if id(operand) in self._made)
        number = len(self.operations)
        self._made |= {id(result): number for result in results}
        arrays = [result for result in results if jnp.issubdtype(result.dtype, jnp.floating) and result.size]
        numbers = tuple(float(operand) for operand in operands if jnp.ndim(operand) == 0 and _is_real(operand))
        values = [*map(np.asarray, arrays)]
        self.operations.append(Operation(number, eqn.primitive.name, line_of(eqn), by, values, constants=numbers))


def _is_real(operand: Any) -> bool:
    """Whether an operand has numbers that a float can be: not the keys of a random generator, no complex ones."""
    dtype = jnp.result_type(operand)
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def _with_strays(runs: Sequence[list[Operation]]) -> list[Operation]:
    first, *noisy = runs
    for index, operation in enumerate(first):
        others = [run[index].values for run in noisy if len(run) == len(first)]
        for number, value in enumerate(operation.values):
            wide, held = finite(value), ~_is_ordinary(value)  # noise moves what a mask holds across the limit
            distances = [float(np.linalg.norm(np.where(held, 0, wide - finite(other[number])))) for other in others]
            operation.stray.append(max(distances, default=0.0))
    return first


class _Recorder(TorchDispatchMode):
    """Records every operation of torch that has a result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.modules: list[str] = []
        self._made: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}  # by storage: what is written into a view is read through others
        self._filled: set[int] = set()  # storages that began as memory of any content
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operation."""
        leaves, structure = tree_flatten((args, kwargs or {}))
        for operand in _tensors(leaves):
            if id(operand) not in self._made and operand.is_floating_point() and operand.numel() > 1:
                self._kept.append(operand)
                self._made[id(operand)] = number = len(self.operations)
                self.operations.append(Operation(number, "input", "", (), [array(operand)]))
        sources = {position: self._made[id(leaf)] for position, leaf in enumerate(leaves) if id(leaf) in self._made}
        call = Call(func, [_copied(leaf) for leaf in leaves], structure, sources)
        writers = (number for storage in _storages(leaves) for number in self._writers.get(storage, ()))
        operands = tuple(dict.fromkeys((*sources.values(), *writers)))
        result = func(*args, **(kwargs or {}))
        tensors = _tensors(result)
        number = len(self.operations)
        self._made |= {id(tensor): number for tensor in tensors}
        self._kept += tensors
        values = [array(tensor) for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if call.name.startswith(_UNSET):
            self._filled |= _storages(tensors)
        is_view = any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns)
        if call.name.startswith(_UNSET) or (is_view and _storages(tensors) & self._filled):
            values = []  # a part may not be written yet: chance, which would be near anything
        place = " ".join(part for part in (self.modules[-1] if self.modules else "", running_line()) if part)
        self.operations.append(Operation(number, call.name, place, operands, values, call=call))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for storage in _storages(tree_leaves(value)):
                    self._writers.setdefault(storage, []).append(number)
        return result


def _storages(leaves: Sequence[Any]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(leaves) if tensor.layout == torch.strided}


def array(tensor: torch.Tensor) -> NDArray:
    """A copy of a tensor, dense, and in float32 if it is bfloat16."""
    plain = tensor.detach().cpu()
    plain = plain.to_dense() if plain.layout != torch.strided else plain
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).resolve_conj().resolve_neg().numpy().copy()


@contextmanager
def _module_names() -> Iterator[list[str]]:
    """The modules whose forward is running, from the outermost inwards, by class and number of the call."""
    running: list[str] = []
    names: dict[int, str] = {}

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        if not running:
            names.update({id(part): name for name, part in module.named_modules()})
        running.append(names.get(id(module)) or type(module).__name__)

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    hooks = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


class Index:
    """Arrays by their number of elements, to find one that equals another in some order of its axes.

    An array comes with its largest distance in runs with noise. With ``exact`` only the distance of the other side is
    allowed; that of a side in float32 is larger.
    """

    def __init__(self, arrays: Iterable[tuple[NDArray, float]], *, exact: bool = False) -> None:
        self._exact = exact
        self._known: dict[int, list[tuple[list[NDArray], float]]] = {}
        for value, stray in arrays:
            self._known.setdefault(value.size, []).append((_keys(value), stray))

    def meets(self, value: NDArray, stray: float) -> bool:
        """Whether one of the arrays equals this one. An array of one repeated number is no evidence."""
        plain = finite(value)
        if value.size not in self._known:
            return False
        norm = float(np.linalg.norm(plain))
        rounding = max(TIMES * stray, 64 * np.finfo(np.float64).eps * norm)
        if value.size > 1 and np.ptp(plain) <= rounding / np.sqrt(value.size):
            return False
        known, of_known = zip(*self._known[value.size], strict=True)
        strays = TIMES * np.array(of_known)
        # Beside an array that noise moves so far, as it does −1e20 in a mask, every other would be the same.
        strays[strays > LARGEST_BOUND * norm] = 0
        allowed = np.full_like(strays, rounding) if self._exact else np.maximum(strays, rounding)
        keys = _keys(value)
        # This array in every order beside the others in their own, and then the reverse.
        plain_keys, turned_keys = np.stack([of[0] for of in known]), np.stack([key for of in known for key in of])
        turned = np.repeat(allowed, [len(of) for of in known])
        return any(
            bool((np.linalg.norm(table - key, axis=1) <= limit).any())
            for made, table, limit in ((keys, plain_keys, allowed), (keys[:1], turned_keys, turned))
            for key in made
        )


def _keys(value: NDArray) -> list[NDArray]:
    """Project an array in each order of its axes; the first is its own order."""
    wide = finite(value).squeeze()
    orders = itertools.permutations(range(wide.ndim)) if wide.ndim <= 4 else [range(wide.ndim)]
    return [_signs(wide.size) @ wide.transpose(order).ravel() for order in orders]


def finite(value: NDArray) -> NDArray:
    """The array in float64, with 0 for what masks hold: infinities and numbers near the largest; NaN is a number."""
    wide = value.astype(np.float64)
    return np.where(np.isnan(wide), _NOT_A_NUMBER, np.where(_is_ordinary(wide), wide, 0.0))


def _is_ordinary(value: NDArray) -> NDArray:
    return np.abs(value) < 1e30


@cache
def _signs(size: int) -> NDArray:
    return np.random.default_rng(size).standard_normal((_PROJECTIONS, size)) / np.sqrt(_PROJECTIONS)

"""Every operation of a run of a function in torch or in JAX, with its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from jax_baseline.parity.location.matching import finite
from jax_baseline.parity.rounding import Noise, bind, interpreted, with_noise
from jax_baseline.parity.rounding.source_lines import line_of, running_line

_NOISY = 3  # runs with noise
ARGUMENT = "argument"


@dataclass(frozen=True)
class Call:
    """An operation of torch, to run it again.

    Attributes:
        function: The operator.
        leaves: Its arguments, flattened; tensors as they were at the call.
        structure: How the arguments are nested.
        sources: Position of each operand among the leaves → index of the operation that made it.
    """

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    sources: Mapping[int, int]

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        args, kwargs = tree_unflatten(self.leaves, self.structure)
        given = dict(zip((one.name for one in self.function._schema.arguments), args, strict=False))
        return {one.name: one.default_value for one in self.function._schema.arguments} | given | kwargs

    def again(self, changes: Mapping[int, torch.Tensor] | None = None, /, **arguments: Any) -> torch.Tensor | None:
        """Run the operation with other arguments, by position among the leaves or by name.

        Returns its first result; None if it does not take the arguments, or has no floating result.
        """
        first = next(iter(self.results(changes, **arguments)), None)
        return first if first is not None and first.is_floating_point() else None

    def results(self, changes: Mapping[int, torch.Tensor] | None = None, /, **arguments: Any) -> list[torch.Tensor]:
        """Run the operation with other arguments, as :meth:`again` does, and return all tensors; none if it fails."""
        leaves = [(changes or {}).get(number, leaf) for number, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten([_copied(leaf) for leaf in leaves], self.structure)
        for number, one in enumerate(self.function._schema.arguments):
            if one.name in arguments and number < len(args):
                args = (*args[:number], arguments.pop(one.name), *args[number + 1 :])
        try:
            found = self.function(*args, **{**kwargs, **arguments})
        except (RuntimeError, IndexError, ValueError, TypeError):  # not a value of this argument
            return []
        return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]


def _copied(value: Any) -> Any:
    """A copy, because an operation may write into its operand."""
    return value.clone() if isinstance(value, torch.Tensor) else value


@dataclass
class Operation:
    """One operation of a run.

    Attributes:
        name: Name in the framework.
        place: Module and line of the user's source.
        operands: Indices of the operations that made the operands.
        values: Its floating results.
        stray: Largest distance of each result in the runs with noise.
        call: Of torch: the operator with its arguments.
        constants: Of JAX: the numbers among its operands.
    """

    name: str
    place: str
    operands: tuple[int, ...]
    values: list[NDArray]
    stray: list[float] = field(default_factory=list)
    call: Call | None = None
    constants: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} at {self.place}" if self.place else self.name


def arrays(operations: Iterable[Operation]) -> Iterator[tuple[NDArray, float]]:
    """All results, each with its largest distance in the runs with noise."""
    for one in operations:
        yield from zip(one.values, one.stray, strict=True)


def recorded_torch(run: Callable[[], Any]) -> list[Operation]:
    """Run torch's function, once as it is and with noise, and return its operations."""
    return _with_strays([torch_operations(run, seed) for seed in (None, *range(_NOISY))])


def torch_operations(run: Callable[[], Any], seed: int | None = None) -> list[Operation]:
    """Run torch's function once, with noise of a seed or without, and return its operations."""
    recorder = _Recorder()
    with _module_names() as recorder.modules, nullcontext() if seed is None else Noise(seed), recorder:
        run()
    return recorder.operations


def recorded_jax(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Operation]:
    """Run JAX's function, once as it is and with noise, and return its operations."""
    return _with_strays([jax_operations(function, arguments, seed) for seed in (None, *range(_NOISY))])


def jax_operations(function: Callable[..., Any], arguments: Sequence[Any], seed: int | None = None) -> list[Operation]:
    """Run JAX's function once, with noise of a seed or without, and return its operations."""
    tape = _JaxTape(jax.tree.leaves(arguments))
    if seed is None:
        interpreted(function, tape.run)(*arguments)
    else:
        with_noise(function, seed, tape.record)(*arguments)
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

    def record(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Record an operation."""
        for one in operands:
            if id(one) not in self._made and jnp.issubdtype(jnp.result_type(one), jnp.floating) and jnp.size(one) > 1:
                self._kept.append(one)
                self._made[id(one)] = len(self.operations)
                place = ARGUMENT if id(one) in self._arguments else ""
                self.operations.append(Operation("input", place, (), [np.asarray(one)]))
        self._kept += results
        by = tuple(self._made[id(one)] for one in operands if id(one) in self._made)
        self._made |= {id(one): len(self.operations) for one in results}
        floating = [np.asarray(one) for one in results if jnp.issubdtype(one.dtype, jnp.floating) and one.size]
        numbers = tuple(float(one) for one in operands if jnp.ndim(one) == 0)
        self.operations.append(Operation(eqn.primitive.name, line_of(eqn), by, floating, constants=numbers))


def _with_strays(runs: Sequence[list[Operation]]) -> list[Operation]:
    first, *noisy = runs
    for index, one in enumerate(first):
        others = [run[index].values for run in noisy if len(run) == len(first)]
        for number, value in enumerate(one.values):
            wide = finite(value)
            distances = [float(np.linalg.norm(wide - finite(other[number]))) for other in others]
            one.stray.append(max(distances, default=0.0))
    return first


class _Recorder(TorchDispatchMode):
    """Records every operation of torch that has a result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.modules: list[str] = []
        self._made: dict[int, int] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operation."""
        leaves, structure = tree_flatten((args, kwargs or {}))
        operands = [one for one in leaves if isinstance(one, torch.Tensor)]
        for one in operands:
            if id(one) not in self._made and one.is_floating_point() and one.numel() > 1:
                self._kept.append(one)
                self._made[id(one)] = len(self.operations)
                self.operations.append(Operation("input", "", (), [array(one)]))
        sources = {n: self._made[id(one)] for n, one in enumerate(leaves) if id(one) in self._made}
        call = Call(func, [_copied(one) for one in leaves], structure, sources)
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self._made |= {id(one): len(self.operations) for one in tensors}
        self._kept += tensors
        values = [array(one) for one in tensors if one.is_floating_point() and one.numel()]
        place = " ".join(part for part in (self.modules[-1] if self.modules else "", running_line()) if part)
        name = func._schema.name.removeprefix("aten::")
        self.operations.append(Operation(name, place, tuple(sources.values()), values, call=call))
        return result


def array(tensor: torch.Tensor) -> NDArray:
    """A copy of a tensor, in float32 if it is bfloat16."""
    plain = tensor.detach()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).cpu().numpy().copy()


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

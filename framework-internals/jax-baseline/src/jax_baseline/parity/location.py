"""Where two functions, one in torch and one in JAX, begin to differ: the first operation, and its likely cause.

Both functions run operation by operation, once as they are and a few times with rounding noise. An operation is *met*
if the other side computes the same array somewhere, in any order of the axes and with any division into axes, up to
what the noise does there. An operation is right if it is met, or if something that is computed from it is: frameworks
divide a formula in different ways. The first operation that is not right is where the functions part. A cause is found
by trying: the operation is repeated with other arguments until it is met.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jax_baseline.parity.rounding import Noise, bind, interpreted, with_noise

_PROJECTIONS = 8
_NOISY = 3  # runs with noise
_TIMES = 30.0  # times what the noise does to an array: a few projections estimate a distance to a factor of about two
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, jax, np) if module.__file__)


@dataclass
class Operation:
    """One operation of a run.

    Attributes:
        name: Name in the framework.
        place: Module and line of the user's source.
        operands: Indices of the operations that made the operands.
        values: Its floating results.
        stray: Largest distance of each result in the runs with noise.
        again: Returns its first result with other arguments: what was changed, and the result.
    """

    name: str
    place: str
    operands: tuple[int, ...]
    values: list[NDArray]
    stray: list[float] = field(default_factory=list)
    again: Callable[[], Iterator[tuple[str, NDArray]]] = lambda: iter(())

    def __str__(self) -> str:
        return f"{self.name} at {self.place}" if self.place else self.name


@dataclass(frozen=True)
class Location:
    """Where two functions part.

    Attributes:
        torch: The first operation of torch that JAX does not compute; empty if there is none.
        jax: The first operation of JAX that torch does not compute; empty if there is none.
        cause: What makes the two equal, where that was found.
    """

    torch: str
    jax: str
    cause: str

    def __str__(self) -> str:
        sides = [f"{name} computes {where}" for name, where in (("torch", self.torch), ("JAX", self.jax)) if where]
        if not sides:
            return "all operations of the forward pass agree: the backward pass differs"
        return "first difference: " + ", ".join(sides) + (f"; likely cause: {self.cause}" if self.cause else "")


def locate(torch_run: Callable[[], Any], jax_function: Callable[..., Any], jax_arguments: Sequence[Any]) -> Location:
    """Find the first operation in which two functions differ.

    Args:
        torch_run: Runs torch's function on its inputs.
        jax_function: JAX's function.
        jax_arguments: Its inputs, equal to torch's.
    """
    with np.errstate(all="ignore"):
        of_torch, of_jax = _recorded_torch(torch_run), _recorded_jax(jax_function, jax_arguments)
        first_torch, first_jax = _first_wrong(of_torch, of_jax), _first_wrong(of_jax, of_torch)
        cause = _cause(first_torch, first_jax, of_jax)
    return Location(str(first_torch or ""), str(first_jax or ""), cause)


def _first_wrong(mine: list[Operation], theirs: list[Operation]) -> Operation | None:
    index = _Index(theirs)
    right = [bool(one.values) and index.meets(one.values[0], one.stray[0]) for one in mine]
    for one in reversed(range(len(mine))):
        if right[one]:
            for operand in mine[one].operands:
                right[operand] = True
    # Operations without floating results, or with one repeated number, are neither right nor wrong.
    wrong = {
        one
        for one, item in enumerate(mine)
        if item.name != "input" and item.values and not right[one] and (item.values[0].size == 1 or _varies(item))
    }
    firsts = [one for one in sorted(wrong) if not wrong & set(mine[one].operands)]
    # A table that one side computes and the other has as a constant starts from nothing that both have.
    after = [one for one in firsts if any(right[operand] for operand in mine[one].operands)]
    return next((mine[one] for one in (*after, *firsts)), None)


def _varies(operation: Operation) -> bool:
    return bool(np.ptp(_finite(operation.values[0])) > 0)


def _cause(of_torch: Operation | None, of_jax: Operation | None, theirs: list[Operation]) -> str:
    if of_torch is None:
        return ""
    if "dropout" in of_torch.name or "bernoulli" in of_torch.name:
        return "dropout is active in torch; call eval()"
    index = _Index(theirs)
    for change, value in of_torch.again():
        if index.meets(value, of_torch.stray[0]):
            return f"with {change} in torch they agree"
    if of_jax is not None and of_torch.values[0].dtype != of_jax.values[0].dtype:
        return f"the dtype: {of_torch.values[0].dtype} in torch, {of_jax.values[0].dtype} in JAX"
    return ""


class _Index:
    """Arrays by their number of elements, to find one that equals another in some order of its axes."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._plain: dict[int, list[NDArray]] = {}
        self._turned: dict[int, list[NDArray]] = {}
        self._strays: dict[int, list[float]] = {}
        for one in operations:
            for value, stray in zip(one.values, one.stray, strict=True):
                keys = _keys(value)
                for key in keys:
                    self._turned.setdefault(value.size, []).append(key)
                self._plain.setdefault(value.size, []).append(keys[0])
                self._strays.setdefault(value.size, []).append(stray)

    def meets(self, value: NDArray, stray: float) -> bool:
        """Whether one of the arrays equals this one. An array of one repeated number is no evidence."""
        plain = _finite(value)
        if value.size not in self._plain or (value.size > 1 and np.ptp(plain) == 0):
            return False
        allowed = max(_TIMES * stray, 64 * np.finfo(np.float64).eps * float(np.linalg.norm(plain)))
        keys = _keys(value)
        pairs = ((np.stack(keys), self._plain), (keys[0][None], self._turned))
        return any(
            bool((np.linalg.norm(np.stack(table[value.size]) - key, axis=1) <= allowed).any())
            for made, table in pairs
            for key in made
        )


def _keys(value: NDArray) -> list[NDArray]:
    """Project an array in each order of its axes; the first is its own order."""
    wide = _finite(value).squeeze()
    orders = itertools.permutations(range(wide.ndim)) if wide.ndim <= 4 else [range(wide.ndim)]
    return [_signs(wide.size) @ wide.transpose(order).ravel() for order in orders]


def _finite(value: NDArray) -> NDArray:
    """The array in float64, with 0 for what masks hold: infinities and numbers near the largest."""
    wide = value.astype(np.float64)
    return np.where(np.abs(wide) < 1e30, wide, 0.0)


@cache
def _signs(size: int) -> NDArray:
    return np.random.default_rng(size).standard_normal((_PROJECTIONS, size)) / np.sqrt(_PROJECTIONS)


def _recorded_torch(run: Callable[[], Any]) -> list[Operation]:
    runs = []
    for seed in (None, *range(_NOISY)):
        recorder = _Recorder()
        with _module_names() as recorder.modules, nullcontext() if seed is None else Noise(seed), recorder:
            run()
        runs.append(recorder.operations)
    return _with_strays(runs)


def _recorded_jax(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Operation]:
    runs = []
    for seed in (None, *range(_NOISY)):
        tape = _JaxTape()
        if seed is None:
            interpreted(function, tape.run)(*arguments)
        else:
            with_noise(function, seed, tape.record)(*arguments)
        runs.append(tape.operations)
    return _with_strays(runs)


class _JaxTape:
    """Records every operation of a JAX function."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
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
                self.operations.append(Operation("input", "", (), [np.asarray(one)]))
        self._kept += results
        by = tuple(self._made[id(one)] for one in operands if id(one) in self._made)
        self._made |= {id(one): len(self.operations) for one in results}
        floating = [np.asarray(one) for one in results if jnp.issubdtype(one.dtype, jnp.floating) and one.size]
        self.operations.append(Operation(eqn.primitive.name, _jax_place(eqn), by, floating))


def _with_strays(runs: Sequence[list[Operation]]) -> list[Operation]:
    first, *noisy = runs
    for index, one in enumerate(first):
        others = [run[index].values for run in noisy if len(run) == len(first)]
        for number, value in enumerate(one.values):
            wide = _finite(value)
            distances = [float(np.linalg.norm(wide - _finite(other[number]))) for other in others]
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
        kwargs = kwargs or {}
        operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        for one in operands:
            if id(one) not in self._made and one.is_floating_point() and one.numel() > 1:
                self._kept.append(one)
                self._made[id(one)] = len(self.operations)
                self.operations.append(Operation("input", "", (), [_array(one)]))
        result = func(*args, **kwargs)
        tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        by = tuple(self._made[id(one)] for one in operands if id(one) in self._made)
        self._made |= {id(one): len(self.operations) for one in tensors}
        self._kept += tensors
        values = [_array(one) for one in tensors if one.is_floating_point() and one.numel()]
        place = " ".join(part for part in (self.modules[-1] if self.modules else "", _user_line()) if part)
        name = func._schema.name.removeprefix("aten::")
        self.operations.append(Operation(name, place, by, values, again=lambda: _variants(func, args, kwargs)))
        return result


def _array(tensor: torch.Tensor) -> NDArray:
    plain = tensor.detach()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).cpu().numpy().copy()


def _variants(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, NDArray]]:
    """Repeat an operation with one argument changed: an epsilon, a choice by name, an axis, a flag, a scalar."""
    for number, argument in enumerate(func._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
        added = func._schema.name == "aten::add" and isinstance(given, float) and 0 < given <= max(_EPSILONS)
        name = "eps" if added else argument.name
        for value in _others(given):
            changed = {**kwargs, argument.name: value} if number >= len(args) else kwargs
            positional = args if number >= len(args) else (*args[:number], value, *args[number + 1 :])
            try:
                found = func(*positional, **changed)
            except (RuntimeError, IndexError, ValueError, TypeError):  # not a value of this argument
                continue
            first = next((one for one in tree_leaves(found) if isinstance(one, torch.Tensor)), None)
            if first is not None and first.is_floating_point():
                yield f"{name}={value!r} instead of {given!r}", _array(first)


def _others(given: Any) -> Sequence[Any]:
    if isinstance(given, bool):
        return [not given]
    if isinstance(given, str):
        return [other for other in ("none", "tanh") if other != given]
    if isinstance(given, float):
        return [other for other in (*_EPSILONS, 1 / given if given else 0.0, -given, given**2) if other != given]
    if isinstance(given, int):
        return [other for other in range(-2, 4) if other != given]
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], int):
        return [[other] for other in range(-2, 3) if other != given[0]]
    return []


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


def _user_line() -> str:
    """The innermost line that is not in a library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and file != __file__ and "site-packages" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _jax_place(eqn: Any) -> str:
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if not frame.file_name.startswith(_LIBRARIES) and "site-packages" not in frame.file_name:
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""

"""How often the static prediction holds: the catalogue under every mode, each disagreement with its cause."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchkit.errors import first_line
from dispatcher_trace.catalogue import CATALOGUE, Entry
from dispatcher_trace.predict import cause_of
from dispatcher_trace.records import Call
from dispatcher_trace.shim import Shims
from dispatcher_trace.trace import record

INSIDE_FUNCTORCH = ("vmap", "func.grad", "func.jvp", "functionalize")
MODES = ("plain", "requires_grad", "no_grad", "autocast", "inference_mode", *INSIDE_FUNCTORCH)


@dataclass(frozen=True)
class Disagreement:
    """A call whose keys were not those that its table predicts.

    Attributes:
        mode: one of :data:`MODES`.
        entry: of the catalogue.
        operator: that was called.
        visited: keys.
        predicted: keys.
        cause: in words; empty where no known cause fits.
    """

    mode: str
    entry: str
    operator: str
    visited: tuple[str, ...]
    predicted: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Agreement:
    """One entry under one mode.

    Attributes:
        mode: one of :data:`MODES`.
        entry: of the catalogue.
        calls: operator calls in the walk, nested ones too.
        disagreements: those of them whose keys the prediction did not name.
        error: what it raised, and without shims did not; empty as it should be.
    """

    mode: str
    entry: str
    calls: int
    disagreements: tuple[Disagreement, ...]
    error: str = ""


def impossible(device: str, catalogue: tuple[Entry, ...] = CATALOGUE) -> dict[tuple[str, str], str]:
    """What torch itself refuses: (mode, entry) to its error, from a run without shims.

    Some callables have no gradient, no batching rule, no forward-mode derivative; which, depends on version and device.
    """
    errors = {}
    for mode in MODES:
        for entry in catalogue:
            if error := _error_of(_program(entry, mode, device)):
                errors[mode, entry.name] = error
    return errors


def measure(
    shims: Shims, device: str, without: Collection[tuple[str, str]], catalogue: tuple[Entry, ...] = CATALOGUE
) -> Iterator[Agreement]:
    """Walk every entry under every mode.

    Args:
        shims: of scope ``all``.
        device: of the inputs.
        without: what :func:`impossible` found.
        catalogue: the entries.
    """
    for mode in MODES:
        for entry in catalogue:
            if (mode, entry.name) not in without:
                yield _walk(shims, entry, mode, _program(entry, mode, device))


def shares(measured: Collection[Agreement]) -> dict[str, float]:
    """The share of calls that went as predicted, by mode."""
    by_mode: dict[str, list[Agreement]] = {}
    for item in measured:
        by_mode.setdefault(item.mode, []).append(item)
    return {
        mode: 1 - sum(len(item.disagreements) for item in items) / sum(item.calls for item in items)
        for mode, items in by_mode.items()
    }


def _program(entry: Entry, mode: str, device: str) -> Callable[[], Any]:
    """The entry under a mode, as a function without arguments that makes its inputs."""
    return lambda: _PROGRAMS[mode](entry.function, entry.inputs(device), device)


def _error_of(program: Callable[[], Any]) -> str:
    """Run it; the error that it raised, which one entry must not end the measurement with, or an empty text."""
    _seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing batching rules, prototypes: of torch's callables, not of the tracer
        try:
            program()
        except Exception as raised:
            return first_line(raised)
    return ""


def _seed() -> None:
    """As ``torch.manual_seed(0)``, which also notes a call stack for every kind of device not in use: 2 ms a call."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def _walk(shims: Shims, entry: Entry, mode: str, program: Callable[[], Any]) -> Agreement:
    with record(shims, kernels=False) as walk:
        error = _error_of(program)
    calls = walk.all_calls
    wrong = tuple(_disagreement(mode, entry.name, call) for call in calls if not call.agrees)
    return Agreement(mode, entry.name, len(calls), wrong, error)


def _disagreement(mode: str, entry: str, call: Call) -> Disagreement:
    predicted = (*(hop.predicted for hop in call.hops if hop.predicted), *call.missed)
    return Disagreement(mode, entry, call.operator, call.path, predicted, cause_of(call))


def _scalar(result: Any) -> Tensor:
    """The sum of all floating-point tensors of a result."""
    tensors = [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]
    total = torch.zeros((), device=tensors[0].device)
    for tensor in tensors:
        total = total + tensor.sum()
    return total


def _requires_grad(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs]
    _scalar(function(*leaves)).backward()


def _no_grad(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    with torch.no_grad():
        function(*[tensor.requires_grad_() for tensor in inputs])


def _autocast(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        function(*[tensor.requires_grad_() for tensor in inputs])


def _inference(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    with torch.inference_mode():
        function(*[tensor.clone() for tensor in inputs])


def _vmap(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    torch.vmap(function, randomness="different")(*[torch.stack([tensor, tensor]) for tensor in inputs])


def _grad(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    torch.func.grad(lambda *given: _scalar(function(*given)))(*inputs)


def _jvp(function: Callable[..., Any], inputs: list[Tensor], device: str) -> None:
    torch.func.jvp(function, tuple(inputs), tuple(torch.ones_like(tensor) for tensor in inputs))


_PROGRAMS: dict[str, Callable[[Callable[..., Any], list[Tensor], str], Any]] = {
    "plain": lambda function, inputs, device: function(*inputs),
    "requires_grad": _requires_grad,
    "no_grad": _no_grad,
    "autocast": _autocast,
    "inference_mode": _inference,
    "vmap": _vmap,
    "func.grad": _grad,
    "func.jvp": _jvp,
    "functionalize": lambda function, inputs, device: torch.func.functionalize(function)(*inputs),
}

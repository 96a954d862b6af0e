"""How often the static prediction holds: every entry of the catalogue under every mode."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchkit import Quantity
from benchkit.errors import first_line
from benchkit.run import Run
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.explain.predict import cause_of
from dispatcher_trace.measure.catalogue import CATALOGUE, Entry
from dispatcher_trace.recording import record

calls_user_code(__file__)

INSIDE_FUNCTORCH = ("vmap", "func.grad", "func.jvp", "functionalize")
MODES = ("plain", "requires_grad", "no_grad", "autocast", "inference_mode", *INSIDE_FUNCTORCH)


@dataclass(frozen=True)
class Disagreement:
    """A call that visited other keys than its table predicts.

    Attributes:
        operator: Operator that was called.
        visited: Keys that the call visited.
        predicted: Keys that were predicted.
        cause: Reason in words; empty if no known cause fits.
    """

    operator: str
    visited: tuple[str, ...]
    predicted: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Agreement:
    """One entry under one mode.

    Attributes:
        mode: One of :data:`MODES`.
        entry: Name of the entry of the catalogue.
        calls: Number of operator calls in the trace, nested ones too.
        disagreements: Those calls whose keys were not predicted.
        error: What the entry raised although it does not raise without shims; empty if all is well.
    """

    mode: str
    entry: str
    calls: int
    disagreements: tuple[Disagreement, ...]
    error: str = ""


def entries(run: Run) -> tuple[Entry, ...]:
    """The entries of the catalogue that a run traces."""
    return CATALOGUE[:: run.configuration["catalogue_step"]]


def refused(device: str, catalogue: tuple[Entry, ...] = CATALOGUE) -> dict[tuple[str, str], str]:
    """What torch itself refuses, from a run without shims.

    Some callables have no gradient, no batching rule or no forward-mode derivative. Which ones depends on the version
    of torch and on the device.

    Args:
        device: Device of the inputs.
        catalogue: The entries.

    Returns:
        The error, by mode and name of the entry.
    """
    errors = {}
    for mode in MODES:
        for entry in catalogue:
            if error := _run(entry, mode, device):
                errors[mode, entry.name] = error
    return errors


def measure(
    shims: Shims, device: str, without: Collection[tuple[str, str]], catalogue: tuple[Entry, ...] = CATALOGUE
) -> Iterator[Agreement]:
    """Trace every entry under every mode.

    Args:
        shims: Installed with scope ``all``.
        device: Device of the inputs.
        without: What :func:`refused` found.
        catalogue: The entries.
    """
    for mode in MODES:
        for entry in catalogue:
            if (mode, entry.name) not in without:
                with record(shims, kernels=False) as trace:
                    error = _run(entry, mode, device)
                calls = trace.all_calls
                wrong = [call for call in calls if not call.agrees]
                disagreements = tuple(
                    Disagreement(call.operator, call.path, call.predicted, cause_of(call)) for call in wrong
                )
                yield Agreement(mode, entry.name, len(calls), disagreements, error)


def record_agreement(run: Run, shims: Shims, refusals: dict[tuple[str, str], str]) -> None:
    """Record for each mode how often the prediction holds, and each kind of disagreement with its cause.

    Args:
        run: Where the records go.
        shims: Installed with scope ``all``.
        refusals: What :func:`refused` found.
    """
    traced = entries(run)
    measured = list(measure(shims, run.device, refusals, traced))
    run.record("catalogue", data=[[entry.name, entry.family] for entry in traced])
    for mode in MODES:
        items = [item for item in measured if item.mode == mode]
        wrong = [disagreement for item in items for disagreement in item.disagreements]
        calls = sum(item.calls for item in items)
        run.record(
            "agreement",
            {"mode": mode, "functorch": mode in INSIDE_FUNCTORCH},
            {
                "entries": Quantity(len(items), ""),
                "calls": Quantity(calls, ""),
                "agreed": Quantity(calls - len(wrong), ""),
            },
            {
                "disagreements": [{**asdict(kind), "calls": count} for kind, count in Counter(wrong).items()],
                "errors": [[item.entry, item.error] for item in items if item.error],
                "refused": [name for refused_mode, name in refusals if refused_mode == mode],
            },
        )


def _run(entry: Entry, mode: str, device: str) -> str:
    """Run an entry under a mode.

    Returns:
        The error that it raised, or an empty text: one entry must not end the measurement.
    """
    _seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's callables: missing batching rules, prototypes
        try:
            _PROGRAMS[mode](entry.function, entry.inputs(device), device)
        except Exception as raised:
            return first_line(raised)
    return ""


def _seed() -> None:
    """Seed as ``torch.manual_seed(0)`` does, without its call stack for each unused kind of device (2 ms a call)."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


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

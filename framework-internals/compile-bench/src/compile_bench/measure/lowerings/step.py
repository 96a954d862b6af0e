"""A compiled step with one lowering for each operator, in a process of its own.

Every variant has its own process, because whatever selects a lowering (a patched class, a registry, a variable of the
environment) may be invisible to Dynamo's guards: in one process a variant could run another one's program.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import lowering
from benchkit import UserError
from compile_bench.capture.collector import backend_of
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.regional import OwnRegions, compile_case, regions_compiled_with
from compile_bench.targets.target import Target, describe_error, tensors_in
from lowering import Call, Choice

# How far norms of results, gradients and parameters may lie apart, relative to the larger one, by the narrowest dtype
# of the computation. It is far above a different order of sums, and far below a wrong operator.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Operators:
    """The operators of a target that have two lowerings."""

    calls: tuple[Call, ...]  # calls of :func:`lowering.lower`, each once, in order
    adapters: tuple[str, ...]  # names of the target's adapters
    tolerance: float  # largest relative difference of the norms of two variants, see :meth:`LoweredStep.prepare`

    @property
    def names(self) -> list[str]:
        """Every operator once."""
        return list(dict.fromkeys([*(call.operator for call in self.calls), *self.adapters]))


def operators(case: Case) -> Operators:
    """Trace a step of a target and list its operators with two lowerings."""
    target = load_case(case)
    static = case if isinstance(target.model, OwnRegions) else replace(case, dynamic=False, scope="whole")
    with regions_compiled_with(lambda wanted: backend_of("eager")), lowering.recorded_calls() as calls:
        model = compile_case(target.copied(), static, backend=backend_of("eager"))
        try:
            target.step(model, train=case.train)()
        except Exception as error:  # whatever the user's model raises
            raise UserError(f"{case.target}: the {case.kind} step raised {describe_error(error)}") from error
    names = tuple(adapter.name for adapter in target.operators)
    return Operators(tuple(dict.fromkeys(calls)), names, _AGREEMENT[_narrowest(target)])


def _narrowest(target: Target) -> torch.dtype:
    tensors = [*target.model.parameters(), *tensors_in((target.args, dict(target.kwargs)))]
    dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in _AGREEMENT]
    dtypes += [target.autocast] if target.autocast in _AGREEMENT else []
    return max(dtypes or [torch.float32], key=lambda dtype: torch.finfo(dtype).eps)


class LoweredStep:
    """A step of a target, compiled with one lowering for each operator."""

    def __init__(self, case: Case, choices: Mapping[str, Choice]) -> None:
        target = load_case(case)
        adapters = {adapter.name: adapter for adapter in target.operators}
        self._chosen = ExitStack()  # for the rest of the process
        for name, choice in choices.items():
            selected = adapters[name].select(choice) if name in adapters else lowering.choose(choice, name)
            self._chosen.enter_context(selected)
        self._model = target.copied()
        self._step = target.step(compile_case(self._model, case), train=case.train)
        self._on_gpu = case.device == "cuda"
        self._name = case.target

    def prepare(self) -> tuple[float, ...]:
        """Compile, and take the first steps.

        Returns the Euclidean norms of their results, of the gradients after them, and of the parameters.
        """
        try:
            results = [self._step() for _ in range(FIRST_STEPS)]
        except Exception as error:  # whatever the user's model, or the kernel, raises
            raise UserError(f"{self._name}: the compiled step raised {describe_error(error)}") from error
        parameters = list(self._model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return tuple(_norm(group) for group in (tensors_in(results), gradients, parameters))

    def run(self, steps: int) -> None:
        """Take steps and wait for the device."""
        for _ in range(steps):
            self._step()
        if self._on_gpu:
            torch.cuda.synchronize()


def _norm(tensors: Any) -> float:
    squares: list[Tensor] = [
        tensor.detach().double().square().sum() for tensor in tensors if tensor.is_floating_point()
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

"""A compiled step with one lowering for each operator, in a process of its own.

Every variant has its own process, because whatever selects a lowering (a patched class, a registry, a variable of the
environment) may be invisible to Dynamo's guards: in one process a variant could run another one's program.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import lowering
from benchkit import UserError
from compile_bench.capture.collector import backend_of
from compile_bench.measure.accuracy import has_rounding
from compile_bench.measure.steps import load_case
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.randomness import squeezed
from compile_bench.targets.regional import OwnRegions, compile_case, regions_compiled_with
from compile_bench.targets.target import Target, describe_error, tensors_in
from lowering import Call, Choice

# How far norms of all results, gradients or parameters may lie apart, relative to the larger one, by the narrowest
# dtype of the computation. It is far above a different order of sums, and far below a wrong operator.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


# See :func:`marks_of`.
Marks = tuple[float, ...]


@dataclass(frozen=True)
class Operators:
    """The operators of a target that have two lowerings."""

    calls: tuple[Call, ...]  # calls of :func:`lowering.lower`, each once, in order
    adapters: tuple[str, ...]  # names of the target's adapters
    tolerance: float  # largest relative difference of the norms of two variants, see :func:`marks_of`

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
        self._arguments = [tensor for tensor in target.tensors if tensor.requires_grad and tensor.is_leaf]
        self._step = target.step(compile_case(self._model, case), train=case.train)
        self._on_gpu = case.device == "cuda"
        self._name = case.target

    def prepare(self) -> dict[str, dict[str, Marks]]:
        """Compile, and take the first steps.

        Returns the marks of their results, of the gradients after them, those of arguments included, and of the
        parameters and buffers, by kind and name.
        """
        for tensor in self._arguments:
            tensor.grad = None
        try:
            results = [self._step() for _ in range(FIRST_STEPS)]
        except Exception as error:  # whatever the user's model, or the kernel, raises
            raise UserError(f"{self._name}: the compiled step raised {describe_error(error)}") from error
        parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        named = {**parameters, **{f"argument {number}": tensor for number, tensor in enumerate(self._arguments)}}
        outputs = {str(number): tensor for number, tensor in enumerate(tensors_in(results), 1)}
        kinds: dict[str, dict[str, Tensor]] = {
            "gradient": {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
        }
        for kind, tensors in (("result", outputs), ("state", {**parameters, **dict(self._model.named_buffers())})):
            kinds[kind] = {name: tensor for name, tensor in tensors.items() if has_rounding(tensor)}
            kinds[f"whole-number {kind}"] = {
                name: tensor for name, tensor in tensors.items() if not has_rounding(tensor)
            }
        return {kind: {name: marks_of(tensor) for name, tensor in tensors.items()} for kind, tensors in kinds.items()}

    def run(self, steps: int) -> None:
        """Take steps and wait for the device."""
        for _ in range(steps):
            self._step()
        if self._on_gpu:
            torch.cuda.synchronize()


_SIGNS, _PROJECTIONS = 1 << 20, 3


@cache
def _signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2, (_SIGNS, _PROJECTIONS), generator=generator, device="cpu")
    return drawn.double().mul_(2).sub_(1).to(device)


def marks_of(tensor: Tensor) -> Marks:
    """The Euclidean norm of a tensor, large values squeezed, and its products with three fixed vectors of random signs.

    A tensor of another sign or order has the same norm. Two tensors whose difference has the norm d differ in such a
    product by about d.
    """
    signs, square = _signs(tensor.device), 0.0
    products = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=tensor.device)
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    for number, part in enumerate(real.flatten().split(_SIGNS)):
        wide = squeezed(part.double())
        square += wide.square().sum().item()
        products += (wide @ signs[: len(wide)]) * signs[number % _SIGNS]
    return (square**0.5, *products.tolist())

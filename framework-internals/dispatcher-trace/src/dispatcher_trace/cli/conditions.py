"""The conditions under which a callable runs: autocast, inference mode, vmap, compile, backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, is_dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch

from benchkit import UserError
from dispatcher_trace.capture.user_stack import calls_user_code

calls_user_code(__file__)

# Results of which the code has not run when they are returned.
_UNRUN: dict[type, str] = {
    GeneratorType: "a generator",
    CoroutineType: "a coroutine",
    AsyncGeneratorType: "an asynchronous generator",
}


@dataclass(frozen=True)
class Conditions:
    """Under what a callable runs.

    Attributes:
        device: ``cpu`` or ``cuda``: where factory functions without a device put tensors, and autocast's device.
        autocast: its dtype, or None.
        inference_mode: whether to run under ``torch.inference_mode``.
        backward: whether to go on with ``sum().backward()`` of what the callable returns; a complex tensor's real and
            imaginary parts are summed.
        vmap: map over the first dimension of every tensor given.
        compile: run what ``torch.compile`` makes of the callable.
    """

    device: str = "cpu"
    autocast: torch.dtype | None = None
    inference_mode: bool = False
    backward: bool = False
    vmap: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.backward and self.inference_mode:
            raise UserError("--backward and --inference-mode exclude each other: inference mode records no graph")

    def prepare(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
        """Everything that comes before the call to be traced; what is returned makes that call and returns its result.

        With ``compile`` the callable runs once here, so that the trace holds the compiled call and not the compiler.

        Raises:
            UserError: when there is nothing to map over, or (from what is returned) nothing to go backward from, or a
                generator or coroutine came back, of which nothing ran.
        """
        if self.vmap:
            function = _mapped(function, tensors)
        if self.compile:
            function = torch.compile(function)
            self._run(function, tensors)
        return lambda: self._run(function, tensors)

    def _run(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        for tensor in tensors.values():
            tensor.grad = None  # of an earlier call
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            result = function(**tensors)
        _refuse_unrun(result)
        if self.backward:
            roots = [tensor for tensor in _tensors(result) if tensor.requires_grad]
            if not roots:
                raise UserError(
                    f"--backward: found no tensor that requires a gradient in the result, of type "
                    f"{type(result).__name__}; return one, alone or in tuples, lists, dictionaries and dataclasses"
                )
            torch.autograd.backward([_sum(root) for root in roots])
        return result

    def _contexts(self) -> list[AbstractContextManager[Any]]:
        contexts: list[AbstractContextManager[Any]] = []
        if self.device != "cpu":
            contexts.append(torch.device(self.device))
        if self.autocast is not None:
            contexts.append(torch.autocast(self.device, dtype=self.autocast))
        if self.inference_mode:
            contexts.append(torch.inference_mode())
        return contexts


def _mapped(function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
    if not tensors or any(tensor.dim() == 0 for tensor in tensors.values()):
        raise UserError(
            "--vmap maps over the first dimension of each --tensor: give at least one, each with a dimension"
        )
    names = list(tensors)

    def over_values(*values: torch.Tensor) -> Any:
        return function(**dict(zip(names, values, strict=True)))

    mapped = torch.vmap(over_values, randomness="different")
    return lambda **given: mapped(*given.values())


def _refuse_unrun(result: Any) -> None:
    kind = _UNRUN.get(type(result))
    if kind is None:
        return
    if isinstance(result, CoroutineType):
        result.close()  # or Python warns that it was never awaited
    raise UserError(
        f"the traced code returned {kind}, of which nothing ran; trace a function that runs it: "
        "list(…) of a generator, asyncio.run(…) of a coroutine"
    )


def _sum(root: torch.Tensor) -> torch.Tensor:
    """A real number to go backward from, which a complex sum is not."""
    return torch.view_as_real(root.resolve_conj()).sum() if root.is_complex() else root.sum()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):  # as the outputs of Hugging Face's models are, which are dataclasses too
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

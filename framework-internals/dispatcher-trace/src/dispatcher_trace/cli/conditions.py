"""The conditions under which a callable runs: autocast, inference mode, vmap, compile, backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from benchkit import UserError
from dispatcher_trace.capture.types import dtype_name
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.recording import refuse_unrun

calls_user_code(__file__)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a callable runs.

    Attributes:
        device: ``cpu`` or ``cuda``: default device of factory functions, and device of autocast.
        autocast: Dtype of autocast; None for no autocast.
        inference_mode: Whether to run under ``torch.inference_mode``.
        backward: Whether to run ``sum().backward()`` on the result; a complex tensor's real and imaginary parts are
            summed.
        vmap: Whether to map over the first dimension of every tensor.
        compile: Whether to compile the callable with ``torch.compile``.
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
        if self.autocast is not None and not _has_autocast(self.device, self.autocast):
            raise UserError(
                f"--autocast: torch has no autocast to {dtype_name(self.autocast)} on {self.device}; use bf16 or f16"
            )

    def prepare(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], Any]:
        """Do all that comes before the call that is traced.

        With ``compile`` the callable runs once here, so that the trace has the compiled call and not the compiler.

        Args:
            function: The callable.
            tensors: Its arguments.

        Returns:
            A function that makes the call and returns its result. It raises UserError if ``backward`` finds no tensor
            that requires a gradient, or if the result is a generator or coroutine that has not run.

        Raises:
            UserError: If ``vmap`` has no tensor to map over.
        """
        if self.vmap:
            function = _mapped(function, tensors)
        if self.compile:
            function = torch.compile(function)
            self._run(function, tensors)
        return lambda: self._run(function, tensors)

    def _run(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> Any:
        for tensor in tensors.values():
            tensor.grad = None  # left by an earlier call
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            result = function(**tensors)
        refuse_unrun(result)
        if self.backward:
            roots = [tensor for tensor in _tensors(result) if tensor.requires_grad]
            if not roots:
                raise UserError(
                    "--backward: found no tensor that requires a gradient in the result, of type "
                    f"{type(result).__name__}; return one, alone or in tuples, lists, dictionaries and dataclasses"
                )
            # backward needs a real number
            real = (torch.view_as_real(root.resolve_conj()) if root.is_complex() else root for root in roots)
            torch.autograd.backward([root.sum() for root in real])
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


def _has_autocast(device: str, dtype: torch.dtype) -> bool:
    """Whether torch does not disable an autocast to this dtype, with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.autocast(device, dtype=dtype)._enabled


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


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):  # such as the outputs of Hugging Face's models, which are also dataclasses
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

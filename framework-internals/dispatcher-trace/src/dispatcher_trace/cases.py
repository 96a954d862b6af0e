"""The walks of the report: two expressions, two dtypes, four conditions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

EXPRESSIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a + b": lambda a, b: a + b,
    "a @ b": lambda a, b: a @ b,
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
MODES = ("plain", "requires_grad", "autocast", "inference_mode")


@dataclass(frozen=True)
class Case:
    """One expression under one condition.

    Attributes:
        expression: a key of :data:`EXPRESSIONS`.
        dtype: a key of :data:`DTYPES`.
        mode: one of :data:`MODES`; ``requires_grad`` goes on with a backward, ``autocast`` is to bf16 with inputs that
            require gradients, so that both keys are in play.
        size: rows and columns of both inputs.
        device: of the inputs.
    """

    expression: str
    dtype: str
    mode: str
    size: int
    device: str

    def prepare(self) -> Callable[[], list[torch.Tensor]]:
        """Make the inputs now; what is returned evaluates the expression alone, to its result and gradients."""
        generator = torch.Generator().manual_seed(0)
        made = (torch.randn(self.size, self.size, generator=generator) for _ in range(2))
        inputs = [tensor.to(self.device, DTYPES[self.dtype]) for tensor in made]
        if self.mode in ("requires_grad", "autocast"):
            inputs = [tensor.requires_grad_() for tensor in inputs]
        gradient = torch.ones(self.size, self.size, dtype=DTYPES[self.dtype], device=self.device)

        def evaluate() -> list[torch.Tensor]:
            with self._context():
                result = EXPRESSIONS[self.expression](*inputs)
            if self.mode != "requires_grad":
                return [result]
            result.backward(gradient)
            return [result, *(tensor.grad for tensor in inputs if tensor.grad is not None)]

        return evaluate

    def _context(self) -> AbstractContextManager[object]:
        if self.mode == "autocast":
            return torch.autocast(self.device, dtype=torch.bfloat16)
        return torch.inference_mode() if self.mode == "inference_mode" else nullcontext()


def cases(size: int, device: str) -> list[Case]:
    """All of them, in the order of the report."""
    return [Case(e, dtype, mode, size, device) for e in EXPRESSIONS for dtype in DTYPES for mode in MODES]

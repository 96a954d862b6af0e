"""The cases of the report: one expression, one dtype, one mode each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Expression = Callable[[Tensor, Tensor], Tensor]


def _attention(a: Tensor, b: Tensor) -> Tensor:
    heads_a, heads_b = (x.view(1, 4, x.shape[0] // 4, x.shape[1]) for x in (a, b))
    return F.scaled_dot_product_attention(heads_a, heads_b, heads_b, is_causal=True)


EXPRESSIONS: dict[str, Expression] = {
    "a + b": lambda a, b: a + b,
    "a @ b": lambda a, b: a @ b,
    "torch.softmax(a, -1)": lambda a, b: torch.softmax(a, -1),
    "F.linear(a, b)": F.linear,
    "F.scaled_dot_product_attention(a, b, b)": _attention,
    "a.clone().mul_(b)": lambda a, b: a.clone().mul_(b),
    "a.t()[1:].reshape(-1)": lambda a, b: a.t()[1:].reshape(-1),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# The report compares the same call under all of them.
MODES = ("plain", "requires_grad", "autocast", "inference_mode", "vmap", "compile")
# Shown hop by hop: the shortest trace, Autocast with Autograd, a backward, a kernel that calls operators, shared
# memory, and a custom operator.
SHOWN = (
    ("a + b", "f32", "plain"),
    ("a @ b", "f32", "autocast"),
    ("a @ b", "bf16", "requires_grad"),
    ("F.scaled_dot_product_attention(a, b, b)", "f32", "plain"),
    ("a.t()[1:].reshape(-1)", "f32", "requires_grad"),
    ("scaled_relu(x, 2.0)", "f32", "requires_grad"),
)
# Single-stepped.
STEPPED = (
    ("a + b", "f32"),
    ("a @ b", "f32"),
    ("a @ b", "bf16"),
    ("torch.softmax(a, -1)", "f32"),
    ("F.linear(a, b)", "f32"),
    ("F.scaled_dot_product_attention(a, b, b)", "f32"),
)
# Files beside the report that hold the whole GPT step.
PAGE = "gpt_step.html"
PERFETTO = "gpt_step.perfetto.json.gz"

EVERY_MODE = "a @ b"
FOUR_MODES = ("a + b", "a @ b")


@dataclass(frozen=True)
class Case:
    """One expression in one dtype under one mode.

    Attributes:
        expression: A key of :data:`EXPRESSIONS`.
        dtype: A key of :data:`DTYPES`.
        mode: One of :data:`MODES`. ``requires_grad`` includes a backward. ``autocast`` is to bf16, with inputs that
            require gradients, so that both keys take part. ``vmap`` maps over a batch of two. ``compile`` calls a
            function that was compiled before.
        size: Rows and columns of both inputs.
        device: Device of the inputs.
    """

    expression: str
    dtype: str
    mode: str
    size: int
    device: str

    def __str__(self) -> str:
        return f"`{self.expression}` {self.dtype} {self.mode}"

    def prepare(self) -> Callable[[], list[torch.Tensor]]:
        """Make the inputs.

        Returns:
            A function that evaluates the expression only, and returns its result and the gradients.
        """
        generator = torch.Generator().manual_seed(0)
        made = (torch.randn(self.size, self.size, generator=generator) for _ in range(2))
        inputs = [tensor.to(self.device, DTYPES[self.dtype]) for tensor in made]
        if self.mode in ("requires_grad", "autocast"):
            inputs = [tensor.requires_grad_() for tensor in inputs]
        if self.mode == "vmap":
            inputs = [torch.stack([tensor, tensor + 1]) for tensor in inputs]
        function = self._function()
        with torch.no_grad():
            gradient = torch.ones_like(function(*inputs)) if self.mode == "requires_grad" else None

        def evaluate() -> list[torch.Tensor]:
            with self._context():
                result = function(*inputs)
            if gradient is None:
                return [result]
            result.backward(gradient)
            return [result, *(tensor.grad for tensor in inputs if tensor.grad is not None)]

        return evaluate

    def _function(self) -> Expression:
        if self.mode == "vmap":
            return torch.vmap(EXPRESSIONS[self.expression])
        return compiled(self.expression) if self.mode == "compile" else EXPRESSIONS[self.expression]

    def _context(self) -> AbstractContextManager[object]:
        if self.mode == "autocast":
            return torch.autocast(self.device, dtype=torch.bfloat16)
        return torch.inference_mode() if self.mode == "inference_mode" else nullcontext()


@functools.cache
def compiled(expression: str) -> Expression:
    """The compiled expression; its first call compiles it."""
    function: Expression = torch.compile(EXPRESSIONS[expression])
    return function


def cases(size: int, device: str, *, compile: bool) -> list[Case]:
    """All cases, in the order of the report.

    Args:
        size: Rows and columns of the inputs.
        device: Device of the inputs.
        compile: Whether this machine can compile.
    """
    four = [Case(e, dtype, mode, size, device) for e in FOUR_MODES for dtype in DTYPES for mode in MODES[:4]]
    modes = MODES[4:] if compile else MODES[4:5]
    other_modes = [Case(EVERY_MODE, "f32", mode, size, device) for mode in modes]
    others = [e for e in EXPRESSIONS if e not in FOUR_MODES]
    single = [Case(e, dtype, "plain", size, device) for e in others[:3] for dtype in DTYPES]
    memory = [Case(e, "f32", "requires_grad", size, device) for e in others]
    return [*four, *other_modes, *single, *memory]

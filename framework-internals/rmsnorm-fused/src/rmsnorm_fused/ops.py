"""The operators of this package as PyTorch's dispatcher knows them.

Two families, ``native`` and ``triton``, share schemas, fake kernels and derivatives. In ``native`` the dispatcher
itself picks the C++ kernel on a CPU and the CUDA kernel on a GPU, as it does for PyTorch's own operators. Triton needs
a family of its own, because it serves the same devices and a caller may ask for either.

``forward(x, weight, eps) -> (y, rstd)`` also gives rstd, which the derivative needs. ``backward`` is an operator too:
it is opaque to torch.compile as a whole, and has a derivative, so that double backward is right.

They are plain operators and not ``torch.library.triton_op``, which lets Inductor see the kernels: Inductor fuses
nothing into a kernel that a user wrote, and under Triton's interpreter there is no kernel for it to see.

The operators are defined when this module is imported, their kernels are imported (and built) at the first call: a
graph that torch.compile took from its cache finds them either way.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any, Literal, cast

import torch

from rmsnorm_fused.impl import reference
from rmsnorm_fused.layout import as_rows
from rmsnorm_fused.validation import wide_dtype

Family = Literal["native", "triton"]

_KERNELS: dict[Family, dict[str, str]] = {
    "native": {"CPU": "cpp", "CUDA": "cuda"},
    "triton": {"CPU": "triton", "CUDA": "triton"},
}

_library = torch.library.Library("rmsnorm_fused", "DEF")  # lives as long as the process


def forward(family: Family, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Y of the family's operator, differentiable.

    Args:
        family: whose kernels.
        x: (..., N), checked by the caller.
        weight: (N,) or None, checked by the caller.
        eps: added to the mean square.
    """
    operator = torch.ops.rmsnorm_fused.native_forward if family == "native" else torch.ops.rmsnorm_fused.triton_forward
    return cast("tuple[torch.Tensor, torch.Tensor]", operator(x, weight, eps))[0]


def _register(family: Family) -> None:
    _library.define(f"{family}_forward(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)")
    _library.define(
        f"{family}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, bool needs_dweight)"
        " -> (Tensor dx, Tensor dweight)"
    )
    for key, module in _KERNELS[family].items():
        _register_kernels(family, key, module)
    forward_name, backward_name = f"rmsnorm_fused::{family}_forward", f"rmsnorm_fused::{family}_backward"
    torch.library.register_fake(forward_name, _fake_forward, lib=_library)
    torch.library.register_fake(backward_name, _fake_backward, lib=_library)

    def gradients(ctx: Any, dy: torch.Tensor, _drstd: None) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        needs_dweight = weight is not None and ctx.needs_input_grad[1]
        operator = getattr(torch.ops.rmsnorm_fused, f"{family}_backward")
        dx, dweight = operator(dy, x, weight, rstd, needs_dweight)
        return dx, dweight if needs_dweight else None, None

    torch.library.register_autograd(forward_name, gradients, setup_context=_save_forward, lib=_library)
    torch.library.register_autograd(backward_name, _second_gradients, setup_context=_save_backward, lib=_library)


def _register_kernels(family: Family, key: str, module: str) -> None:
    @functools.cache
    def kernels() -> ModuleType:
        return importlib.import_module(f"rmsnorm_fused.impl.{module}")

    def forward_kernel(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        if x.numel() == 0:
            return torch.empty_like(x, memory_format=torch.contiguous_format), _rstd_like(x).zero_()
        y, rstd = kernels().forward(as_rows(x), weight, eps)
        return y.view(x.shape), rstd.view(x.shape[:-1])

    def backward_kernel(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, needs_dweight: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.numel() == 0:
            dx, dweight = _fake_backward(dy, x, weight, rstd, needs_dweight)
            return dx, dweight.zero_()
        dx, dweight = kernels().backward(as_rows(dy), as_rows(x), weight, rstd.contiguous().view(-1), needs_dweight)
        return dx.view(x.shape), x.new_empty(0) if dweight is None else dweight

    _library.impl(f"{family}_forward", forward_kernel, key)
    _library.impl(f"{family}_backward", backward_kernel, key)


def _rstd_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


def _fake_forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), _rstd_like(x)


def _fake_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, needs_dweight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    # A schema cannot return an optional tensor: dweight is empty where it was not asked for.
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else x.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dweight


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    dy, x, weight, rstd, ctx.needs_dweight = inputs
    ctx.save_for_backward(dy, x, weight, rstd)
    if not ctx.needs_dweight:
        ctx.mark_non_differentiable(output[1])


def _second_gradients(
    ctx: Any, ddx: torch.Tensor | None, ddweight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, None]:
    # rstd gets no gradient of its own: it is a function of x, and the gradient of x holds its part.
    dy, x, weight, rstd = ctx.saved_tensors
    return (
        *reference.second_gradients(ddx, ddweight if ctx.needs_dweight else None, dy, x, weight, rstd),
        None,
        None,
    )


_register("native")
_register("triton")

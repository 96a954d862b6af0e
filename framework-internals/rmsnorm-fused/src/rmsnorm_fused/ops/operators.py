"""The schemas and derivatives of this package's operators.

Two families, ``native`` and ``triton``, share schemas, fake kernels, derivatives and batching rules. In ``native``, the
dispatcher selects the C++ kernel on a CPU and the CUDA kernel on a GPU, as it does for PyTorch's own operators. Triton
needs a separate family because it supports the same devices and a caller may request either.

``forward(x, weight, …) -> (y, rstd)`` also returns rstd, which the derivative needs. ``forward_add`` adds a residual
first and returns the sum too. ``backward`` is the derivative of both.
With a residual wider than x, which only Triton's kernels take, ``backward_add`` also returns the gradient in the dtype
of the residual: the next operator of the backward pass needs one, and the residual stream the other.
For double backward and torch.func, a formula in torch's operators replaces it. ``quantize`` is for inference and has no
derivative.

``layer_forward`` and ``layer_backward`` are layer normalisation, with and without a residual. They pass the mean and
rstd of each row as one tensor, ``moments`` (..., 2), and the gradients of weight and bias as one, ``dparameters``
(2, N): a kernel sums both in one pass.

On a GPU, torch.compile sees the launches of Triton's kernels in place of the operators (:mod:`rmsnorm_fused.ops.rows`)
and launches them from the code that it writes. The kernels of ``native`` stay operators.

Importing this module registers schemas, fake kernels and derivatives. The compiled extension registers its kernels, and
a derivative of the forward pass in C++ under AutogradCPU and AutogradCUDA. These take precedence over the Python
derivative registered here under the alias Autograd, whose calls take 10 to 20 µs longer.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, cast

import torch

from native_build.derivatives import derivative_kernel
from rmsnorm_fused.impl import reference
from rmsnorm_fused.ops import batching, fakes
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import is_refusal_of_func

Family = Literal["native", "triton"]
FAMILIES: tuple[Family, ...] = ("native", "triton")

_OPTIONS = "float eps, float weight_offset, bool llama"
_SCHEMAS = (
    f"forward(Tensor x, Tensor? weight, {_OPTIONS}) -> (Tensor y, Tensor rstd)",
    f"forward_add(Tensor x, Tensor residual, Tensor? weight, {_OPTIONS}) -> (Tensor y, Tensor s, Tensor rstd)",
    "backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float weight_offset, bool llama,"
    " bool needs_dweight, bool deterministic) -> (Tensor dx, Tensor dweight)",
    "backward_add(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float weight_offset,"
    " bool needs_dweight) -> (Tensor dx, Tensor dresidual, Tensor dweight)",
    f"quantize(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, {_OPTIONS}, ScalarType dtype)"
    " -> (Tensor y, Tensor s, Tensor row_scales)",
    "layer_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor s, Tensor moments)",
    "layer_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor moments, bool needs_dparameters,"
    " bool deterministic) -> (Tensor dx, Tensor dparameters)",
)

NATIVE = ("forward", "forward_add", "backward", "quantize", "layer_forward", "layer_backward")
"""The operators that have C++ and CUDA C++ kernels; ``backward_add`` is Triton's alone."""
NATIVE_SCHEMAS = tuple(schema for schema in _SCHEMAS if schema.partition("(")[0] in NATIVE)

LIBRARY = torch.library.Library("rmsnorm_fused", "DEF")  # registrations last as long as this object


def operator(family: Family, name: str) -> Any:
    """``torch.ops.rmsnorm_fused.<family>_<name>``."""
    return getattr(torch.ops.rmsnorm_fused, f"{family}_{name}")


def forward(family: Family, x: torch.Tensor, weight: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Y, differentiable; the caller has checked the arguments."""
    return _call(operator(family, "forward"), x, weight, *options)[0]


def forward_add(
    family: Family, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y and s = x + residual, both differentiable; the caller has checked the arguments."""
    y, s, _ = _call(operator(family, "forward_add"), x, residual, weight, *options)
    return y, s


def layer_norm(
    family: Family,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Y, or (y, s) with a residual, differentiable; the caller has checked the arguments."""
    y, s, _ = _call(operator(family, "layer_forward"), x, residual, weight, bias, eps)
    return y if residual is None else (y, s)


def _call(differentiable: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    try:
        return cast("tuple[torch.Tensor, ...]", differentiable(*arguments))
    except RuntimeError as error:
        if not is_refusal_of_func(error):
            raise
        raise NotImplementedError(
            "torch.func does not support derivatives registered from Python, which Triton and the prebuilt library "
            'use; use backend="pytorch", or "cpp" or "cuda" compiled here'
        ) from error


def quantize(
    family: Family,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantised y, s (empty without a residual) and the row scales (..., 1) (empty with a static scale)."""
    return cast(
        "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
        operator(family, "quantize")(x, residual, weight, scale, *options, dtype),
    )


# ---- derivatives


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, *options = inputs
    ctx.options = Options(*options)
    ctx.save_for_backward(x, weight, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _save_forward_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, *options = inputs
    ctx.options = Options(*options)
    ctx.wide_residual_of = x.dtype if residual.dtype != x.dtype else None
    ctx.save_for_backward(output[1], weight, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def gradients(
    family: Family, ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, weight_wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dx and dweight; ``ctx`` holds (s, weight, rstd) and the options."""
    s, weight, rstd = ctx.saved_tensors
    if dy is None:  # y was not used; only the sum has a gradient
        return ds, None
    needs_dweight = weight is not None and weight_wanted
    if torch.is_grad_enabled():  # create_graph=True
        return reference.gradients(dy, ds, s, weight, ctx.options)
    dx, dweight = operator(family, "backward")(
        dy, ds, s, weight, rstd, *ctx.options[1:], needs_dweight, torch.are_deterministic_algorithms_enabled()
    )
    return dx, dweight if needs_dweight else None


def _gradients_of_both(
    family: Family, ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, weight_wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Dx, dresidual and dweight where the residual is wider than x."""
    if dy is None or torch.is_grad_enabled():
        dresidual, dweight = gradients(family, ctx, dy, ds, weight_wanted)
        return None if dresidual is None else dresidual.to(ctx.wide_residual_of), dresidual, dweight
    s, weight, rstd = ctx.saved_tensors  # activation checkpointing lets it be read once
    needs_dweight = weight is not None and weight_wanted
    dx, dresidual, dweight = operator(family, "backward_add")(
        dy, ds, s, weight, rstd, ctx.options.weight_offset, needs_dweight
    )
    return dx, dresidual, dweight if needs_dweight else None


def _save_layer_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, _, ctx.eps = inputs
    _, s, moments = output
    ctx.save_for_backward(x if residual is None else s, weight, moments)
    ctx.mark_non_differentiable(*((s, moments) if residual is None else (moments,)))
    ctx.set_materialize_grads(False)


def layer_gradients(family: Family, ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None) -> tuple[Any, ...]:
    """Dx, dweight and dbias; ``ctx`` holds (s, weight, moments), eps, and asks for weight and bias third and fourth."""
    s, weight, moments = ctx.saved_tensors
    if dy is None:  # y was not used; only the sum has a gradient
        return ds, None, None
    if torch.is_grad_enabled():  # create_graph=True
        return reference.layer_gradients(dy, ds, s, weight, ctx.eps)
    needed = any(ctx.needs_input_grad[2:4])
    dx, dparameters = operator(family, "layer_backward")(
        dy, ds, s, weight, moments, needed, torch.are_deterministic_algorithms_enabled()
    )
    return dx, *(dparameters.unbind(0) if needed else (None, None))


def _no_second_derivative(*_: object) -> Any:
    raise NotImplementedError(
        "the backward operators of rmsnorm_fused have no derivative; differentiate rms_norm with create_graph=True"
    )


def _register_derivatives(family: Family) -> None:
    def forward_gradients(ctx: Any, dy: torch.Tensor, _rstd: None) -> tuple[Any, ...]:
        dx, dweight = gradients(family, ctx, dy, None, ctx.needs_input_grad[1])
        return dx, dweight, None, None, None

    def forward_add_gradients(
        ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, _rstd: None
    ) -> tuple[Any, ...]:
        if ctx.wide_residual_of is not None:
            return (*_gradients_of_both(family, ctx, dy, ds, ctx.needs_input_grad[2]), None, None, None)
        dx, dweight = gradients(family, ctx, dy, ds, ctx.needs_input_grad[2])
        return dx, dx, dweight, None, None, None

    def layer_forward_gradients(
        ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, _moments: None
    ) -> tuple[Any, ...]:
        dx, *dparameters = layer_gradients(family, ctx, dy, ds)
        wanted = (d if needed else None for d, needed in zip(dparameters, ctx.needs_input_grad[2:4], strict=True))
        return dx, dx if ctx.needs_input_grad[1] else None, *wanted, None

    for name, backward, setup in (
        ("forward", forward_gradients, _save_forward),
        ("forward_add", forward_add_gradients, _save_forward_add),
        ("layer_forward", layer_forward_gradients, _save_layer_forward),
        ("layer_backward", _no_second_derivative, None),
        ("backward", _no_second_derivative, None),
        ("backward_add", _no_second_derivative, None),
    ):
        differentiable = operator(family, name).default
        kernel = derivative_kernel(differentiable, backward, setup, remedy='use backend="pytorch"')
        LIBRARY.impl(differentiable.name(), kernel, "Autograd", with_keyset=True)


for _family in FAMILIES:
    for _schema in _SCHEMAS:
        LIBRARY.define(f"{_family}_{_schema}")
    for _name, _fake in fakes.FAKES.items():
        torch.library.register_fake(f"rmsnorm_fused::{_family}_{_name}", _fake, lib=LIBRARY)
    _register_derivatives(_family)
    batching.register(LIBRARY, functools.partial(operator, _family))

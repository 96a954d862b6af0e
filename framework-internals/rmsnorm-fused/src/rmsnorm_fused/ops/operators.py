"""The schemas and derivatives of this package's operators.

Two families, ``native`` and ``triton``, share schemas, fake kernels, derivatives and batching rules. In ``native``, the
dispatcher selects the C++ kernel on a CPU and the CUDA kernel on a GPU, as it does for PyTorch's own operators. Triton
needs a separate family because it supports the same devices and a caller may request either.

Both norms are the same operators; ``centred`` makes them layer normalisation, which alone has a bias.
``forward(x, weight, bias, …) -> (y, kept)`` also returns what the derivative needs of each row: rstd (...,), or mean
and rstd (..., 2) if centred. ``forward_add`` adds a residual first and returns the sum too. ``backward`` is the
derivative of both; its ``dparameters`` are dweight (N,), or dweight and dbias (2, N) if centred, which a kernel sums in
one pass. With a residual wider than x, which only Triton's kernels take, it also returns the gradient in the dtype of
the residual: the next operator of the backward pass needs one, and the residual stream the other. What is not asked
for is empty, because a schema cannot return an optional tensor.
For double backward and torch.func, a formula in torch's operators replaces it. ``quantize``, of rms_norm alone, is for
inference and has no derivative.

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

_OPTIONS = "float eps, float weight_offset, bool llama, bool centred"
SCHEMAS = (
    f"forward(Tensor x, Tensor? weight, Tensor? bias, {_OPTIONS}) -> (Tensor y, Tensor kept)",
    f"forward_add(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, {_OPTIONS})"
    " -> (Tensor y, Tensor s, Tensor kept)",
    "backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor kept, float weight_offset, bool llama,"
    " bool centred, bool needs_dparameters, bool deterministic)"
    " -> (Tensor dx, Tensor dresidual, Tensor dparameters)",
    "quantize(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, float eps, float weight_offset, bool llama,"
    " ScalarType dtype) -> (Tensor y, Tensor s, Tensor row_scales)",
)

LIBRARY = torch.library.Library("rmsnorm_fused", "DEF")  # registrations last as long as this object


def operator(family: Family, name: str) -> Any:
    """``torch.ops.rmsnorm_fused.<family>_<name>``."""
    return getattr(torch.ops.rmsnorm_fused, f"{family}_{name}")


def normalise(
    family: Family,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: Options,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Y, or (y, s) with a residual, differentiable; the caller has checked the arguments."""
    if residual is None:
        return _call(operator(family, "forward"), x, weight, bias, *options)[0]
    y, s, _ = _call(operator(family, "forward_add"), x, residual, weight, bias, *options)
    return y, s


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
        operator(family, "quantize")(x, residual, weight, scale, *options[:3], dtype),
    )


# ---- derivatives


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, *residual, weight, _bias = inputs[:-4]
    ctx.options, ctx.dtype = Options(*inputs[-4:]), x.dtype
    kept = output[-1]
    ctx.save_for_backward(output[1] if residual else x, weight, kept)
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)


def gradients(
    family: Family, ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, parameters_wanted: bool
) -> tuple[torch.Tensor | None, ...]:
    """Dx, dresidual, dweight and dbias; ``ctx`` holds (s, weight, kept), the options and the dtype of x."""
    if dy is None:  # y was not used; only the sum has a gradient
        return None if ds is None else ds.to(ctx.dtype), ds, None, None
    s, weight, kept = ctx.saved_tensors  # activation checkpointing lets it be read once
    if torch.is_grad_enabled():  # create_graph=True
        dresidual, *of_parameters = reference.gradients(dy, ds, s, weight, ctx.options)
        return dresidual.to(ctx.dtype), dresidual, *of_parameters
    options = ctx.options
    needed = parameters_wanted and (options.centred or weight is not None)
    dx, dresidual, dparameters = operator(family, "backward")(
        dy, ds, s, weight, kept, *options[1:], needed, torch.are_deterministic_algorithms_enabled()
    )
    if s.dtype == ctx.dtype:
        dresidual = dx
    if not needed:
        return dx, dresidual, None, None
    return dx, dresidual, *(dparameters.unbind(0) if options.centred else (dparameters, None))


def _no_second_derivative(*_: object) -> Any:
    raise NotImplementedError(
        "the backward operators of rmsnorm_fused have no derivative; differentiate rms_norm with create_graph=True"
    )


def _register_derivatives(family: Family) -> None:
    def forward_gradients(ctx: Any, dy: torch.Tensor | None, *others: torch.Tensor | None) -> tuple[Any, ...]:
        *ds, _kept = others  # with a residual, s has a gradient
        needed = ctx.needs_input_grad[:-4]
        dx, dresidual, *of_parameters = gradients(family, ctx, dy, ds[0] if ds else None, any(needed[-2:]))
        results = (dx, dresidual, *of_parameters) if ds else (dx, *of_parameters)
        return *(result if wanted else None for result, wanted in zip(results, needed, strict=True)), *(None,) * 4

    for name, backward, setup in (
        ("forward", forward_gradients, _save),
        ("forward_add", forward_gradients, _save),
        ("backward", _no_second_derivative, None),
    ):
        differentiable = operator(family, name).default
        kernel = derivative_kernel(differentiable, backward, setup, remedy='use backend="pytorch"')
        LIBRARY.impl(differentiable.name(), kernel, "Autograd", with_keyset=True)


for _family in FAMILIES:
    for _schema in SCHEMAS:
        LIBRARY.define(f"{_family}_{_schema}")
    for _name, _fake in fakes.FAKES.items():
        torch.library.register_fake(f"rmsnorm_fused::{_family}_{_name}", _fake, lib=LIBRARY)
    _register_derivatives(_family)
    batching.register(LIBRARY, functools.partial(operator, _family))

"""The operators of this package as PyTorch's dispatcher knows them.

Two families, ``native`` and ``triton``, share schemas, fake kernels, derivatives and batching rules. In ``native`` the
dispatcher itself picks the C++ kernel on a CPU and the CUDA kernel on a GPU, as it does for PyTorch's own operators.
Triton needs a family of its own, because it serves the same devices and a caller may ask for either.

``forward(x, weight, …) -> (y, rstd)`` also gives rstd, which the derivative needs. ``forward_add`` adds a residual
first and gives the sum too. ``backward`` serves both; it is an operator too, opaque to torch.compile as a whole. Where
a graph of the gradients is wanted (double backward, torch.func), a formula in torch's operators takes its place.
``quantize`` is for inference and has no derivative.

They are plain operators and not ``torch.library.triton_op``, which lets Inductor see the kernels: Inductor fuses
nothing into a kernel that a user wrote, and under Triton's interpreter there is no kernel for it to see.

Schemas, fakes and derivatives are registered when this module is imported; kernels by whoever provides them (see
``impl``). The just-in-time extension registers its derivative of the forward pass in C++, at AutogradCPU and
AutogradCUDA, where it goes before the one from Python here, at the alias Autograd: a call through Python's costs 10 to
20 µs more.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, cast

import torch

from rmsnorm_fused import batching
from rmsnorm_fused.impl import reference
from rmsnorm_fused.layout import as_rows
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import is_refusal_of_func, reshaped
from rmsnorm_fused.validation import wide_dtype

Family = Literal["native", "triton"]
FAMILIES: tuple[Family, ...] = ("native", "triton")

_OPTIONS = "float eps, float weight_offset, bool llama"
_SCHEMAS = (
    f"forward(Tensor x, Tensor? weight, {_OPTIONS}) -> (Tensor y, Tensor rstd)",
    f"forward_add(Tensor x, Tensor residual, Tensor? weight, {_OPTIONS}) -> (Tensor y, Tensor s, Tensor rstd)",
    "backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float weight_offset, bool llama,"
    " bool needs_dweight, bool deterministic) -> (Tensor dx, Tensor dweight)",
    f"quantize(Tensor x, Tensor? residual, Tensor? weight, Tensor? scale, {_OPTIONS}, ScalarType dtype)"
    " -> (Tensor y, Tensor s, Tensor row_scales)",
)

_library = torch.library.Library("rmsnorm_fused", "DEF")  # lives as long as the process


def operator(family: Family, name: str) -> Any:
    """``torch.ops.rmsnorm_fused.<family>_<name>``.

    Args:
        family: whose kernels.
        name: ``forward``, ``forward_add``, ``backward`` or ``quantize``.
    """
    return getattr(torch.ops.rmsnorm_fused, f"{family}_{name}")


def forward(family: Family, x: torch.Tensor, weight: torch.Tensor | None, options: Options) -> torch.Tensor:
    """Y, differentiable; the arguments were checked by the caller."""
    return _called(operator(family, "forward"), x, weight, *options)[0]


def forward_add(
    family: Family, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y and s = x + residual, both differentiable; the arguments were checked by the caller."""
    y, s, _ = _called(operator(family, "forward_add"), x, residual, weight, *options)
    return y, s


def _called(differentiable: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    try:
        return cast("tuple[torch.Tensor, ...]", differentiable(*arguments))
    except RuntimeError as error:
        if not is_refusal_of_func(error):
            raise
        raise NotImplementedError(
            "torch.func takes no derivative that is registered from Python, as that of Triton and of the prebuilt "
            'library is; use backend="pytorch", or "cpp" or "cuda" compiled here'
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
    """Quantised y, s (empty without a residual) and the rows' scales (..., 1) (empty with a static scale)."""
    return cast(
        "tuple[torch.Tensor, torch.Tensor, torch.Tensor]",
        operator(family, "quantize")(x, residual, weight, scale, *options, dtype),
    )


# ---- fake kernels: the shapes and dtypes of results


def _contiguous_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _rstd_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


def _fake_forward(x: torch.Tensor, weight: torch.Tensor | None, *_: object) -> tuple[torch.Tensor, ...]:
    return _contiguous_like(x), _rstd_like(x)


def _fake_forward_add(x: torch.Tensor, residual: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
    return _contiguous_like(x), _contiguous_like(x), _rstd_like(x)


def _fake_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    weight_offset: float,
    llama: bool,
    needs_dweight: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    # A schema cannot return an optional tensor: dweight is empty where it was not asked for.
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else s.new_empty(0)
    return _contiguous_like(s), dweight


def _fake_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    llama: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    s = x.new_empty(0) if residual is None else _contiguous_like(x)
    row_scales = x.new_empty((*x.shape[:-1], 1) if scale is None else (0,), dtype=torch.float32)
    return _contiguous_like(x, dtype), s, row_scales


_FAKES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "forward": _fake_forward,
    "forward_add": _fake_forward_add,
    "backward": _fake_backward,
    "quantize": _fake_quantize,
}


# ---- derivatives


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, *options = inputs
    ctx.options = Options(*options)
    ctx.save_for_backward(x, weight, output[-1])
    ctx.mark_non_differentiable(output[-1])


def _save_forward_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, _, weight, *options = inputs
    ctx.options = Options(*options)
    ctx.save_for_backward(output[1], weight, output[-1])
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)


def _gradients(
    family: Family, ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, weight_wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    s, weight, rstd = ctx.saved_tensors
    if dy is None:  # y was not used: the sum passes its gradient on
        return ds, None
    needs_dweight = weight is not None and weight_wanted
    if torch.is_grad_enabled():  # a graph of the gradients is wanted
        return reference.gradients(dy, ds, s, weight, ctx.options)
    dx, dweight = operator(family, "backward")(
        dy, ds, s, weight, rstd, *ctx.options[1:], needs_dweight, torch.are_deterministic_algorithms_enabled()
    )
    return dx, dweight if needs_dweight else None


def _no_second_derivative(*_: object) -> Any:
    raise NotImplementedError(
        "the backward operators of rmsnorm_fused have no derivative themselves; "
        "differentiate rms_norm with create_graph=True"
    )


def _register_derivatives(family: Family) -> None:
    def forward_gradients(ctx: Any, dy: torch.Tensor, _rstd: None) -> tuple[Any, ...]:
        dx, dweight = _gradients(family, ctx, dy, None, ctx.needs_input_grad[1])
        return dx, dweight, None, None, None

    def forward_add_gradients(
        ctx: Any, dy: torch.Tensor | None, ds: torch.Tensor | None, _rstd: None
    ) -> tuple[Any, ...]:
        dx, dweight = _gradients(family, ctx, dy, ds, ctx.needs_input_grad[2])
        return dx, dx, dweight, None, None, None

    for name, backward, setup in (
        ("forward", forward_gradients, _save_forward),
        ("forward_add", forward_add_gradients, _save_forward_add),
        ("backward", _no_second_derivative, None),
    ):
        torch.library.register_autograd(f"rmsnorm_fused::{family}_{name}", backward, setup_context=setup, lib=_library)


# ---- kernels that work on rows: Triton's, and those of the prebuilt library


def register_row_kernels(family: Family, key: str, module: str) -> None:
    """Register the kernels of a module of ``impl`` for a dispatch key; the module is imported at the first call.

    The module has ``forward``, ``backward`` and ``quantize`` on matrices of rows as :func:`layout.as_rows` makes them:

        forward(x, residual, weight, options) -> (y, s or None, rstd)
        backward(dy, ds, s, weight, rstd, weight_offset, llama, needs_dweight, deterministic) -> (dx, dweight or None)
        quantize(x, residual, weight, scale, options, dtype) -> (y, s or None, row_scales or None)

    with x, residual, dy, ds and s (outer, inner, N), residual and ds possibly None; y, s and dx (M, N) contiguous;
    rstd and row_scales (M,).

    Args:
        family: whose operators.
        key: ``"CPU"`` or ``"CUDA"``.
        module: its name in ``rmsnorm_fused.impl``.
    """
    rows = _RowKernels(module)
    for name, kernel in (
        ("forward", rows.forward),
        ("forward_add", rows.forward_add),
        ("backward", rows.backward),
        ("quantize", rows.quantize),
    ):
        _library.impl(f"{family}_{name}", kernel, key)


class _RowKernels:
    """The operators of a family by the kernels of a module of ``impl``: tensors as rows, and rows as tensors again."""

    def __init__(self, module: str) -> None:
        self._module = module

    @functools.cached_property
    def _kernels(self) -> ModuleType:
        return importlib.import_module(f"rmsnorm_fused.impl.{self._module}")

    def _run_forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, options: Options
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if x.numel() == 0:
            return _contiguous_like(x), _contiguous_like(x), _rstd_like(x).zero_()
        y, s, rstd = self._kernels.forward(as_rows(x), _optional_rows(residual), weight, options)
        return reshaped(y, x.shape), x if s is None else reshaped(s, x.shape), reshaped(rstd, x.shape[:-1])

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None, *options: Any) -> tuple[torch.Tensor, ...]:
        y, _, rstd = self._run_forward(x, None, weight, Options(*options))
        return y, rstd

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *options: Any
    ) -> tuple[torch.Tensor, ...]:
        return self._run_forward(x, residual, weight, Options(*options))

    def backward(
        self,
        dy: torch.Tensor,
        ds: torch.Tensor | None,
        s: torch.Tensor,
        weight: torch.Tensor | None,
        rstd: torch.Tensor,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        if s.numel() == 0:
            dx, dweight = _fake_backward(dy, ds, s, weight, rstd, *rest)
            return dx, dweight.zero_()
        rstd = rstd.contiguous().view(-1)
        dx, dweight = self._kernels.backward(as_rows(dy), _optional_rows(ds), as_rows(s), weight, rstd, *rest)
        return reshaped(dx, s.shape), s.new_empty(0) if dweight is None else dweight

    def quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        scale: torch.Tensor | None,
        *rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        empty = _fake_quantize(x, residual, weight, scale, *rest)
        if x.numel() == 0:
            return empty[0], empty[1], empty[2].fill_(1.0)
        *options, dtype = rest
        y, s, row_scales = self._kernels.quantize(
            as_rows(x), _optional_rows(residual), weight, scale, Options(*options), dtype
        )
        return (
            reshaped(y, x.shape),
            empty[1] if s is None else reshaped(s, x.shape),
            empty[2] if row_scales is None else reshaped(row_scales, empty[2].shape),
        )


def _optional_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else as_rows(x)


for _family in FAMILIES:
    for _schema in _SCHEMAS:
        _library.define(f"{_family}_{_schema}")
    for _name, _fake in _FAKES.items():
        torch.library.register_fake(f"rmsnorm_fused::{_family}_{_name}", _fake, lib=_library)
    _register_derivatives(_family)
    batching.register(_library, functools.partial(operator, _family))
for _key in ("CPU", "CUDA"):
    register_row_kernels("triton", _key, "triton")

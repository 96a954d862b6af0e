"""Checks of the public function's arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal

import torch

from rmsnorm_fused.options import CASTINGS

Shape = int | Sequence[int]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPE_NAMES = "float32, bfloat16, float16 or float64"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and products: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_input(x: torch.Tensor) -> None:
    """Check that ``x`` can be normalised."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected {_DTYPE_NAMES}, got {x.dtype}; convert it first")
    if x.layout not in (torch.strided, torch.jagged) or (x.is_nested and x.layout == torch.strided):
        layout = "a nested tensor with the strided layout" if x.is_nested else str(x.layout)
        raise TypeError(
            f"x: expected a dense or a jagged tensor, got {layout}; convert it first (.to_dense(), layout=torch.jagged)"
        )
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension to normalise over, got a tensor without any")


def arguments_by_name(function: str, positional: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Assign positional arguments: the parameters, or normalized_shape, the parameters and eps in torch's order."""
    first = positional[0]
    torchs = isinstance(first, int | Integral) or (
        isinstance(first, list | tuple) and all(isinstance(n, int | Integral) for n in first)
    )
    names = list(given) if torchs else [name for name in given if name not in ("normalized_shape", "eps")]
    if len(positional) > len(names):
        raise TypeError(
            f"{function}: expected at most {len(names) + 1} positional arguments ({', '.join(('x', *names))}), "
            f"got {len(positional) + 1}; name the others"
        )
    by_position = dict(zip(names, positional, strict=False))
    for name in by_position:
        if given[name] is not None:
            raise TypeError(f"{name}: expected one value, got one by position and one by keyword")
    return given | by_position


def check_normalized_shape(
    x: torch.Tensor, normalized_shape: Shape, parameters: dict[str, torch.Tensor | None]
) -> tuple[int, ...]:
    """Check that the last dimensions of ``x`` are ``normalized_shape``, and that the parameters have this shape."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int | Integral) else tuple(normalized_shape)
    if not shape:
        raise ValueError("normalized_shape: expected one dimension or more, got none")
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x: expected last dimensions {shape}, got shape {tuple(x.shape)}")
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.Tensor) and tuple(parameter.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, that of normalized_shape, got {tuple(parameter.shape)}")
    return shape


def check_layout(x: torch.Tensor, implementation: str) -> None:
    """Check that an implementation supports the layout of ``x``: only the PyTorch formula supports jagged tensors."""
    if x.layout == torch.jagged and implementation != "pytorch":
        raise ValueError(
            f"backend {implementation!r} cannot be used: it takes dense tensors, got a jagged one; normalise its "
            '.values(), or use backend="pytorch"'
        )


def check_parameter(x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> None:
    """Check that a weight, or a bias, matches ``x``."""
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor or None, got {type(weight).__name__}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"{name}: expected {_DTYPE_NAMES}, got {weight.dtype}; convert it first")
    if weight.dtype == torch.float64 and x.dtype != torch.float64:
        raise TypeError(
            f"{name}: a float64 {name} needs a float64 x, got x of {x.dtype}, for which the arithmetic is float32; "
            "convert one of them"
        )
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{name}: expected shape ({x.shape[-1]},), the last dimension of x {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"{name}: expected it on {x.device}, where x is, got {weight.device}; move one of them")


def check_bias(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor) -> None:
    """Check that ``bias`` matches ``x`` and the weight."""
    check_parameter(x, bias, "bias")
    if weight is not None and weight.dtype != bias.dtype:
        raise TypeError(
            f"bias: expected {weight.dtype}, the dtype of the weight, got {bias.dtype}; convert one of them"
        )


def check_casting(casting: str) -> None:
    """Check that ``casting`` is known."""
    if casting not in CASTINGS:
        raise ValueError(f"casting: expected one of {', '.join(CASTINGS)}, got {casting!r}")


def check_residual(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Check that ``residual`` can be added to ``x`` element by element."""
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"residual: expected a tensor or None, got {type(residual).__name__}")
    if residual.dtype not in (x.dtype, wide_dtype(x.dtype)):
        wider = "" if x.dtype == wide_dtype(x.dtype) else " or torch.float32"
        raise TypeError(
            f"residual: expected {x.dtype}, the dtype of x{wider}, got {residual.dtype}; convert one of them"
        )
    if residual.shape != x.shape:
        raise ValueError(f"residual: expected shape {tuple(x.shape)}, that of x, got {tuple(residual.shape)}")
    if residual.device != x.device:
        raise ValueError(f"residual: expected it on {x.device}, where x is, got {residual.device}; move one of them")


def check_wide_residual(casting: str, out_dtype: torch.dtype | None) -> None:
    """Check what a float32 residual with a 16-bit ``x`` does not support."""
    if casting != "exact" or out_dtype is not None:
        argument = f"casting={casting!r}" if casting != "exact" else f"out_dtype={out_dtype}"
        raise ValueError(f"residual: expected the dtype of x with {argument}, got torch.float32; convert it first")


def check_quantised(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    scale: torch.Tensor | Literal["dynamic"] | None,
) -> None:
    """Check the arguments of a quantised result."""
    if out_dtype is None:
        if scale is not None:
            raise ValueError("scale: expected None without out_dtype=torch.float8_e4m3fn, got one")
        return
    if out_dtype != torch.float8_e4m3fn:
        raise TypeError(f"out_dtype: expected torch.float8_e4m3fn or None (the dtype of x), got {out_dtype}")
    if x.dtype == torch.float64:
        raise TypeError("x: expected float32, bfloat16 or float16 for a float8 result, got torch.float64")
    _check_scale(x, scale)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual, weight)):
        raise ValueError(
            "out_dtype: a float8 result has no gradient; call under torch.no_grad() or detach the arguments"
        )


def _check_scale(x: torch.Tensor, scale: torch.Tensor | Literal["dynamic"] | None) -> None:
    wanted = 'a float32 tensor of one element (static) or "dynamic" (one scale per row)'
    if scale is None:
        raise ValueError(f"scale: expected {wanted} with out_dtype, got None")
    if isinstance(scale, str):
        if scale != "dynamic":
            raise ValueError(f"scale: expected {wanted}, got {scale!r}")
        return
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        kind = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise TypeError(f"scale: expected {wanted}, got {kind}")
    if scale.numel() != 1:
        raise ValueError(f"scale: expected {wanted}, got shape {tuple(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"scale: expected it on {x.device}, where x is, got {scale.device}; move one of them")


def resolve_offset(weight_offset: float) -> float:
    """Return the number to add to the weight, as a float."""
    if isinstance(weight_offset, bool) or not isinstance(weight_offset, int | float | Real):
        raise TypeError(f"weight_offset: expected a number, got {type(weight_offset).__name__}")
    if not -math.inf < weight_offset < math.inf:  # torch.compile(dynamic=True) traces this, but not math.isfinite
        raise ValueError(f"weight_offset: expected a finite number, got {weight_offset}")
    return float(weight_offset)


def resolve_eps(eps: float | None, dtype: torch.dtype) -> float:
    """Return the number to add to the mean square."""
    if eps is None:
        return torch.finfo(wide_dtype(dtype)).eps
    if isinstance(eps, bool) or not isinstance(eps, int | float | Real):
        raise TypeError(f"eps: expected a number or None, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps}")
    return float(eps)

"""What the public function takes, and what it says about the rest."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TAKEN = "float32, bfloat16, float16 or float64"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and products run in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_input(x: torch.Tensor) -> None:
    """Refuse what cannot be normalised.

    Raises:
        TypeError: for something other than a tensor, or a dtype that is not taken.
        ValueError: for a tensor without dimensions.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x: expected {_TAKEN}, got {x.dtype}; convert it first")
    if x.dim() == 0:
        raise ValueError("x: expected at least one dimension to normalise over, got a tensor without any")


def check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuse a weight that does not fit ``x``.

    Raises:
        TypeError: for something other than a tensor, or a dtype that is not taken or wider than the arithmetic.
        ValueError: for a shape other than (N,), or another device.
    """
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: expected a tensor or None, got {type(weight).__name__}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"weight: expected {_TAKEN}, got {weight.dtype}; convert it first")
    if weight.dtype == torch.float64 and x.dtype != torch.float64:
        raise TypeError(
            f"weight: a float64 weight needs a float64 x, got x of {x.dtype}, for which the arithmetic is float32; "
            "convert one of them"
        )
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight: expected shape ({x.shape[-1]},), the last dimension of x {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"weight: expected it on {x.device}, where x is, got {weight.device}; move one of them")


def resolve_eps(eps: float | None, dtype: torch.dtype) -> float:
    """The number to add to the mean square.

    Args:
        eps: what the caller gave; None is the machine epsilon of the arithmetic, as in ``torch.nn.functional.rms_norm``
            (whose documentation says that of ``dtype``, but which takes float32's for bfloat16 and float16).
        dtype: of x.

    Raises:
        TypeError: for something other than a number.
        ValueError: for a negative, infinite or undefined number.
    """
    if eps is None:
        return torch.finfo(wide_dtype(dtype)).eps
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps: expected a number or None, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps}")
    return float(eps)

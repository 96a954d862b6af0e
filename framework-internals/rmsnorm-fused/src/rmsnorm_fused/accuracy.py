"""How wrong a result may be, and how wrong it is, against float64.

With u the unit roundoff of a result's dtype and U that of the arithmetic (2⁻²⁴ for float32), an implementation that
computes in float32 and rounds once stays within

    |error| <= u · |result| + C · U · (sum of the magnitudes of the terms that the result is made of)

The first part is the rounding floor: no implementation whatever gets below it. The second part is the arithmetic: a
float32 sum of n terms is wrong by about λ√n · U of their magnitudes (Higham & Mary, 2019, SIAM J. Sci. Comput. 41), and
no kernel here adds more than 256 terms in a row before it starts another partial sum; a dozen single operations come on
top. C = 32 covers both. For bfloat16 and float16 the second part is a few thousandths of the first: an
implementation that rounds twice on the way fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rmsnorm_fused.validation import wide_dtype

ARITHMETIC_FACTOR = 32.0

Part = Literal["y", "dx", "dweight"]


@dataclass(frozen=True)
class Expected:
    """A result in float64, and the magnitude of what it is made of.

    Attributes:
        value: the result.
        magnitude: the same sum with every term's absolute value; at least ``|value|``.
        arithmetic: the dtype that implementations compute in.
    """

    value: torch.Tensor
    magnitude: torch.Tensor
    arithmetic: torch.dtype

    def share_of_bound(self, actual: torch.Tensor, *, roundings: float = 1.0) -> float:
        """The largest |error| over its bound: at most 1 for a right implementation.

        Args:
            actual: the result of an implementation, in its own dtype.
            roundings: how many times u the last rounding may cost; 2 for one that truncates instead of rounding.
        """
        if actual.numel() == 0:
            return 0.0
        kind = torch.finfo(actual.dtype)
        floor = roundings * kind.eps / 2 * self.value.abs().clamp(min=kind.smallest_normal)
        arithmetic = ARITHMETIC_FACTOR * torch.finfo(self.arithmetic).eps / 2 * self.magnitude
        bound = (floor + arithmetic).clamp(min=torch.finfo(torch.float64).tiny)  # an exact zero is allowed to be one
        return ((actual.double() - self.value).abs() / bound).max().item()

    def relative_error(self, actual: torch.Tensor) -> float:
        """The largest |error| over the largest |result|."""
        return ((actual.double() - self.value).abs().max() / self.value.abs().max()).item()


def expected(x: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor, eps: float) -> dict[Part, Expected]:
    """y, dx and, with a weight, dweight in float64 by the closed formulas, from the tensors as they are given.

    Args:
        x: (..., N), any dtype.
        weight: (N,) or None.
        dy: like x.
        eps: added to the mean square.
    """
    arithmetic = wide_dtype(x.dtype)
    x64, dy64 = x.detach().double(), dy.double()
    w64 = x64.new_ones(()) if weight is None else weight.detach().double()
    rstd = torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)
    normalised = x64 * rstd
    y = normalised * w64
    g = dy64 * w64
    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    dx_magnitude = rstd * (g.abs() + normalised.abs() * (g * normalised).abs().mean(-1, keepdim=True))
    parts: dict[Part, Expected] = {
        "y": Expected(y, y.abs(), arithmetic),
        "dx": Expected(dx, dx_magnitude, arithmetic),
    }
    if weight is not None:
        terms = (dy64 * normalised).flatten(0, -2) if x.dim() > 1 else (dy64 * normalised)[None]
        parts["dweight"] = Expected(terms.sum(0), terms.abs().sum(0), arithmetic)
    return parts

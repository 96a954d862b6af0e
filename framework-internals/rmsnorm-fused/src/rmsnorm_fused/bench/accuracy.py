"""Error bounds of the results of both norms, and their measured errors, against float64.

An implementation that computes in float32 (unit roundoff U = 2⁻²⁴) and rounds once, to a dtype with unit roundoff u,
stays within

    |error| <= ulp(|result| + δ) / 2 + δ,    δ = C · U · (sum of the magnitudes of the terms of the result) + u · R

The first part is the rounding error: half the distance between neighbouring numbers of the dtype, or of its subnormal
numbers. No implementation can be below it. It is taken at |result| + δ, because the number that is rounded may already
lie beyond a power of two. The same bound holds for a float8 result clamped to ±448, because clamping does not increase
an error.

δ bounds the error of the number before rounding. Its first part is the arithmetic: a float32 sum of n terms has an
error of about λ√n · U times the magnitudes of its terms (Higham & Mary, 2019, SIAM J. Sci. Comput. 41). No kernel here
adds more than 256 terms in a row before it starts another partial sum; about a dozen single operations follow. C = 32
covers both. For bfloat16 and float16, δ is a few thousandths of the rounding error, so an implementation that rounds
twice fails.

R is the magnitude of what is rounded to the dtype of x before the end. With ``casting="exact"`` it is zero. With
``casting="llama"``, x̂ = s·rstd and g = dy·w are rounded, each with a relative error u, which contributes

    y = x̂·w                                R = |x̂·w|
    dweight = Σ dy·x̂ over the rows         R = Σ |dy·x̂|
    dx = rstd·(g - x̂·mean(g·x̂)) + ds       R = rstd·(|g| + |x̂|·mean|g·x̂|)    (x̂ is not rounded in this formula)

If autograd adds ds to an already rounded dx, as it does for the PyTorch formula, |dx - ds| is added to R.

Layer normalisation subtracts the mean m first, so the terms of c = s - m are s and those of m: |s| + mean|s|. With
n = c·rstd and a = rstd·(|s| + mean|s|), an error of a row's c by a / rstd changes rstd by r = mean(|n|·a) times itself
at most, to first order. So the magnitudes are

    n: p = a + |n|·r                       y: p·|w| + |bias|
    dweight: Σ |dy|·p                      dbias: Σ |dy|
    dx: rstd·((1 + r)·(|g| + mean|g| + |n|·mean|g·n|) + p·mean|g·n| + |n|·mean(|g|·p)) + |ds|

They grow with |m|, as far as the rounding of m itself cannot be avoided. A variance as mean(s²) - m² would be wrong by
U·m², the square of that, and fails.

A row's scale is the largest |y| / 448. Two maxima differ by no more than their elements do, so the scale's R is the
row's largest R / 448. A quantised y is compared with y / scale, with the scale that the implementation used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rmsnorm_fused.options import LARGEST_FLOAT8, Options
from rmsnorm_fused.validation import wide_dtype

ARITHMETIC_FACTOR = 32.0

Part = Literal["y", "s", "dx", "dweight", "dbias"]


@dataclass(frozen=True)
class Expected:
    """A result in float64, and the terms of its error bound.

    Attributes:
        value: The result in float64.
        magnitude: The same sum over the absolute values of its terms; at least ``|value|``.
        arithmetic: Dtype that the implementations compute in.
        rounded: Error that roundings before the last one may add (u · R above); 0 without such roundings.
    """

    value: torch.Tensor
    magnitude: torch.Tensor
    arithmetic: torch.dtype
    rounded: torch.Tensor | float = 0.0

    def bound(self, dtype: torch.dtype) -> torch.Tensor:
        """The largest error that each element of a result of that dtype may have."""
        kind = torch.finfo(dtype)
        before = ARITHMETIC_FACTOR * torch.finfo(self.arithmetic).eps / 2 * self.magnitude + self.rounded
        if self.arithmetic == torch.float64 and kind.bits < 32:  # processors convert from float64 via float32
            before = before + torch.finfo(torch.float32).eps / 2 * self.value.abs()
        reached = (self.value.abs() + before).clamp(min=kind.smallest_normal)
        # A number divided by its mantissa in [1/2, 1) is exactly a power of two. torch.ldexp would compute on the
        # current GPU instead of the tensor's (pytorch/pytorch#189567).
        floor = reached / torch.frexp(reached).mantissa * (kind.eps / 4)
        return (floor + before).clamp(min=torch.finfo(torch.float64).tiny)  # avoids 0 / 0 for an exact zero

    def share_of_bound(self, actual: torch.Tensor) -> float:
        """The largest |error| divided by its bound; at most 1 for a correct implementation."""
        if actual.numel() == 0:
            return 0.0
        return ((actual.double() - self.value).abs() / self.bound(actual.dtype)).max().item()

    def relative_error(self, actual: torch.Tensor) -> float:
        """The largest |error| divided by the largest |result|."""
        return ((actual.double() - self.value).abs().max() / self.value.abs().max()).item()


def expected(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dy: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    ds: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    llama: bool = False,
    ds_added_apart: bool = False,
) -> dict[Part, Expected]:
    """Y and dx in float64 with their bounds; also s if there is a residual, and dweight if there is a weight.

    With ``ds_added_apart`` autograd adds ds to an already rounded dx, as it does for the PyTorch formula.
    """
    arithmetic, kind = wide_dtype(x.dtype), torch.finfo(x.dtype)
    y, normalised, rstd, w = _formula(x, residual, weight, Options(eps, weight_offset, llama))
    dy64 = dy.double()
    g = dy64 * w

    def size(g: torch.Tensor) -> torch.Tensor:
        return rstd * (g + normalised.abs() * (g * normalised.abs()).mean(-1, keepdim=True))

    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    dx_magnitude = size(dy64.abs() * _weight_magnitude(w, weight, weight_offset))
    dx_rounded = kind.eps / 2 * (size(g.abs().clamp(min=kind.smallest_normal)) * llama + dx.abs() * ds_added_apart)
    if ds is not None:
        dx, dx_magnitude = dx + ds.double(), dx_magnitude + ds.double().abs()
    parts: dict[Part, Expected] = {"y": y, "dx": Expected(dx, dx_magnitude, arithmetic, dx_rounded)}
    if residual is not None:
        s64 = x.detach().double() + residual.detach().double()
        parts["s"] = Expected(s64, x.detach().double().abs() + residual.detach().double().abs(), arithmetic)
    if weight is not None:
        terms, rounded = (
            (dy64 * factor).reshape(-1, x.shape[-1])
            for factor in (normalised, normalised.abs().clamp(min=kind.smallest_normal))
        )
        parts["dweight"] = Expected(
            terms.sum(0), terms.abs().sum(0), arithmetic, kind.eps / 2 * llama * rounded.abs().sum(0)
        )
    return parts


def expected_layer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    ds: torch.Tensor | None = None,
    ds_added_apart: bool = False,
) -> dict[Part, Expected]:
    """The same for layer normalisation; also dbias if there is a bias."""
    arithmetic, kind = wide_dtype(x.dtype), torch.finfo(x.dtype)
    x = x.detach()
    s = (x if residual is None else x + residual.detach()).double()  # y is computed from the rounded s
    w = s.new_ones(()) if weight is None else weight.detach().double()
    b = s.new_zeros(()) if bias is None else bias.detach().double()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean(-1, keepdim=True)

    c = s - mean(s)
    rstd = torch.rsqrt(mean(c.square()) + eps)
    n, dy = c * rstd, dy.double()
    a = rstd * (s.abs() + mean(s.abs()))
    r = mean(n.abs() * a)
    p = a + n.abs() * r
    g = dy * w
    size, along = g.abs(), mean((g * n).abs())
    dx = rstd * (g - mean(g) - n * mean(g * n))
    dx_magnitude = rstd * ((1 + r) * (size + mean(size) + n.abs() * along) + p * along + n.abs() * mean(size * p))
    rounded = kind.eps / 2 * dx.abs() * ds_added_apart
    if ds is not None:
        dx, dx_magnitude = dx + ds.double(), dx_magnitude + ds.double().abs()
    parts: dict[Part, Expected] = {
        "y": Expected(n * w + b, p * w.abs() + b.abs(), arithmetic),
        "dx": Expected(dx, dx_magnitude, arithmetic, rounded),
    }
    if residual is not None:
        parts["s"] = Expected(
            x.double() + residual.detach().double(), x.double().abs() + residual.detach().double().abs(), arithmetic
        )
    of_parameters: tuple[tuple[Part, torch.Tensor | None, torch.Tensor, torch.Tensor], ...] = (
        ("dweight", weight, dy * n, dy.abs() * p),
        ("dbias", bias, dy, dy.abs()),
    )
    for name, parameter, terms, magnitudes in of_parameters:
        if parameter is not None:
            columns = x.shape[-1]
            parts[name] = Expected(
                terms.reshape(-1, columns).sum(0), magnitudes.reshape(-1, columns).sum(0), arithmetic
            )
    return parts


def expected_quantised(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    options: Options,
    *,
    residual: torch.Tensor | None = None,
) -> Expected:
    """The quotient y / scale, clamped to ±448, in float64."""
    y, *_ = _formula(x, residual, weight, options)
    by = scale.double()
    value = (y.value / by).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
    return Expected(value, y.magnitude / by, y.arithmetic, y.rounded / by)


def expected_row_scales(
    x: torch.Tensor, weight: torch.Tensor | None, options: Options, *, residual: torch.Tensor | None = None
) -> Expected:
    """The largest magnitude of each row of y divided by 448 (1 for a row of zeros), (..., 1), in float64."""
    y, *_ = _formula(x, residual, weight, options)
    largest = y.value.abs().amax(-1, keepdim=True)
    value = torch.where(largest == 0, 1.0, largest / LARGEST_FLOAT8)
    rounded = torch.as_tensor(y.rounded).expand_as(y.value).amax(-1, keepdim=True) / LARGEST_FLOAT8
    return Expected(value, value, y.arithmetic, rounded)


def _formula(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, options: Options
) -> tuple[Expected, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Y with its bound, and x̂, rstd and w in float64."""
    x = x.detach()
    s64 = (x if residual is None else x + residual.detach()).double()  # y is computed from the rounded s
    w = s64.new_ones(()) if weight is None else weight.detach().double() + options.weight_offset
    rstd = torch.rsqrt(s64.square().mean(-1, keepdim=True) + options.eps)
    normalised = s64 * rstd
    y = normalised * w
    kind = torch.finfo(x.dtype)
    rounded = kind.eps / 2 * options.llama * normalised.abs().clamp(min=kind.smallest_normal) * w.abs()
    magnitude = normalised.abs() * _weight_magnitude(w, weight, options.weight_offset)
    return Expected(y, magnitude, wide_dtype(x.dtype), rounded), normalised, rstd, w


def _weight_magnitude(w: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    return w if weight is None else weight.detach().double().abs() + abs(offset)

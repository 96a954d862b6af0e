"""The public function and module."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from rmsnorm_fused.backends import Backend, family_of, quick_call, resolve
from rmsnorm_fused.impl import reference
from rmsnorm_fused.ops import operators, sharding
from rmsnorm_fused.options import Casting, Options
from rmsnorm_fused.validation import (
    check_casting,
    check_input,
    check_layout,
    check_quantised,
    check_residual,
    check_weight,
    resolve_eps,
    resolve_offset,
)


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None,
    residual: None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: None = None,
    scale: None = None,
    backend: Backend = "auto",
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None,
    residual: torch.Tensor,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: None = None,
    scale: None = None,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: torch.dtype | None,
    scale: torch.Tensor | Literal["dynamic"] | None,
    backend: Backend = "auto",
) -> Any: ...


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | Literal["dynamic"] | None = None,
    backend: Backend = "auto",
) -> Any:
    """Root mean square normalisation over the last dimension (Zhang & Sennrich, 2019, arXiv:1910.07467).

    y = s / sqrt(mean(s²) + eps) · (weight + weight_offset), with s = x + residual, rounded to the dtype of ``x``, or
    s = x. Sums and products run in float32 (float64 for a float64 ``x``) and the result is rounded once, whatever the
    dtype of the weight. A row's result does not depend on the other rows. Differentiable in ``x``, ``residual`` and
    ``weight``, twice. Never modifies its arguments.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64; any shape and strides. Rows at one or two regular strides
            (slices of a fused projection) are read in place, others are copied first. Jagged tensors are taken by the
            formula alone, which ``backend="auto"`` then is.
        weight: (N,), of the dtype of ``x`` or another floating one; float64 only beside a float64 ``x``. None: all
            ones, and no ``weight_offset``.
        eps: added to the mean square, at least 0; None is the machine epsilon of the arithmetic, as torch has it.
        residual: Tensor like ``x``, added to it first in the same kernel; the sum is returned too.
        weight_offset: added to the weight in the accumulating dtype: 1.0 for weights that are stored zero-centred
            (Gemma).
        casting: where to round. ``"exact"``: at the end alone. ``"llama"``: x·rstd too before the product with the
            weight, as Hugging Face's ``LlamaRMSNorm`` does, whose results it then has bit for bit up to the last place
            of the sum.
        out_dtype: ``torch.float8_e4m3fn`` for a quantised result, y / scale, cut off at ±448, without a gradient. None:
            the dtype of ``x``.
        scale: for a quantised result: a float32 tensor of one element (static), or ``"dynamic"`` for each row's own,
            the row's largest magnitude / 448 (1 for a row of zeros), which is then returned. A row with a NaN in it
            has a NaN scale, and is NaN as a whole.
        backend: ``"cuda"`` (CUDA C++), ``"triton"``, ``"cpp"`` (C++ on the CPU), ``"pytorch"`` (the formula) or
            ``"auto"``: the first of these that the machine has, CUDA C++ before Triton on a GPU. ``"cuda"`` and
            ``"cpp"`` compile at the first call ever, or come prebuilt (``python -m rmsnorm_fused build``).

    Returns:
        y (..., N), contiguous, in the dtype of ``x`` or ``out_dtype``. With a residual the tuple (y, s); with a dynamic
        scale (y, scales), scales float32 (..., 1); with both (y, s, scales).

    Raises:
        TypeError: If an argument has an unsupported type or dtype.
        ValueError: If shapes or devices do not match, ``eps`` is negative, or the back end is unknown or cannot
            be used here or for these tensors: an explicit request never falls back.
        BuildError: If a requested back end does not compile (an exception of ``native_build``).
    """
    ordinary = casting == "exact" and out_dtype is None and scale is None
    if ordinary and (quick := quick_call(backend)) is not None:
        try:
            found = quick(x, residual, weight, eps, weight_offset)
        except NotImplementedError:
            check_input(x)  # the layout, in words
            raise
        if found is not None:  # None: nothing was done, the arguments need the long way
            return found
    check_input(x)
    check_casting(casting)
    if residual is not None:
        check_residual(x, residual)
    if weight is not None:
        check_weight(x, weight)
    options = Options(resolve_eps(eps, x.dtype), resolve_offset(weight_offset), casting == "llama")
    check_quantised(x, residual, weight, out_dtype, scale)
    implementation = _implementation(x, backend)
    sharding.prepare()
    if out_dtype is not None:
        return _quantised(implementation, x, residual, weight, options, out_dtype, scale)
    if implementation == "pytorch":
        return reference.rms_norm(x, residual, weight, options)
    family = family_of(implementation)
    if residual is None:
        return operators.forward(family, x, weight, options)
    return operators.forward_add(family, x, residual, weight, options)


def _implementation(x: torch.Tensor, backend: Backend) -> str:
    """The implementation for a tensor; the formula alone takes a jagged one."""
    if x.layout != torch.jagged:
        return resolve(backend, x.device.type)
    implementation = resolve("pytorch" if backend == "auto" else backend, x.device.type)
    check_layout(x, implementation)
    return implementation


def _quantised(
    implementation: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
    scale: torch.Tensor | str | None,
) -> Any:
    static = scale if isinstance(scale, torch.Tensor) else None
    if implementation == "pytorch":
        y, s, row_scales = reference.quantize(x, residual, weight, static, options, dtype)
    else:
        y, s, row_scales = operators.quantize(family_of(implementation), x, residual, weight, static, options, dtype)
    results = (y, *(() if residual is None else (s,)), *(() if static is not None else (row_scales,)))
    return results if len(results) > 1 else y


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` on the kernels of this package: same arguments, same parameters and state dict.

    Args:
        normalized_shape: The last dimensions to normalise over; several are treated as one.
        eps: Same as for :func:`rms_norm`.
        elementwise_affine: Whether the module has a weight.
        device: Device of the weight.
        dtype: Dtype of the weight.
        backend: Same as for :func:`rms_norm`.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.backend: Backend = backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``.

        Args:
            x: (..., *normalized_shape).

        Raises:
            TypeError: If ``x`` is not a tensor.
            ValueError: If the last dimensions of ``x`` are not ``normalized_shape``.
        """
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
        dimensions = len(self.normalized_shape)
        if tuple(x.shape[-dimensions:]) != self.normalized_shape:
            raise ValueError(f"x: expected last dimensions {self.normalized_shape}, got shape {tuple(x.shape)}")
        if dimensions == 1:
            return rms_norm(x, self.weight, eps=self.eps, backend=self.backend)
        weight = None if self.weight is None else self.weight.flatten()
        return rms_norm(x.flatten(-dimensions), weight, eps=self.eps, backend=self.backend).view(x.shape)

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        return f"{super().extra_repr()}, backend={self.backend}"

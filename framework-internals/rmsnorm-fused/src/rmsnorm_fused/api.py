"""The public function and module."""

from __future__ import annotations

from typing import Any

import torch

from rmsnorm_fused import ops
from rmsnorm_fused.backends import Backend, resolve
from rmsnorm_fused.impl import reference
from rmsnorm_fused.validation import check_input, check_weight, resolve_eps


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float | None, backend: Backend = "auto"
) -> torch.Tensor:
    """Root mean square normalisation over the last dimension (Zhang & Sennrich, 2019, arXiv:1910.07467).

    y = x / sqrt(mean(x²) + eps) · weight. Sums and products run in float32 (float64 for a float64 ``x``) and the result
    is rounded to the dtype of ``x`` once, whatever the dtype of the weight. Twice differentiable in ``x`` and
    ``weight``; a weight that needs no gradient costs none. Never modifies its arguments.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64; any shape and strides. Rows at one or two regular strides
            (slices of a fused projection) are read in place, others are copied first.
        weight: (N,), of the dtype of ``x`` or another floating one; float64 only beside a float64 ``x``. None: no
            weight.
        eps: added to the mean square, at least 0; None is the machine epsilon of the arithmetic, as torch has it.
        backend: ``"pytorch"`` (the formula), ``"triton"``, ``"cuda"`` (CUDA C++), ``"cpp"`` (C++ on the CPU) or
            ``"auto"``: Triton on a GPU, C++ on a CPU, the formula where these are not to be had. ``"cuda"`` and
            ``"cpp"`` compile at the first call ever.

    Returns:
        (..., N), contiguous, in the dtype of ``x``.

    Raises:
        TypeError: for an argument of a type or dtype that is not taken.
        ValueError: for shapes or devices that do not fit, a negative ``eps``, an unknown back end, or one that cannot
            be used here or for these tensors: an explicit request never falls back.
        BuildError: (of ``native_build``) when a back end does not compile.
    """
    check_input(x)
    if weight is not None:
        check_weight(x, weight)
    number = resolve_eps(eps, x.dtype)
    implementation = resolve(backend, x.device.type)
    if implementation == "pytorch":
        return reference.rms_norm(x, weight, number)
    return ops.forward("triton" if implementation == "triton" else "native", x, weight, number)


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` on the kernels of this package: same arguments, same parameters and state dict.

    Args:
        normalized_shape: the last dimensions to normalise over; several are taken as one.
        eps: as for :func:`rms_norm`.
        elementwise_affine: whether there is a weight.
        device: of the weight.
        dtype: of the weight.
        backend: as for :func:`rms_norm`.
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
            ValueError: when the last dimensions of ``x`` are not ``normalized_shape``.
        """
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

"""The public functions :func:`rms_norm` and :func:`layer_norm`, and their modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from lowering import Lowering, check_lowering, lower
from native_build.derivatives import has_tangent
from rmsnorm_fused.backends import Backend, family_of, quick_calls, resolve
from rmsnorm_fused.impl import reference
from rmsnorm_fused.ops import operators, sharding
from rmsnorm_fused.options import Casting, Options
from rmsnorm_fused.torch_private import forward_mode_is_on
from rmsnorm_fused.validation import (
    Shape,
    arguments_by_name,
    check_bias,
    check_casting,
    check_input,
    check_layout,
    check_normalized_shape,
    check_parameter,
    check_quantised,
    check_residual,
    check_wide_residual,
    resolve_eps,
    resolve_offset,
)


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    residual: None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: None = None,
    scale: None = None,
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    normalized_shape: Shape,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> torch.Tensor: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    residual: torch.Tensor,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: None = None,
    scale: None = None,
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: torch.dtype | None,
    scale: torch.Tensor | Literal["dynamic"] | None,
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> Any: ...


def rms_norm(
    x: torch.Tensor,
    *positional: Any,
    normalized_shape: Shape | None = None,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    casting: Casting = "exact",
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | Literal["dynamic"] | None = None,
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> Any:
    """Root mean square normalisation over the last dimension (Zhang & Sennrich, 2019, arXiv:1910.07467).

    y = s / sqrt(mean(s²) + eps) · (weight + weight_offset), with s = x, or s = x + residual rounded to the dtype of
    ``residual``. Sums and products run in float32 (float64 for a float64 ``x``), and the result is rounded once,
    whatever the dtype of the weight. Rows are independent of one another. The function is twice differentiable in
    ``x``, ``residual`` and ``weight``, and never modifies its arguments.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64; any shape and strides. Rows at one or two regular strides
            (slices of a fused projection) are read in place; others are copied first. Only the PyTorch formula supports
            jagged tensors; ``backend="auto"`` selects it for them.
        positional: ``weight`` alone, or ``normalized_shape, weight, eps`` as in ``torch.nn.functional.rms_norm``.
        normalized_shape: The last dimensions of ``x``, normalised over together; a number, or None, means one.
        weight: (N,), or ``normalized_shape`` where that is given, in the dtype of ``x`` or another floating-point
            dtype; float64 requires a float64 ``x``. None means all ones, without ``weight_offset``.
        eps: Number added to the mean square, at least 0. None means the machine epsilon of the arithmetic, as in torch.
        residual: Tensor like ``x``, or float32 beside a 16-bit ``x``. It is added first, and the sum is returned too.
        weight_offset: Number added to the weight in the accumulating dtype; 1.0 for zero-centred weights (Gemma).
        casting: Where to round. ``"exact"`` rounds at the end only. ``"llama"`` also rounds x·rstd before the product
            with the weight, like Hugging Face's ``LlamaRMSNorm``; results then agree bit for bit, up to the last place
            of the sum.
        out_dtype: ``torch.float8_e4m3fn`` for a quantised result, y / scale clamped to ±448, without a gradient. None
            means the dtype of ``x``.
        scale: Scale of a quantised result: a float32 tensor of one element (static), or ``"dynamic"`` for one scale per
            row, its largest magnitude / 448 (1 for a row of zeros). Dynamic scales are returned. A row with a NaN has a
            NaN scale and becomes NaN.
        backend: ``"cuda"`` (CUDA C++), ``"triton"``, ``"cpp"`` (C++ on the CPU), ``"pytorch"`` (the formula) or
            ``"auto"``, the first available one in this order. ``"cuda"`` and ``"cpp"`` are compiled at the first call,
            or come prebuilt (``python -m rmsnorm_fused build``). Forward-mode derivatives are those of the formula,
            which ``"auto"`` takes for them; a kernel that is asked for by name refuses them.
        lowering: Under torch.compile, ``"formula"`` traces the PyTorch formula, which the compiler fuses with its
            neighbours, and ``"kernel"`` keeps the operator; ``"measured"`` takes what was measured (:mod:`lowering`).
            None is ``"measured"``, or ``"kernel"`` for a back end that is asked for by name. Eager calls ignore it.

    Returns:
        y (..., N), contiguous, in the dtype of ``x`` or ``out_dtype``. With a residual, the tuple (y, s); with a
        dynamic scale, (y, scales), with float32 scales (..., 1), the leading dimensions being those that are not
        normalised over; with both, (y, s, scales).

    Raises:
        TypeError: If an argument has an unsupported type or dtype.
        ValueError: If shapes or devices do not match, ``eps`` is negative, or the back end is unknown or cannot
            be used here or for these tensors; an explicit request never falls back.
        NotImplementedError: If a tensor carries a tangent and a kernel is asked for by name.
        BuildError: If a requested back end does not compile (an exception of ``native_build``).
    """
    if lowering is not None:
        check_lowering(lowering)
    if positional:
        given = {"normalized_shape": normalized_shape, "weight": weight, "eps": eps}
        normalized_shape, weight, eps = arguments_by_name("rms_norm", positional, given).values()
    if normalized_shape is not None:
        others: dict[str, Any] = {"weight_offset": weight_offset, "casting": casting, "out_dtype": out_dtype}
        others |= {"scale": scale, "backend": backend, "lowering": lowering}
        return _over_dimensions(rms_norm, x, normalized_shape, {"weight": weight}, residual, eps=eps, **others)
    ordinary = casting == "exact" and out_dtype is None and scale is None
    if ordinary and (quick := quick_calls(backend)) is not None:
        result = _quickly(quick.rms_norm, backend, x, residual, weight, eps, weight_offset)
        if result is not None:
            return result
    return _checked(x, residual, weight, eps, weight_offset, casting, out_dtype, scale, backend, lowering)


def layer_norm(
    x: torch.Tensor,
    *positional: Any,
    normalized_shape: Shape | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float | None = None,
    residual: torch.Tensor | None = None,
    backend: Backend = "auto",
    lowering: Lowering | None = None,
) -> Any:
    """Layer normalisation over the last dimension (Ba, Kiros & Hinton, 2016, arXiv:1607.06450).

    y = (s - mean(s)) / sqrt(mean((s - mean(s))²) + eps) · weight + bias, with s = x, or s = x + residual rounded to the
    dtype of ``residual``. The mean is subtracted before the squares are summed, so a mean far from zero does not cancel
    the variance. Everything else is as for :func:`rms_norm`: sums and products in float32 (float64 for a float64
    ``x``), one rounding of the result, two derivatives, strides.

    Args:
        x: (..., N), float32, bfloat16, float16 or float64.
        positional: ``weight, bias``, or ``normalized_shape, weight, bias, eps`` as in
            ``torch.nn.functional.layer_norm``.
        normalized_shape: The last dimensions of ``x``, normalised over together; a number, or None, means one.
        weight: (N,), or ``normalized_shape`` where that is given. None means all ones.
        bias: Tensor like ``weight``, and in its dtype. None means zeros.
        eps: Number added to the variance, at least 0. None means 1e-5, as in torch.
        residual: Tensor like ``x``, or float32 beside a 16-bit ``x``. It is added first, and the sum is returned too.
        backend: Same as for :func:`rms_norm`.
        lowering: Same as for :func:`rms_norm`; the operators are ``layer_norm`` and ``layer_norm_add``.

    Returns:
        y (..., N), contiguous, in the dtype of ``x``; with a residual, the tuple (y, s).

    Raises:
        TypeError: If an argument has an unsupported type or dtype.
        ValueError: If shapes or devices do not match, ``eps`` is negative, or the back end is unknown or cannot
            be used here or for these tensors; an explicit request never falls back.
        NotImplementedError: If a tensor carries a tangent and a kernel is asked for by name.
        BuildError: If a requested back end does not compile (an exception of ``native_build``).
    """
    if lowering is not None:
        check_lowering(lowering)
    if positional:
        given = {"normalized_shape": normalized_shape, "weight": weight, "bias": bias, "eps": eps}
        normalized_shape, weight, bias, eps = arguments_by_name("layer_norm", positional, given).values()
    if normalized_shape is not None:
        options: dict[str, Any] = {"eps": eps, "backend": backend, "lowering": lowering}
        return _over_dimensions(layer_norm, x, normalized_shape, {"weight": weight, "bias": bias}, residual, **options)
    if (quick := quick_calls(backend)) is not None:
        result = _quickly(quick.layer_norm, backend, x, residual, weight, bias, eps)
        if result is not None:
            return result
    check_input(x)
    if residual is not None:
        check_residual(x, residual)
    if weight is not None:
        check_parameter(x, weight)
    if bias is not None:
        check_bias(x, weight, bias)
    eps = resolve_eps(1e-5 if eps is None else eps, x.dtype)
    if residual is not None and residual.dtype != x.dtype:
        s = residual + x
        y = layer_norm(s, weight, bias, eps=eps, backend=backend, lowering=lowering)
        return y.to(x.dtype), s
    operator = "layer_norm" if residual is None else "layer_norm_add"
    arguments = (x, residual, weight, bias, Options(eps, centred=True))
    return _dispatch(operator, _normalise, arguments, backend, lowering)


def _quickly(quick: Callable[..., Any], backend: Backend, x: torch.Tensor, *arguments: Any) -> Any:
    """The result of a back end's own entry point; None if it did nothing, and the checks find out why."""
    try:
        return quick(x, *arguments)
    except NotImplementedError:
        check_input(x)  # raises a clearer error for an unsupported layout
        if backend != "auto":
            raise
        return None  # a tangent, which the formula carries


def _checked(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: Casting,
    out_dtype: torch.dtype | None,
    scale: torch.Tensor | Literal["dynamic"] | None,
    backend: Backend,
    lowering: Lowering | None,
) -> Any:
    """Check the arguments of :func:`rms_norm`, and call an implementation."""
    check_input(x)
    check_casting(casting)
    if residual is not None:
        check_residual(x, residual)
        if residual.dtype != x.dtype:
            check_wide_residual(casting, out_dtype)
    if weight is not None:
        check_parameter(x, weight)
    options = Options(resolve_eps(eps, x.dtype), resolve_offset(weight_offset), casting == "llama")
    check_quantised(x, residual, weight, out_dtype, scale)
    if residual is not None and residual.dtype != x.dtype and backend == "auto" and not is_dynamo_compiling():
        # Two operators: Triton's launches from Python take longer than the pass over memory that they save (NOTES.md).
        s = residual + x
        return rms_norm(s, weight, eps=options.eps, weight_offset=weight_offset).to(x.dtype), s
    if out_dtype is None:
        operator = "rms_norm" if residual is None else "rms_norm_add"
        return _dispatch(operator, _normalise, (x, residual, weight, None, options), backend, lowering)
    arguments = (x, residual, weight, options, out_dtype, scale)
    return _dispatch("rms_norm_float8", _quantise, arguments, backend, lowering)


def _over_dimensions(
    function: Callable[..., Any],
    x: torch.Tensor,
    normalized_shape: Shape,
    parameters: dict[str, torch.Tensor | None],
    residual: torch.Tensor | None,
    **options: Any,
) -> Any:
    """Normalise over several dimensions as over one."""
    check_input(x)
    shape = check_normalized_shape(x, normalized_shape, parameters)
    if residual is not None:
        check_residual(x, residual)
        residual = residual.flatten(-len(shape))
    flat = {name: None if parameter is None else parameter.flatten() for name, parameter in parameters.items()}
    results = function(x.flatten(-len(shape)), **flat, residual=residual, **options)
    if not isinstance(results, tuple):
        return results.view(x.shape)
    scales = results[-1:] if isinstance(options.get("scale"), str) else ()  # one for each row, (..., 1)
    return (*(result.view(x.shape) for result in results[: len(results) - len(scales)]), *scales)


def _dispatch(
    operator: str, call: Callable[..., Any], arguments: tuple[Any, ...], backend: Backend, lowering: Lowering | None
) -> Any:
    """Call an implementation; under torch.compile the formula or the kernel, as :func:`lowering.lower` chooses."""
    x, residual = arguments[:2]
    if forward_mode_is_on():
        if backend == "auto":
            backend = "pytorch"
        elif backend != "pytorch" and has_tangent(*arguments):
            raise NotImplementedError(
                f'{operator} has no forward-mode derivative in its kernels; use backend="pytorch"'
            )
    if not is_dynamo_compiling() or x.layout == torch.jagged:
        return call(_implementation(x, residual, backend), *arguments)
    if lowering is None and backend != "auto":
        lowering = "kernel"
    sizes = [("rows", x.shape[:-1].numel()), ("columns", x.shape[-1])]
    if residual is not None:
        sizes.append(("residual bytes", residual.dtype.itemsize))  # another dtype is another kernel
    return lower(
        operator,
        lowering,
        partial(call, "pytorch"),
        lambda *arguments: call(_implementation(x, residual, backend), *arguments),
        *arguments,
        sizes=sizes,
        available=lambda: _implementation(x, residual, backend) != "pytorch",
        source="rmsnorm_fused",
    )


def _normalise(
    implementation: str,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: Options,
) -> Any:
    if implementation == "pytorch":
        return reference.normalise(x, residual, weight, bias, options)
    return operators.normalise(family_of(implementation), x, residual, weight, bias, options)


def _implementation(x: torch.Tensor, residual: torch.Tensor | None, backend: Backend) -> str:
    """The implementation for a tensor; only the formula supports jagged tensors."""
    sharding.prepare()
    if x.layout != torch.jagged:
        return resolve(backend, x.device.type, residual is not None and residual.dtype != x.dtype)
    implementation = resolve("pytorch" if backend == "auto" else backend, x.device.type)
    check_layout(x, implementation)
    return implementation


def _quantise(
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
    """:class:`torch.nn.RMSNorm` on this package's kernels, with the same arguments, parameters and state dict.

    Args:
        normalized_shape: The last dimensions to normalise over; several are treated as one.
        eps: Same as for :func:`rms_norm`.
        elementwise_affine: Whether the module has a weight.
        device: Device of the weight.
        dtype: Dtype of the weight.
        backend: Same as for :func:`rms_norm`.
        lowering: Same as for :func:`rms_norm`.
    """

    backend: Backend = "auto"  # also of a module of torch that became one of this class, or was pickled without
    lowering: Lowering | None = None

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        backend: Backend = "auto",
        lowering: Lowering | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.backend = backend
        self.lowering = lowering

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normalise ``x``, or its sum with a residual.

        Args:
            x: (..., *normalized_shape).
            residual: Same as for :func:`rms_norm`.

        Returns:
            y; with a residual the tuple (y, s).

        Raises:
            TypeError: If ``x`` is not a tensor.
            ValueError: If the last dimensions of ``x`` are not ``normalized_shape``.
        """
        return _of_module(self, rms_norm, x, residual, weight=self.weight)

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        return f"{super().extra_repr()}, backend={self.backend}"


class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` on this package's kernels, with the same arguments, parameters and state dict.

    Args:
        normalized_shape: The last dimensions to normalise over; several are treated as one.
        eps: Same as for :func:`layer_norm`.
        elementwise_affine: Whether the module has a weight, and a bias.
        bias: Whether it has a bias, if it has a weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        backend: Same as for :func:`rms_norm`.
        lowering: Same as for :func:`rms_norm`.
    """

    backend: Backend = "auto"  # also of a module of torch that became one of this class, or was pickled without
    lowering: Lowering | None = None

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        backend: Backend = "auto",
        lowering: Lowering | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.backend = backend
        self.lowering = lowering

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normalise ``x``, or its sum with a residual, as :meth:`RMSNorm.forward` does.

        Args:
            x: (..., *normalized_shape).
            residual: Same as for :func:`layer_norm`.

        Returns:
            y; with a residual the tuple (y, s).

        Raises:
            TypeError: If ``x`` is not a tensor.
            ValueError: If the last dimensions of ``x`` are not ``normalized_shape``.
        """
        return _of_module(self, layer_norm, x, residual, weight=self.weight, bias=self.bias)

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        return f"{super().extra_repr()}, backend={self.backend}"


def _of_module(
    module: RMSNorm | LayerNorm,
    function: Callable[..., Any],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    **parameters: torch.Tensor | None,
) -> Any:
    """Call the function of a module with what the module holds."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    options: dict[str, Any] = {"eps": module.eps, "backend": module.backend, "lowering": module.lowering}
    if residual is not None:
        options["residual"] = residual
    if len(module.normalized_shape) > 1 or tuple(x.shape[-1:]) != module.normalized_shape:
        options["normalized_shape"] = module.normalized_shape
    return function(x, **parameters, **options)

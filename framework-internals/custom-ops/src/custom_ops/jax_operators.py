"""The same kernels as JAX functions, through ``jax.ffi``: with jit, grad and vmap, on a CPU and on CUDA GPUs.

The kernels are in the library that torch loads, so importing this module imports torch. The functions have the names
and formulas of :mod:`custom_ops`. They raise TypeError or ValueError for errors that JAX itself does not detect.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from custom_ops.builds import loading
from native_build import LibraryError

_TARGETS = (
    "vector_add", "scale", "bias_gelu", "bias_gelu_backward", "scale_shift_relu", "attention", "attention_backward",
)  # fmt: skip
_DTYPES = ("float32", "float64", "float16", "bfloat16")


@functools.cache
def register() -> None:
    """Register the handlers with XLA; the first call of a function does this.

    Raises:
        native_build.BuildError: If there is no library, and none can be compiled.
        native_build.LibraryError: If the library was built without JAX.
    """
    info = loading.load()
    if info.file is None:
        raise LibraryError(
            "custom_ops under JAX: expected a library, got kernels compiled at run time (custom-ops build makes one)"
        )
    library = ctypes.CDLL(str(info.file))
    if not hasattr(library, "custom_ops_jax_scale_cpu"):
        raise LibraryError(f"custom_ops under JAX: {info.file} was built without jax (install jax and build it again)")
    for name in _TARGETS:
        for platform in ("cpu", "cuda"):
            symbol = f"custom_ops_jax_{name}_{platform}"
            if hasattr(library, symbol):
                handler = jax.ffi.pycapsule(getattr(library, symbol))
                jax.ffi.register_ffi_target(
                    f"custom_ops_{name}", handler, platform="CUDA" if platform == "cuda" else "cpu"
                )


def _call(name: str, results: Any, *arguments: jax.Array, **attributes: Any) -> Any:
    register()
    return jax.ffi.ffi_call(f"custom_ops_{name}", results, vmap_method="broadcast_all")(*arguments, **attributes)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _check(op: str, first: str, x: jax.Array, **others: jax.Array) -> None:
    if x.dtype.name not in _DTYPES:
        raise TypeError(f"{op}: argument '{first}': expected dtype {', '.join(_DTYPES)}, got {x.dtype}")
    for name, other in others.items():
        if other.dtype != x.dtype:
            raise TypeError(f"{op}: argument '{name}': expected dtype {x.dtype} like '{first}', got {other.dtype}")


def _check_shape(op: str, name: str, x: jax.Array, expected: Sequence[int]) -> None:
    if x.shape != tuple(expected):
        raise ValueError(f"{op}: argument '{name}': expected shape {tuple(expected)}, got {x.shape}")


@jax.custom_vjp
def vector_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a + b``, of equal shape and dtype: :func:`custom_ops.vector_add`."""
    _check("vector_add", "a", a, b=b)
    _check_shape("vector_add", "b", b, a.shape)
    return _call("vector_add", _like(a), a, b)


vector_add.defvjp(lambda a, b: (vector_add(a, b), None), lambda _, gradient: (gradient, gradient))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale(x: jax.Array, alpha: float = 1.23) -> jax.Array:
    """``alpha * x``: :func:`custom_ops.scale`."""
    _check("scale", "x", x)
    return _call("scale", _like(x), x, alpha=np.float64(alpha))


scale.defvjp(lambda x, alpha: (scale(x, alpha), None), lambda alpha, _, gradient: (scale(gradient, alpha),))


@jax.custom_vjp
def bias_gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    """GELU of ``x + bias`` in its tanh approximation: :func:`custom_ops.bias_gelu`."""
    _check("bias_gelu", "x", x, bias=bias)
    if x.ndim == 0:
        raise ValueError("bias_gelu: argument 'x': expected one dimension or more, got ()")
    _check_shape("bias_gelu", "bias", bias, x.shape[-1:])
    return _call("bias_gelu", _like(x), x, bias)


def _bias_gelu_backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, bias = saved
    return tuple(_call("bias_gelu_backward", (_like(x), _like(bias)), gradient, x, bias))


bias_gelu.defvjp(lambda x, bias: (bias_gelu(x, bias), (x, bias)), _bias_gelu_backward)


def conv_bn_relu(
    x: jax.Array, weight: jax.Array, scale: jax.Array, shift: jax.Array, stride: int = 1, padding: int = 0
) -> jax.Array:
    """``relu(scale·conv(x, weight) + shift)``, XLA's convolution in NCHW: :func:`custom_ops.conv_bn_relu`."""
    _check("conv_bn_relu", "x", x, weight=weight)
    convolved = jax.lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        ((padding, padding), (padding, padding)),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    for name, tensor in (("scale", scale), ("shift", shift)):
        _check_shape("conv_bn_relu", name, tensor, weight.shape[:1])
        if tensor.dtype != (jnp.float64 if x.dtype == jnp.float64 else jnp.float32):
            raise TypeError(
                f"conv_bn_relu: argument '{name}': expected float32 (float64 for float64), got {tensor.dtype}"
            )
    return _scale_shift_relu(convolved, scale, shift)


@jax.custom_vjp
def _scale_shift_relu(y: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    return _call("scale_shift_relu", _like(y), y, scale, shift)


def _scale_shift_relu_backward(saved: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    y, scale, result = saved
    clipped = jnp.where(result > 0, gradient, 0).astype(scale.dtype)
    dscale = (clipped * y.astype(scale.dtype)).sum((0, 2, 3))
    return (clipped * scale[:, None, None]).astype(y.dtype), dscale, clipped.sum((0, 2, 3))


def _scale_shift_relu_forward(y: jax.Array, scale: jax.Array, shift: jax.Array) -> tuple[jax.Array, Any]:
    result = _scale_shift_relu(y, scale, shift)
    return result, (y, scale, result)


_scale_shift_relu.defvjp(_scale_shift_relu_forward, _scale_shift_relu_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = False, scale: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention and the log-sum-exp of each row of scores: :func:`custom_ops.flash_attention` without its features."""
    _check("flash_attention", "q", q, k=k, v=v)
    _check_shape("flash_attention", "v", v, k.shape)
    fit = q.ndim == k.ndim == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fit or (q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]):
        raise ValueError(
            "flash_attention: argument 'k': expected (batch, heads, sequence, head size) of the batch and head size of "
            f"'q', {q.shape}, and a number of heads that divides its own, got {k.shape}"
        )
    if not 1 <= q.shape[3] <= 256:
        raise ValueError(f"flash_attention: argument 'q': expected a head size of 1 to 256, got {q.shape[3]}")
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    out, logarithms = _call("attention", (_like(q), lse), q, k, v, **_attention_attributes(q, causal, scale))
    return out, logarithms


def _attention_attributes(q: jax.Array, causal: bool, scale: float | None) -> dict[str, Any]:
    return {"causal": bool(causal), "scale": np.float64(q.shape[-1] ** -0.5 if scale is None else scale)}


def _flash_attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, scale: float | None
) -> tuple[Any, Any]:
    out, lse = flash_attention(q, k, v, causal, scale)
    return (out, lse), (q, k, v, out, lse)


def _flash_attention_backward(
    causal: bool, scale: float | None, saved: tuple[jax.Array, ...], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    q, k, v, out, lse = saved
    results = tuple(_like(x) for x in (q, k, v))
    return tuple(
        _call("attention_backward", results, *gradients, q, k, v, out, lse, **_attention_attributes(q, causal, scale))
    )


flash_attention.defvjp(_flash_attention_forward, _flash_attention_backward)

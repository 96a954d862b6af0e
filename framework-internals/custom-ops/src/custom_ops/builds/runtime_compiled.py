"""The CUDA kernels for machines without nvcc and without a wheel: NVRTC compiles the same sources at first use.

Each instance of a kernel takes about a second to compile, once per process. Launches run through Python and cost about
20 µs. This is for experiments and for machines that have nothing else. It has no flash_attention, no cross-entropy and
no gated activations.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

import native_build
from custom_ops.builds import nvrtc
from custom_ops.builds.operator_library import CSRC
from custom_ops.operators.checks import (
    check_axpb,
    check_bias_gelu,
    check_bias_gelu_backward,
    check_conv_bn_relu,
    check_scale,
    check_vector_add,
    wide,
)
from custom_ops.operators.registration import NAMESPACES

_SOURCES = ("common/elementwise.cuh", "bias_gelu/kernels.cuh", "conv_bn_relu/kernels.cuh")
_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"
}  # fmt: skip
_THREADS = 256

_libraries: list[torch.library.Library] = []  # a registration lasts as long as its object


class _Divisor(ctypes.Structure):
    """The struct FastDivisor of csrc/common/device.cuh."""

    _fields_ = (("divisor", ctypes.c_uint32), ("magic", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    def __init__(self, divisor: int) -> None:
        shift = max(divisor - 1, 0).bit_length()
        super().__init__(divisor, 2**32 * (2**shift - divisor) // divisor + 1, shift)


class _Empty(ctypes.Structure):
    """A functor without members; its size in C++ is one byte."""

    _fields_ = (("nothing", ctypes.c_uint8),)


class _Alpha(ctypes.Structure):
    """A functor with one factor."""

    _fields_ = (("alpha", ctypes.c_double),)


def missing() -> str | None:
    """Say why the kernels cannot be compiled at run time here, with the remedy; None if they can."""
    if (reason := native_build.missing_gpu()) is not None:
        return reason
    if not CSRC.is_dir():
        return f"the sources are not in {CSRC} (install the package editable from its checkout)"
    return nvrtc.missing()


def register() -> None:
    """Register the kernels for CUDA tensors."""
    kernels: dict[str, Callable[..., object]] = {
        "vector_add": _vector_add, "axpb": _axpb, "scale": _scale, "bias_gelu": _bias_gelu,
        "bias_gelu_backward": _bias_gelu_backward, "conv_bn_relu": _conv_bn_relu,
    }  # fmt: skip
    for namespace in NAMESPACES:
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CUDA")


def compile_for(expression: str, architecture: str) -> nvrtc.Compiled:
    """Compile one instance of a kernel template.

    Raises:
        BuildError: If there is no NVRTC, or the source does not compile.
    """
    source = "".join(f'#include "{name}"\n' for name in _SOURCES)
    return nvrtc.compile_kernels(source, [f"custom_ops::{expression}"], architecture, [CSRC])


@functools.cache
def _kernel(expression: str, device: int) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    return nvrtc.Kernel(compile_for(expression, f"sm_{major}{minor}"))


def _launch(
    expression: str, like: Tensor, grid: tuple[int, int], *arguments: Tensor | nvrtc.Argument, threads: int = _THREADS
) -> None:
    with torch.cuda.device(like.device):
        passed = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        stream = torch.cuda.current_stream().cuda_stream
        _kernel(expression, like.device.index).launch(grid, threads, stream, passed)


def _width(*tensors: Tensor) -> int:
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return 16 // tensors[0].element_size() if aligned else 1


def _blocks(count: int, size: int) -> tuple[int, int]:
    return min(math.ceil(count / size), 2**31 - 1), 1


def _elementwise(functor: str, value: nvrtc.Argument, *operands: Tensor) -> Tensor:
    operands = tuple(operand.contiguous() for operand in operands)
    x = operands[0]
    out = torch.empty_like(x)
    if x.numel():
        width = _width(*operands, out)
        expression = f"elementwise<{_TYPES[x.dtype]}, {width}, {len(operands)}, custom_ops::{functor}>"
        second = operands[1] if len(operands) == 2 else ctypes.c_void_p()
        grid = _blocks(x.numel(), _THREADS * 16 // x.element_size())
        _launch(expression, x, grid, x, second, out, ctypes.c_longlong(x.numel()), value)
    return out


def _vector_add(a: Tensor, b: Tensor) -> Tensor:
    check_vector_add(a, b)
    return _elementwise("Add", _Empty(), a, b)


def _axpb(x: Tensor, b: Tensor, alpha: float) -> Tensor:
    check_axpb(x, b, alpha)
    return _elementwise("Axpb", _Alpha(alpha), x, b)


def _scale(x: Tensor, alpha: float = 1.23) -> Tensor:
    check_scale(x, alpha)
    return _elementwise("Scale", _Alpha(alpha), x)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    check_bias_gelu(x, bias)
    x, bias = x.contiguous(), bias.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        width = _width(x, bias, out)
        width = width if bias.numel() % width == 0 else 1
        large = "true" if x.numel() // width > 2**31 - 1 else "false"
        expression = f"bias_gelu_forward<{_TYPES[x.dtype]}, {width}, 1, {large}>"
        grid = _blocks(x.numel(), _THREADS * width)
        _launch(expression, x, grid, x, bias, out, ctypes.c_longlong(x.numel()), _Divisor(bias.numel() // width))
    return out


def rows_are_few(rows: int, columns: int, width: int, device: torch.device) -> bool:
    """Whether bias_gelu's backward pass is one launch on a GPU: the rule of csrc/bias_gelu/cuda.cu.

    Args:
        rows: Number of rows.
        columns: Elements of a row.
        width: Elements that a thread reads at once.
        device: The GPU.
    """
    return rows <= 4 * 32 * width and columns <= 32 * torch.cuda.get_device_properties(device).multi_processor_count


def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    check_bias_gelu_backward(grad, x, bias)
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    dx, dbias = torch.empty_like(x), torch.zeros_like(bias)
    if x.numel():
        columns = bias.numel()
        rows = x.numel() // columns
        width = _width(grad, x, bias, dx)
        width = width if columns % width == 0 else 1
        size, name = (ctypes.c_longlong(rows), ctypes.c_longlong(columns)), _TYPES[x.dtype]
        by_32 = math.ceil(columns / 32), 1
        if rows_are_few(rows, columns, width, x.device):
            of_few_rows = f"bias_gelu_backward_of_few_rows<{name}, {width}>"
            _launch(of_few_rows, x, by_32, grad, x, bias, dx, dbias, *size, threads=1024)
            return dx, dbias
        across = 256 if columns >= 256 * width else 64
        # Enough groups of rows to occupy any GPU, but few enough that their partial sums cause little traffic.
        groups = min(512, math.ceil(rows / 32))
        sums = torch.empty(groups, columns, dtype=wide(x.dtype), device=x.device)
        beyond_l2 = ctypes.c_bool(x.nbytes > torch.cuda.get_device_properties(x.device).L2_cache_size)
        grid = (math.ceil(columns / (across * width)), groups)
        _launch(f"bias_gelu_backward<{name}, {width}, {across}>", x, grid, grad, x, bias, dx, sums, *size, beyond_l2)
        last = (ctypes.c_longlong(groups), ctypes.c_longlong(columns))
        _launch(f"bias_gelu_dbias<{name}>", x, by_32, sums, dbias, *last, threads=1024)
    return dx, dbias


def _conv_bn_relu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    stride: list[int] | int = 1,
    padding: list[int] | int = 0,
    dilation: list[int] | int = 1,
    groups: int = 1,
) -> Tensor:
    check_conv_bn_relu(x, weight, scale, shift)
    y = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    y = y if y.is_contiguous() or y.is_contiguous(memory_format=torch.channels_last) else y.contiguous()
    if y.numel():
        last = not y.is_contiguous()
        inner = 1 if last else y.shape[2] * y.shape[3]
        width = _width(y)
        width = width if (y.shape[1] if last else inner) % width == 0 else 1
        vectors = y.numel() // width
        template = f"{_TYPES[y.dtype]}, {width}, {str(last).lower()}, {str(vectors > 2**31 - 1).lower()}"
        divisors = (_Divisor(1 if last else inner // width), _Divisor(y.shape[1] // width if last else y.shape[1]))
        arguments = (y, scale.contiguous(), shift.contiguous(), ctypes.c_longlong(vectors), *divisors)
        _launch(f"scale_shift_relu<{template}>", y, _blocks(vectors, _THREADS), *arguments)
    return y

"""Run-time compilation: every kernel compiles with NVRTC, and on a GPU gives the same results as the library's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import native_build
from custom_ops.builds import loading, nvrtc, operator_library, runtime_compiled

needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))

INSTANCES = [
    "elementwise<float, 4, 2, custom_ops::Add>",
    "elementwise<__half, 1, 1, custom_ops::Scale>",
    "bias_gelu_forward<__nv_bfloat16, 8, 1, false>",
    "bias_gelu_backward<__nv_bfloat16, 8, 64>",
    "bias_gelu_dbias<double>",
    "bias_gelu_backward_of_few_rows<double, 1>",
    "scale_shift_relu<float, 4, true, false>",
]


@needs_nvrtc
@pytest.mark.parametrize("instance", INSTANCES)
def test_kernels_compile_without_nvcc_and_without_a_gpu(instance: str) -> None:
    compiled = runtime_compiled.compile_for(instance, "sm_90")
    assert compiled.cubin.startswith(b"\x7fELF")
    assert instance.split("<")[0].encode() in compiled.names[0]


@needs_nvrtc
def test_what_does_not_compile_is_said_in_one_line() -> None:
    with pytest.raises(native_build.BuildError, match=r"NVRTC does not compile for sm_90: .*nonsense"):
        nvrtc.compile_kernels("__global__ void f() { nonsense; }", ["f"], "sm_90", [operator_library.CSRC])


def test_fast_division_is_division() -> None:
    for divisor in (1, 2, 3, 7, 12, 511, 512, 4096, 12345, 2**31 - 1):
        fast = runtime_compiled._Divisor(divisor)
        for n in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1, 1234567890):
            quotient = (((n * fast.magic) >> 32) + n) >> fast.shift
            assert quotient == n // divisor


SCRIPT = """
import torch, native_build
native_build.missing_cuda = lambda: "no nvcc"
import custom_ops
from custom_ops.operators.calls import calls
info = custom_ops.load()
assert info.cuda == "run-time compilation", info
for rows in (3000, 300):  # in two launches, and in one
    x, bias = torch.randn(rows, 512, device="cuda"), torch.randn(512, device="cuda")
    y = custom_ops.bias_gelu(x, bias)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x + bias, approximate="tanh"))
    dx, dbias = calls.bias_gelu_backward(x, x, bias)
    expected = torch.ops.aten.gelu_backward(x, x + bias, approximate="tanh")
    torch.testing.assert_close(dx, expected)
    torch.testing.assert_close(dbias, expected.sum(0), rtol=1e-4, atol=1e-3)
assert torch.equal(custom_ops.vector_add(x, x), x + x)
assert torch.equal(custom_ops.scale(x.half()), (x.half().float() * 1.23).half())
image, weight = torch.randn(2, 3, 8, 8, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda")
scale, shift = torch.randn(4, device="cuda"), torch.randn(4, device="cuda")
y = custom_ops.conv_bn_relu(image, weight, scale, shift)
torch.testing.assert_close(y, torch.relu(torch.conv2d(image, weight) * scale[:, None, None] + shift[:, None, None]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_it_serves_where_there_is_no_nvcc() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != loading.VARIABLE}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.returncode == 0, answer.stderr

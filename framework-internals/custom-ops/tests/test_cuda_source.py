"""The CUDA source compiles for every architecture that ships, and its kernels keep to registers."""

import pytest

from custom_ops.roads.module import SOURCES
from native_build import compile_cuda, find_nvcc

DTYPES, OPERATORS, WIDTHS = 4, 2, 2


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100", "sm_120"])
def test_kernels_do_not_spill(architecture: str) -> None:
    kernels = compile_cuda(SOURCES / "cuda.cu", architecture)
    assert len(kernels) == DTYPES * OPERATORS * WIDTHS
    for kernel in kernels:
        assert (kernel.spill_stores, kernel.spill_loads, kernel.stack_frame) == (0, 0, 0), kernel
        # 64 registers let four blocks of 256 threads live on a multiprocessor (of 65,536 registers): enough loads in
        # flight to cover the latency of device memory.
        assert kernel.registers <= 64, kernel

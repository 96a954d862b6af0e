"""The CUDA sources of the memory-bound operators compile for every architecture that ships, and keep to registers."""

import pytest

from custom_ops.builds.operator_library import CSRC
from native_build import compile_cuda, find_nvcc

# Kernels of each example: dtypes times ways to reach memory, and what else a template is instantiated for.
KERNELS = {
    "vector_add": 4 * 2 * 2, "scale": 4 * 2, "bias_gelu": 4 * (4 * 2 + 2 * 4 + 1), "conv_bn_relu": 4 * 3 * 2,
    "cross_entropy": 4 * 2 * 2,
}  # fmt: skip


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "architecture",
    ["sm_90a", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100", "sm_120"))],
)
@pytest.mark.parametrize("example", KERNELS)
def test_kernels_do_not_spill(example: str, architecture: str) -> None:
    kernels = compile_cuda(CSRC / example / "cuda.cu", architecture)
    assert len(kernels) == KERNELS[example]
    for kernel in kernels:
        # Four vectors of float64 a thread are more than their tanh leaves room for; only a comparison takes them.
        allowed = 32 if "bias_gelu_forwardIdLi2ELi4E" in kernel.name else 0
        assert max(kernel.spill_stores, kernel.spill_loads, kernel.stack_frame) <= allowed, kernel
        # 64 registers let four blocks of 256 threads live on a multiprocessor (of 65,536 registers): enough loads in
        # flight to cover the latency of device memory. The sum over groups is small, and one block of 1,024.
        # Half as many threads do in float64, whose tanh or exponential limits the kernel, not the memory. Three blocks
        # of bias_gelu_backward have the registers to load a row ahead.
        three_blocks = "bias_gelu_backward" in kernel.name
        two_blocks = "bias_gelu_backwardId" in kernel.name or "cross_entropy_rowId" in kernel.name
        assert kernel.registers <= (128 if two_blocks else 80 if three_blocks else 64), kernel
        assert kernel.shared_memory <= 16 * 1024, kernel  # 64 KiB of a multiprocessor, where sm_120 has 100

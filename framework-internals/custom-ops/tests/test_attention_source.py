"""The attention kernels keep to the registers of a multiprocessor."""

import re

import pytest

from custom_ops.attention_kernels import KERNEL_FILES, SOURCES
from native_build import compile_cuda, find_nvcc

# What a few kernels of mma.sync spill, in bytes a thread, for all that they hold in registers: at most these.
SMALL_SPILL = 64
# fp32 at a width of 256: 128 sums a thread, the scores' fragments in two parts, and the addresses of both parts.
WIDEST_FP32_SPILL = 640
WIDEST_FP32 = re.compile(r"I6__halfLi2ELi256E")


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_120"])
@pytest.mark.parametrize("name", KERNEL_FILES)
def test_kernels_keep_to_their_registers(name: str, architecture: str) -> None:
    kernels = compile_cuda(SOURCES / name, architecture)
    assert kernels
    for kernel in kernels:
        if "wgmma" in name:
            # 240 registers a consumer: what the producer's warpgroup gives up is theirs (setmaxnreg).
            allowed = 24 if "backward" in name else 0
        elif "mma" in name:
            allowed = WIDEST_FP32_SPILL if WIDEST_FP32.search(kernel.name) else SMALL_SPILL
        else:
            allowed = 0
        assert kernel.spill_stores <= allowed, kernel
        assert kernel.registers <= 255, kernel


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_120"])
def test_hopper_kernels_are_empty_elsewhere(architecture: str) -> None:
    for name in ("forward_wgmma.cu", "backward_wgmma.cu"):
        for kernel in compile_cuda(SOURCES / name, architecture):
            assert kernel.registers <= 16, kernel

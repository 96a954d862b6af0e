"""The attention kernels keep to the registers of a multiprocessor."""

import re
import subprocess

import pytest

from native_build import compile_cuda, find_nvcc

from .attention_kernels import KERNEL_FILES, SOURCES

# What a few kernels of mma.sync spill, in bytes a thread, for all that they hold in registers: at most these.
SMALL_SPILL = 128
# At a width of 256: 128 sums a thread beside the scores, their fragments and the addresses of what is copied.
WIDEST_SPILL = 640
WIDEST = re.compile(r"Li256E")
# Compiled by the quick tests where nothing is compiled yet: the others take up to half a minute each.
QUICK = {("cuda/dispatch.cu", "sm_90a"), ("cuda/mma/decode.cu", "sm_90a")}


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[] if (name, architecture) in QUICK else pytest.mark.slow)
        for name in KERNEL_FILES
        for architecture in ("sm_90a", "sm_120")
    ],
)
def test_kernels_keep_to_their_registers(name: str, architecture: str) -> None:
    kernels = compile_cuda(SOURCES / name, architecture)
    assert kernels
    for kernel in kernels:
        if "wgmma" in name:
            # 240 registers a consumer: what the producer's warpgroup gives up is theirs (setmaxnreg).
            allowed = 0 if "forward" in name else 40
        elif "mma" in name:
            allowed = WIDEST_SPILL if WIDEST.search(kernel.name) else SMALL_SPILL
        else:
            allowed = 0
        assert kernel.spill_stores <= allowed, kernel
        assert kernel.registers <= 255, kernel


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_100"])
@pytest.mark.parametrize("name", KERNEL_FILES)
def test_every_file_compiles_for_the_other_architectures(name: str, architecture: str) -> None:
    assert compile_cuda(SOURCES / name, architecture)


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_120", marks=pytest.mark.slow)])
def test_hopper_kernels_are_empty_elsewhere(architecture: str) -> None:
    for name in ("cuda/wgmma/forward.cu", "cuda/wgmma/backward.cu", "cuda/wgmma/one_pass.cu"):
        kernels = [kernel for kernel in compile_cuda(SOURCES / name, architecture) if "queries" not in kernel.name]
        assert kernels
        for kernel in kernels:
            assert kernel.registers <= 16, kernel


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["cuda/wgmma/forward.cu", "cuda/wgmma/one_pass.cu"])
def test_the_compiler_keeps_asynchronous_products_asynchronous(name: str) -> None:
    # ptxas waits after every product, and only says so, if it runs out of registers for those in flight or if other
    # instructions write a sum meanwhile.
    code = "arch=compute_90a,code=sm_90a"
    command = [str(find_nvcc()), "-std=c++17", "-O3", "-gencode", code, "-cubin", "-Xptxas", "-v", "-o", "/dev/null"]
    answer = subprocess.run([*command, str(SOURCES / name)], capture_output=True, text=True, check=True)
    assert "Compiling entry function" in answer.stderr + answer.stdout
    assert "serialized" not in answer.stderr + answer.stdout

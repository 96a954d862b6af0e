"""The CUDA sources of the memory-bound operators compile for every architecture that ships, and keep to registers."""

import re
import subprocess

import pytest

from custom_ops.builds.operator_library import CSRC
from native_build import compile_cuda, find_nvcc

SLOW = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
# Kernels of each example: dtypes times ways to reach memory, and what else a template is instantiated for.
KERNELS = {
    "vector_add": 2 * 4 * (2 + 1), "scale": 4 * (2 + 1), "bias_gelu": 4 * (4 * 2 + 2 * 4 + 2 + 1),
    "bias_gelu/glu": 3 * 4 * 2 * 2, "conv_bn_relu": 4 * 3 * 2, "cross_entropy": 2 * (4 * 2 * 2 + 3 + 4 * 2 * 2),
    "rotary": 4 * 2 * 2, "adamw": 2 + 2 + 8 * 2,
}  # fmt: skip
SHORTEST = ("scale", "bias_gelu", "rotary")


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "architecture",
    ["sm_90a", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
@pytest.mark.parametrize(
    "example",
    [pytest.param(name, marks=() if name in SHORTEST else pytest.mark.slow) for name in KERNELS],
)
def test_kernels_do_not_spill(example: str, architecture: str) -> None:
    kernels = compile_cuda(CSRC / example / "cuda.cu", architecture)
    assert len(kernels) == KERNELS[example]
    for kernel in kernels:
        # Four vectors of float64 a thread are more than their tanh leaves room for; only a comparison takes them. For
        # sm_100 the update of float64 parameters keeps two numbers in memory, for sm_120 AMSGrad with copies.
        allowed = {"bias_gelu_forwardIdLi2ELi4E": 32, "adamwIddd": 16, "S1_Lb1EEEvNS_14ParameterTable": 16}
        if architecture == "sm_75":  # AMSGrad of float32 parameters keeps a number in memory
            allowed["fLb1EEEvNS_14ParameterTable"] = 8
        if architecture in ("sm_80", "sm_86", "sm_89"):  # so does the loss of a float32 row with its gradient
            allowed["17cross_entropy_rowIf"] = 8
        if architecture == "sm_120":  # and a block of classes of a bfloat16 row
            allowed["general_cross_entropy_block_sumsI13__nv_bfloat16Li512E"] = 8
        limit = max((most for name, most in allowed.items() if name in kernel.name), default=0)
        assert max(kernel.spill_stores, kernel.spill_loads, kernel.stack_frame) <= limit, kernel
        # 64 registers let four blocks of 256 threads live on a multiprocessor (of 65,536 registers): enough loads in
        # flight to cover the latency of device memory. The sum over groups is small, and one block of 1,024.
        # Half as many threads do in float64, whose tanh or exponential limits the kernel, not the memory.
        of_float64 = r"bias_gelu_backwardId|cross_entropy_rowId|cross_entropy_block_gradientId|glu_backwardI.+EdLi"
        transposing = "elementwise_by_tiles" in kernel.name
        two_blocks = re.search(of_float64, kernel.name)
        three_blocks = "bias_gelu_backward" in kernel.name and architecture == "sm_120"
        three_blocks |= "adamwIdddLb1E" in kernel.name  # five tensors of float64
        three_blocks |= "adamwIddd" in kernel.name and architecture == "sm_75"
        assert kernel.registers <= (128 if two_blocks else 80 if three_blocks else 64), kernel
        # 16 KiB: 64 of a multiprocessor, where sm_120 has 100. Kernels that transpose have two tiles of 64 rows of 256
        # bytes and a bank of padding: four blocks fit on sm_90, three on sm_120.
        assert kernel.shared_memory <= (2 * 64 * (256 + 4) if transposing else 16 * 1024), kernel


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("example", "kernel", "store"),
    [
        ("rotary", "rotaryI13__nv_bfloat16Li8E", "v4.u32"),
        pytest.param("adamw", "adamwIf13__nv_bfloat16S1_Lb0E", "v2.u32", marks=pytest.mark.slow),
        pytest.param("bias_gelu", "bias_gelu_backwardI13__nv_bfloat16Li8E", "v4.u32", marks=pytest.mark.slow),
    ],
)
def test_a_vector_is_stored_at_once(example: str, kernel: str, store: str) -> None:
    command = [str(find_nvcc()), "-std=c++17", "-arch=sm_90a", "-ptx", "-o", "-", str(CSRC / example / "cuda.cu")]
    source = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    entries = [entry for entry in source.split(".entry ")[1:] if kernel in entry.partition("(")[0]]
    assert entries
    for entry in entries:
        stores = re.findall(r"st\.global\.([a-z0-9.]+)", entry)
        assert store in stores
        # The elements of adamw that fill no vector, in a loop that the compiler may unroll.
        assert example == "adamw" or "u16" not in stores

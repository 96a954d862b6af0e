"""The Triton kernels through their compiler, for GPUs that this machine may lack, and their tiling."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from rmsnorm_fused.impl import triton as kernels

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SHARED_BYTES = {80: 166912, 90: 232448, 100: 232448, 120: 101376}  # a program's most, by compute capability
WIDTHS = (1, 512, 4096, 8192, 16384, 20001, 32768, 65536, 262144)


@pytest.fixture(autouse=True)
def _a_device(monkeypatch):
    """The device properties that the tilings use, of an H100 or H200."""

    class Properties:
        multi_processor_count, major, minor = 132, 9, 0
        shared_memory_per_block_optin = SHARED_BYTES[90]

    monkeypatch.setattr(kernels, "_properties", lambda index: Properties)


def compiled(kernel, capability, constants, pointers, warps):
    """The kernel for a processor: every stride, size and address a multiple of 16, as for tensors of whole rows."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    signature, attributes = {}, {}
    constants = {**constants, **{name: None for name, kind in pointers.items() if kind is None}}
    for index, name in enumerate(kernel.arg_names):
        if name.endswith("_inner"):
            constants[name] = 1
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = pointers.get(name, "i32")
            attributes[index,] = [["tt.divisibility", 16]]
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    source = ASTSource(kernel, signature, constants, attributes)
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def types(dtype):
    kind = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    return kind, {"OFFSET": 1.0, "LLAMA": True, "HAS_WEIGHT": True, "WIDE": kernels.tl.float32}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("float8", ["", "dynamic"])
@pytest.mark.parametrize("n", [512, 32768, 65536])
def test_forward_compiles(capability, float8, n):
    kind, constants = types(torch.bfloat16)
    tiling = kernels.forward_tiling(n, 4)
    constants |= {"EPS": 1e-6, "HAS_RESIDUAL": True, "FLOAT8": float8, "FLOAT8_HARDWARE": capability >= 89}
    pointers = {
        **dict.fromkeys(("x", "residual", "weight", "s"), kind),
        "y": "*u8" if float8 else kind,
        "scale": "*fp32" if float8 == "static" else None,
        "rstd": None if float8 else "*fp32",
        "row_scales": "*fp32" if float8 == "dynamic" else None,
    }
    if tiling.columns < n:
        stages = tiling.stages_within(tiling.columns * 4, SHARED_BYTES[capability])
        program = compiled(
            kernels._rms_norm_forward_wide,
            capability,
            {**constants, "COLUMNS": tiling.columns, "STAGES": stages},
            pointers,
            tiling.warps,
        )
    else:
        tile = {**kernels._tile(tiling, 64, n), "EVICT": "evict_last"}
        program = compiled(kernels._rms_norm_forward, capability, constants | tile, pointers, tiling.warps)
        assert program.asm["ptx"].count("createpolicy.fractional.L2::evict_last") >= 2  # x and the residual
    assert program.metadata.shared <= SHARED_BYTES[capability]
    if float8 and capability >= 89:
        assert "e4m3x2" in program.asm["ptx"]


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (1, torch.float32),
        (512, torch.bfloat16),
        (4096, torch.bfloat16),
        (16384, torch.bfloat16),
        (16384, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(("ds", "wide"), [(True, False), (False, False), (True, True)])
def test_backward_compiles_and_its_ring_fits(capability, dtype, n, ds, wide):
    kind, constants = types(dtype)
    stream = "*fp32" if wide else kind  # s, ds and the weight
    tiling = kernels.backward_tiling(n, 4)
    itemsize = 4 if wide else dtype.itemsize
    a_row = n * (dtype.itemsize + (1 + ds + tiling.reload) * itemsize) + torch.float32.itemsize
    stages = tiling.stages_within(a_row, SHARED_BYTES[capability])
    constants |= {"HAS_DS": ds, "HAS_DRESIDUAL": wide, "NEEDS_DWEIGHT": True, "STAGES": stages, "RELOAD": tiling.reload}
    constants |= kernels._tile(tiling, 64, n) | {
        "FOLD": kernels._rows_share_threads(tiling, torch.empty(0, dtype=dtype))
    }
    pointers = {
        **dict.fromkeys(("dy", "dx"), kind),
        **dict.fromkeys(("s", "weight"), stream),
        "ds": stream if ds else None,
        "dresidual": stream if wide else None,
        "rstd": "*fp32",
        "partials": "*fp32",
    }
    program = compiled(kernels._rms_norm_backward, capability, constants, pointers, tiling.warps)
    assert program.metadata.shared * tiling.programs <= SHARED_BYTES[capability]
    assert ("cp.async" in program.asm["ptx"]) == (stages > 1)


@pytest.mark.parametrize(("n", "wide_bytes"), [*product(WIDTHS, (4, 8))])
def test_cuts_can_be_launched(n, wide_bytes):
    for tiling in (
        kernels.forward_tiling(n, wide_bytes),
        kernels.backward_tiling(n, wide_bytes),
        kernels.sum_tiling(n),
    ):
        for number in (tiling.rows, tiling.columns, tiling.warps):
            assert number & (number - 1) == 0, f"{tiling}: Triton's tiles and warps are powers of two"
        assert 1 <= tiling.warps <= 32
        assert tiling.rows * tiling.columns * wide_bytes <= 2 * kernels._FORWARD_ROW


def test_stages_are_as_many_as_shared_memory_holds():
    tiling = kernels.Tiling(1, 4096, warps=16, programs=2, stages=4)
    assert tiling.stages_within(16384, 232448) == 4
    assert tiling.stages_within(16384, 101376) == 3
    assert tiling.stages_within(1 << 20, 232448) == 1

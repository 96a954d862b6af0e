"""The Triton kernels through their compiler, for GPUs that this machine may lack, and their tiling."""

from __future__ import annotations

import os
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from rmsnorm_fused.impl import triton as kernels
from rmsnorm_fused.ops import operators, rows
from rmsnorm_fused.options import Options

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
    return kind, {"OFFSET": 1.0, "LLAMA": True, "HAS_WEIGHT": True, "CENTRED": False, "WIDE": kernels.tl.float32}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("float8", "centred"), [("", False), ("", True), ("dynamic", False)])
@pytest.mark.parametrize("n", [512, 32768, 65536])
def test_forward_compiles(capability, float8, centred, n):
    kind, constants = types(torch.bfloat16)
    tiling = kernels.forward_tiling(n, 4)
    constants |= {"EPS": 1e-6, "HAS_RESIDUAL": True, "FLOAT8": float8, "FLOAT8_HARDWARE": capability >= 89}
    constants |= {"CENTRED": centred, "HAS_BIAS": centred}
    pointers = {
        **dict.fromkeys(("x", "residual", "weight", "s"), kind),
        "bias": kind if centred else None,
        "y": "*u8" if float8 else kind,
        "scale": "*fp32" if float8 == "static" else None,
        "rstd": None if float8 else "*fp32",
        "row_scales": "*fp32" if float8 == "dynamic" else None,
    }
    if tiling.columns < n:
        stages = tiling.stages_within(tiling.columns * 4, SHARED_BYTES[capability])
        program = compiled(
            kernels._norm_forward_wide,
            capability,
            {**constants, "COLUMNS": tiling.columns, "STAGES": stages},
            pointers,
            tiling.warps,
        )
    else:
        tile = {**kernels._tile(tiling, 64, n), "EVICT": "evict_last"}
        program = compiled(kernels._norm_forward, capability, constants | tile, pointers, tiling.warps)
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
@pytest.mark.parametrize(
    ("ds", "wide", "centred"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_backward_compiles_and_its_ring_fits(capability, dtype, n, ds, wide, centred):
    kind, constants = types(dtype)
    stream = "*fp32" if wide else kind  # s, ds and the weight
    tiling = kernels.backward_tiling(n, 4)
    itemsize = 4 if wide else dtype.itemsize
    a_row = n * (dtype.itemsize + (1 + ds + tiling.reload) * itemsize) + torch.float32.itemsize
    stages = tiling.stages_within(a_row, SHARED_BYTES[capability])
    constants |= {"HAS_DS": ds, "HAS_DRESIDUAL": wide, "NEEDS_DWEIGHT": True, "STAGES": stages, "RELOAD": tiling.reload}
    constants["CENTRED"] = centred
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
    program = compiled(kernels._norm_backward, capability, constants, pointers, tiling.warps)
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


@pytest.fixture
def _a_gpu_that_a_compiler_asks_for(monkeypatch):
    """Opens the operators on a CPU's tensors too, and lets torch compile a kernel far enough to see what it writes."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", target)
    monkeypatch.setattr(rows, "_can_open", lambda x: isinstance(x.shape[-1], int))


def step(x, residual, weight):
    y, s = operators.normalise("triton", x, residual, weight, None, Options(1e-5))
    return [y.float().square().sum() + s.sum()]


def launched(graph):
    """The kernels that a graph launches, and the names of this package's operators in it."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    indices = [node.kwargs["kernel_idx"] for node in nodes if node.target is triton_kernel_wrapper_functional]
    kept = [str(node.target) for node in nodes if "rmsnorm_fused" in str(node.target)]
    return [kernel_side_table.get_kernel(index).fn.__name__ for index in indices], kept


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_a_gpu_that_a_compiler_asks_for")
def test_a_compiler_sees_the_launches_and_not_the_operators(residual_dtype):
    with FakeTensorMode():
        x = torch.empty(512, 768, dtype=torch.bfloat16, requires_grad=True)
        residual = torch.empty(512, 768, dtype=residual_dtype, requires_grad=True)
        weight = torch.empty(768, requires_grad=True)
        graph = aot_export_joint_simple(step, (x, residual, weight), trace_joint=True)
    assert launched(graph) == (["_norm_forward", "_norm_backward", "_norm_add_partials"], [])


@pytest.mark.usefixtures("_a_gpu_that_a_compiler_asks_for")
def test_where_the_columns_are_dynamic_a_compiler_sees_the_operators():
    def run(x):
        return [torch.ops.rmsnorm_fused.triton_forward(x, None, None, *Options(1e-5))[0]]

    graph = make_fx(functionalize(run), tracing_mode="symbolic")(torch.ones(8, 64))
    found = launched(graph)
    assert found == ([], ["rmsnorm_fused.triton_forward.default"])


@pytest.mark.filterwarnings("ignore:Could not find an active CPU backend")
@pytest.mark.usefixtures("_a_gpu_that_a_compiler_asks_for")
def test_inductor_launches_the_kernel_itself_and_copies_nothing(monkeypatch):
    written = []
    codegen = GraphLowering.codegen

    def kept(self):
        found = codegen(self)
        written.append(found[0].value)
        return found

    monkeypatch.setattr(GraphLowering, "codegen", kept)
    operands = torch.ones(64, 768, dtype=torch.bfloat16), torch.ones(64, 768), torch.ones(768)
    with (
        torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1),
        pytest.raises(Exception, match="backends for target"),  # it cannot compile the kernel for a CPU
    ):
        torch.compile(step, fullgraph=True)(*operands)
    (source,) = written
    call = source[source.index("def call(self, args):") :]
    assert re.findall(r"(\w+)\.run\(", call)[0] == "_norm_forward_0"  # no copy of an operand before it
    assert call.count("_norm_forward_0.run(") == 1
    assert "rmsnorm_fused" not in call

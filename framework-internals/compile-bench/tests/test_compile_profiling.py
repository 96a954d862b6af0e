"""What a step does: coverage, kernels and memory from the profiler's events, made up and real."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch.autograd import DeviceType

from compile_bench.measure import steps as measuring
from compile_bench.measure.profiling import largest_rise, peak_rise, read_profile, record_steps, summarise
from compile_bench.targets.case import Case
from compile_bench.targets.regional import compile_case, repeated_blocks


@dataclass
class Span:
    start: float
    end: float

    def elapsed_us(self):
        return self.end - self.start


@dataclass
class Kernel:
    duration: float


@dataclass
class Event:
    name: str
    time_range: Span
    thread: int = 1
    device_type: DeviceType = DeviceType.CPU
    cpu_parent: object = None
    kernels: list = field(default_factory=list)
    is_user_annotation: bool = False


def event(name, start, end, **more):
    return Event(name, Span(start, end), **more)


def test_coverage_is_the_share_of_the_step_inside_regions():
    outer = event("aten::linear", 80, 90)
    events = [
        event("compile_bench step", 0, 100),
        event("TorchDynamo Cache Lookup", 0, 5),
        event("Torch-Compiled Region: 0/0", 10, 50),
        event("## Call CompiledFxGraph abc ##", 20, 45),  # within the region: counted once
        event("aten::mm", 25, 30),
        event("CompiledFunctionBackward", 60, 70, thread=2),
        outer,
        event("aten::addmm", 82, 88, cpu_parent=outer),
    ]
    found = summarise(events, "cpu", steps=1)
    assert found.covered == pytest.approx(0.5)
    assert found.operators == 1  # linear: mm is inside, addmm is linear's
    assert found.guard_seconds == pytest.approx(5e-6)
    assert found.kernels is None


def test_on_a_gpu_coverage_is_the_share_of_the_kernels_time():
    events = [
        event("compile_bench step", 0, 100),
        event("Torch-Compiled Region: 0/0", 10, 50),
        event("cudaLaunchKernel", 20, 22, kernels=[Kernel(30)]),
        event("cudaLaunchKernel", 60, 62, kernels=[Kernel(10)]),
        event("triton_poi_fused_gelu", 30, 60, device_type=DeviceType.CUDA),
        event("sm90_gemm", 62, 72, device_type=DeviceType.CUDA),
        event("Memcpy DtoH", 80, 81, device_type=DeviceType.CUDA),
        event("Torch-Compiled Region: 0/0", 30, 72, device_type=DeviceType.CUDA, is_user_annotation=True),
    ]
    found = summarise(events, "cuda", steps=1)
    assert found.covered == pytest.approx(0.75)
    assert (found.kernels, found.launches) == (2, 2)


def test_kernels_of_one_template_count_together_and_those_that_overlap_once():
    def kernel(name, start, end):
        return event(name, start, end, device_type=DeviceType.CUDA)

    found = summarise(
        [
            kernel("void at::native::fill<4, float>(int, float*)", 0, 10),
            kernel("void at::native::fill<8, double>(int, double*)", 5, 25),
            kernel("void (anonymous namespace)::index<2>(int)", 30, 70),
            kernel("Memcpy DtoH (Device -> Pageable)", 80, 90),
            event("compile_bench step", 0, 100, device_type=DeviceType.CUDA, is_user_annotation=True),
            event("aten::fill_", 0, 100),
        ],
        "cuda",
        steps=2,
    )
    assert found.busy_seconds == pytest.approx((25 + 40 + 10) * 1e-6 / 2)
    assert [(each.name, each.calls) for each in found.costliest] == [("index", 0.5), ("at::native::fill", 1.0)]
    assert [each.seconds for each in found.costliest] == pytest.approx([20e-6, 15e-6])


def test_attention_is_fused_where_one_operator_or_kernel_does_it():
    operators = (
        "aten::scaled_dot_product_attention",  # calls one of these
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_attention_math",
        "aten::softmax",
    )
    assert summarise([event(name, 0, 1) for name in operators], "cpu", steps=1).fused_attention == 1
    kernels = (
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64> >(Flash_fwd_params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_2",
        "triton_per_fused__scaled_dot_product_flash_attention__to_copy_add_0",  # makes its operands ready
        "triton_red_fused__safe_softmax_add_arange_1",
    )
    found = [event(name, 0, 1, device_type=DeviceType.CUDA) for name in kernels]
    assert summarise(found, "cuda", steps=2).fused_attention == 2


def test_fused_attention_is_seen_in_eager_and_compiled_steps():
    q = torch.randn(2, 4, 64, 32)

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    def by_hand():
        return torch.softmax(q @ q.mT, -1) @ q

    compiled = torch.compile(attend, backend="eager")
    compiled()
    found = [read_profile(record_steps(step, "cpu"), "cpu").fused_attention for step in (attend, compiled, by_hand)]
    assert found == [1, 1, 0]
    torch.compiler.reset()


def test_kernels_that_belong_to_no_call_leave_coverage_unknown():
    assert summarise([event("compile_bench step", 0, 1)], "cuda", steps=1).covered is None


def test_the_rise_counts_from_the_lowest_point_before_it():
    assert largest_rise([]) == 0
    assert largest_rise([-100, 50, 30, -80, 20]) == 80
    assert largest_rise([10, -10, 40, -40]) == 40


def test_peak_memory_of_a_step_that_is_known():
    def step():
        first = torch.ones(1_000_000)  # 4 MB
        second = first + 1  # another 4
        del first
        return (second * 2).sum()  # the second time there are 8 at once

    assert peak_rise(step) == pytest.approx(8_000_000, rel=0.01)


def test_what_captured_graphs_keep_counts_although_the_allocator_calls_it_free(monkeypatch):
    segments = [
        {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}
        for pool, total, allocated in (((0, 0), 100, 40), ((0, 1), 20, 5), ([0, 1], 10, 0), ((3, 0), 7, 7))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert measuring.captured_bytes(Case("mlp", "cuda")) == 15 + 10
    assert measuring.captured_bytes(Case("mlp", "cpu")) == 0


def test_a_compiled_step_is_covered_and_an_eager_one_is_not():
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256))
    x = torch.randn(256, 256)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    found, eager = (read_profile(record_steps(partial(each, x), "cpu"), "cpu") for each in (compiled, model))
    assert 0 < found.covered <= 1  # how much depends on how busy the machine is
    assert eager.covered == 0
    assert eager.operators == 3
    torch.compiler.reset()


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_the_repeated_blocks_are_those_with_most_parameters():
    model = Blocks()
    assert repeated_blocks(model) == list(model.blocks)
    assert repeated_blocks(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))) == []


@pytest.mark.parametrize("scope", ["blocks", "nested"])
def test_every_block_keeps_its_own_weights(scope, monkeypatch):
    def compiler(module=None, **options):
        return original(module, backend="aot_eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compiler)
    # nested marks the class for good
    monkeypatch.setattr(torch.nn.Sequential, "forward", torch.nn.Sequential.forward)
    model, x = Blocks(), torch.randn(5, 4)
    with torch.no_grad():
        expected = model(x)
        actual = compile_case(model, Case("x", scope=scope))(x)
    torch.testing.assert_close(actual, expected)
    torch.compiler.reset()

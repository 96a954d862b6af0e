"""Facts that need a GPU: launches, library names, synchronisations, whole steps, the catalogue on CUDA."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from dispatcher_trace import Shims, Trace, assert_dispatch, installed, record
from dispatcher_trace.capture.profile import profiled
from dispatcher_trace.explain.operator_cost import operator_costs
from dispatcher_trace.measure import agreement
from dispatcher_trace.measure.programs import PROGRAMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[torch.Tensor]]:
    """Results of the training steps without shims."""
    for make in PROGRAMS.values():
        make("cuda")()
    return {name: make("cuda")() for name, make in PROGRAMS.items()}


@pytest.fixture(scope="module")
def refused() -> dict[tuple[str, str], str]:
    return agreement.refused("cuda")


@pytest.fixture(scope="module")
def shims(expected: dict[str, list[torch.Tensor]], refused: dict[tuple[str, str], str]) -> Iterator[Shims]:
    with installed("all") as shims:
        yield shims


def _product(shims: Shims) -> Trace:
    a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    a @ a  # the first call makes cuBLAS's workspace
    torch.cuda.synchronize()
    with record(shims) as t:
        a @ a
        torch.cuda.synchronize()
    return t


def test_a_launch_has_its_shape_and_resources(shims: Shims) -> None:
    t = _product(shims)
    kernels = [kernel for call in t.all_calls if call.operator == "aten::mm" for kernel in call.kernels]
    main = max(kernels, key=lambda kernel: kernel.seconds)
    assert main.library == "cuBLAS", main.name
    assert len(main.grid) == len(main.block) == 3
    assert main.registers is not None
    assert 0 < main.registers <= 255
    assert main.shared_memory is not None
    assert main.shared_memory > 0
    assert main.stream is not None
    first = next(call.hops[0] for call in t.all_calls if call.operator == "aten::mm")
    assert main.start_ns >= first.start_ns  # no kernel before its launch; clocks tied to within the shim's own time
    assert " (cuBLAS) grid " in t.to_markdown()


def test_perfetto_has_a_device_track(shims: Shims) -> None:
    events = _product(shims).to_perfetto()["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels
    assert all(event["dur"] > 0 and event["args"]["launched by"].startswith("aten::") for event in kernels)


def test_reading_a_value_waits_for_the_gpu(shims: Shims) -> None:
    x = torch.ones(8, device="cuda")
    with record(shims) as t:
        x.sum().item()
    (found,) = [item for item in t.findings if item.kind == "synchronisation"]
    assert found.cause == "aten::item"
    assert "waits for the GPU" in found.detail
    assert found.source.startswith("tests/test_gpu_facts.py:")


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x: x.cpu(), True),
        (lambda x: torch.empty(8).copy_(x), True),
        (lambda x: torch.empty(8).copy_(x, non_blocking=True), True),  # pageable memory: CUDA copies before it returns
        (lambda x: torch.empty(8, pin_memory=True).copy_(x), True),
        (lambda x: torch.empty(8, pin_memory=True).copy_(x, non_blocking=True), False),
        (lambda x: x.to("cpu", non_blocking=True), False),  # into memory that torch pins for it
        (lambda x: torch.empty_like(x).copy_(x), False),
    ],
)
def test_a_copy_to_the_host_waits(shims: Shims, function: Callable[[torch.Tensor], object], waits: bool) -> None:
    x = torch.ones(8, device="cuda")
    with record(shims) as t:
        function(x)
    torch.cuda.synchronize()
    assert sum(item.kind == "synchronisation" for item in t.findings) == waits


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        (lambda x: x.to("cuda"), True),
        (lambda x: x.pin_memory().to("cuda"), True),
        (lambda x: torch.empty(8, device="cuda").copy_(x), True),
        (lambda x: x.pin_memory().to("cuda", non_blocking=True), False),
    ],
)
def test_a_copy_to_the_gpu_waits_as_torch_itself_warns(
    shims: Shims, function: Callable[[torch.Tensor], object], waits: bool
) -> None:
    x = torch.ones(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert any("called a synchronizing" in str(warning.message) for warning in caught) == waits
    with record(shims) as t:
        function(x)
    torch.cuda.synchronize()
    assert sum(item.kind == "synchronisation" for item in t.findings) == waits


def test_a_transfer_inside_an_operator_is_a_hidden_copy_and_one_that_is_asked_for_is_none(shims: Shims) -> None:
    x, index = torch.ones(8, 8, device="cuda"), torch.tensor([0, 1])
    with record(shims) as t:
        x[index]
    assert any("moved to cuda:0" in item.detail for item in t.findings if item.kind == "copy")
    with record(shims) as t:
        index.to("cuda")
    assert not [item for item in t.findings if item.kind == "copy"]


def test_the_backward_on_autograds_thread_has_the_forwards_line(shims: Shims) -> None:
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    with record(shims) as t:
        (x @ x).sum().backward()
        torch.cuda.synchronize()
    backward = [call for call in t.all_calls if call.operator == "aten::mm" and call.hops[0].node]
    assert len(backward) == 2
    assert all(call.hops[0].thread.startswith("autograd worker") for call in backward)
    assert all(call.forward_source.startswith("tests/test_gpu_facts.py:") for call in backward)


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_steps_are_bit_equal(name: str, expected: dict[str, list[torch.Tensor]], shims: Shims) -> None:
    step = PROGRAMS[name]("cuda")
    with record(shims) as t:
        results = step()
    assert len(results) == len(expected[name])
    assert all(map(torch.equal, results, expected[name]))
    assert t.match is not None
    assert t.match.untied_kernels == 0
    assert any(hop.key == "AutocastCUDA" for hop in t.hops) == (name == "GPT step")


def test_the_catalogue_on_cuda(refused: dict[tuple[str, str], str], shims: Shims) -> None:
    measured = list(agreement.measure(shims, "cuda", refused))
    assert [(item.mode, item.entry, item.error) for item in measured if item.error] == []
    shares = {}
    for mode in agreement.MODES:
        items = [item for item in measured if item.mode == mode]
        shares[mode] = 1 - sum(len(item.disagreements) for item in items) / sum(item.calls for item in items)
    assert min(shares[mode] for mode in agreement.MODES if mode not in agreement.INSIDE_FUNCTORCH) >= 0.98
    assert min(shares[mode] for mode in agreement.INSIDE_FUNCTORCH) >= 0.90
    assert [found for item in measured for found in item.disagreements if not found.cause] == []


def test_costs_are_device_time(shims: Shims) -> None:
    a = torch.ones(512, 512, device="cuda")

    def program() -> torch.Tensor:
        return a @ a

    program()
    with profiled() as untraced:
        program()
    with record(shims) as trace:
        program()
    (first, *_) = operator_costs(untraced, trace.all_calls)
    assert first.operator == "aten::mm"
    assert first.share > 0.5


def test_assert_dispatch_on_cuda(shims: Shims) -> None:
    a = torch.ones(4, 4, device="cuda")
    assert_dispatch(torch.mm, "aten::mm", a, a, keys=["AutogradCUDA", "CUDA"], shims=shims)

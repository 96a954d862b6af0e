"""Single-stepping CPU kernels: the functions that it names, and that it changes no result."""

import signal

import pytest
import torch

from dispatcher_trace import Call, NativeStep, Shims, record
from dispatcher_trace.capture import native_step
from dispatcher_trace.capture.native_step import stepper, symbols

pytestmark = pytest.mark.skipif(bool(native_step.unavailable()), reason=native_step.unavailable() or "available")


def _steps(calls: list[Call]) -> dict[str, NativeStep]:
    return {
        hop.operator: hop.native_step
        for top in calls
        for call in top.walk()
        for hop in call.hops
        if hop.native_step is not None
    }


def test_add_names_its_vectorised_loop(shims: Shims) -> None:
    a, b = torch.ones(16), torch.ones(16)
    expected = a + b
    with record(shims, kernels=False, native=True) as t:
        result = a + b
    assert torch.equal(result, expected)
    step = _steps(t.calls)["aten::add.Tensor"]
    assert not step.cut
    assert 500 < step.instructions < 100_000
    assert step.frames[0].function.endswith("wrapper_CPU_add_Tensor")
    loop = next(frame for frame in step.frames if frame.function.endswith("::add_kernel"))
    assert loop.file.endswith((".DEFAULT.cpp", ".AVX2.cpp", ".AVX512.cpp", ".DEFAULT", ".AVX2", ".AVX512"))
    assert "native step: " in t.to_markdown()
    assert shims.stepper is None


def test_a_matrix_product_names_its_library_past_the_operators_it_calls(shims: Shims) -> None:
    a = torch.randn(16, 16)
    with record(shims, kernels=False, native=True) as t:
        a @ a
    step = _steps(t.calls)["aten::mm"]
    names = [frame.function for frame in step.frames]
    assert any("gemm" in name for name in names), names
    assert [call.operator for call in t.all_calls][:2] == ["aten::matmul", "aten::mm"]


def test_each_kind_is_stepped_once(shims: Shims) -> None:
    a = torch.ones(4)
    with record(shims, kernels=False, native=True) as t:
        a.exp()
        a.exp()
        torch.ones(5).exp()
    stepped = [hop.native_step is not None for hop in t.hops if hop.operator == "aten::exp" and hop.key == "CPU"]
    assert stepped == [True, False, True]


def test_an_exception_passes_and_the_signal_handler_is_restored(shims: Shims) -> None:
    before = signal.getsignal(signal.SIGTRAP)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), record(shims, kernels=False, native=True):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert signal.getsignal(signal.SIGTRAP) == before
    with record(shims, kernels=False, native=True) as t:
        torch.ones(3).exp()
    assert "aten::exp" in _steps(t.calls)


def test_a_machine_that_cannot_step_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native_step.unavailable().startswith("single-stepping needs a C compiler, no 'no-such-compiler' on PATH")
    monkeypatch.setattr(stepper.platform, "machine", lambda: "aarch64")
    assert native_step.unavailable() == "single-stepping needs x86-64 Linux, this is aarch64 linux"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::(anonymous namespace)::f<float, (int)2>(at::Tensor const&)",
            "at::native::(anonymous namespace)::f",
        ),
        ("at::native::structured_mm_out_cpu::impl(at::Tensor const&)", "at::native::structured_mm_out_cpu::impl"),
        ("dnnl::impl::cpu::x64::t<(a)1>::execute(ctx const&) const", "dnnl::impl::cpu::x64::t::execute"),
        ("bool at::native::f(int) [clone .isra.0]", "at::native::f"),
        ("sgemm_", "sgemm_"),
        ("", "code generated at run time"),
    ],
)
def test_names_are_shortened(name: str, short: str) -> None:
    assert stepper._short(symbols.Symbol(name, "", "")) == short


def test_addresses_of_this_process() -> None:
    process = symbols.Process()
    assert process.symbol_at(0).library == ""
    libc = process.of_library("libc.so") or process.of_library("libc-")
    assert process.symbol_at(libc[0].low + 64).library.startswith("libc")

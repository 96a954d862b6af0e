"""Traces on a GPU: keys, and the names of kernels."""

from collections.abc import Iterator

import pytest
import torch

from dispatcher_trace import Shims, Trace, installed, record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
]


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    with installed("all") as shims:
        yield shims


def _inputs(dtype: torch.dtype, *, requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).to("cuda", dtype) for _ in range(2))
    return a.requires_grad_(requires_grad), b.requires_grad_(requires_grad)


def _kernels(t: Trace, operator: str) -> list[str]:
    return [kernel.name for call in t.all_calls if call.operator == operator for kernel in call.kernels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add(dtype: torch.dtype, shims: Shims) -> None:
    a, b = _inputs(dtype)
    with record(shims) as t:
        a + b
        torch.cuda.synchronize()
    add = next(call for call in t.calls if call.operator == "aten::add.Tensor")
    assert add.path == ("AutogradCUDA", "CUDA")
    assert add.hops[-1].native == "structured_ufunc_add_CUDA"
    (kernel,) = add.kernels
    assert kernel.name
    assert all(size > 0 for size in (*kernel.grid, *kernel.block))
    assert len(kernel.grid) == len(kernel.block) == 3
    assert kernel.seconds > 0


def test_bf16_matmul_names_its_kernel(shims: Shims) -> None:
    a, b = _inputs(torch.bfloat16)
    with record(shims) as t:
        a @ b
        torch.cuda.synchronize()
    assert [call.operator for call in t.calls if call.operator == "aten::matmul"]
    names = _kernels(t, "aten::mm")
    assert names
    assert all(names)
    assert t.match is not None
    assert t.match.untied_kernels == 0


def test_autocast_comes_before_autograd(shims: Shims) -> None:
    a, b = _inputs(torch.float32, requires_grad=True)
    with record(shims) as t, torch.autocast("cuda", torch.bfloat16):
        a @ b
    assert [hop.key for hop in t.calls[0].main_path()] == ["AutocastCUDA", "AutogradCUDA", "AutogradCUDA", "CUDA"]


def test_prediction_holds(shims: Shims) -> None:
    a, b = _inputs(torch.float32, requires_grad=True)
    with record(shims) as t:
        (a @ b + b).sum().backward()
    agreed, positions = t.agreement
    wrong = [(call.operator, call.path, call.missed) for call in t.all_calls if call.missed]
    assert agreed == positions, wrong


def test_a_trace_that_raises_has_its_kernels(shims: Shims) -> None:
    a, _ = _inputs(torch.float32)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), record(shims) as t:
        (a + a) @ a[:3]
    assert _kernels(t, "aten::add.Tensor")

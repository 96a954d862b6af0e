"""The derivatives in C++: their use, their errors, and the fallback if they cannot be compiled."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python

import custom_ops
import native_build
from custom_ops.builds import autograd_nodes, loading
from custom_ops.builds.operator_library import CSRC
from custom_ops.operators.flash_attention import reference

ops = torch.ops.custom_ops
needs_nodes = pytest.mark.usefixtures("nodes")


@pytest.fixture
def nodes() -> None:
    if custom_ops.load().autograd != "compiled nodes":
        pytest.skip("the derivatives of the build in use are Python's")


def test_python_and_cpp_name_the_same_operators() -> None:
    source = (CSRC / "autograd" / "nodes.cpp").read_text()
    assert set(re.findall(r'library\.impl\("(\w+)"', source)) == autograd_nodes.OPERATORS


@needs_nodes
def test_every_small_operator_has_its_node() -> None:
    x, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    results = {
        "VectorAdd": ops.vector_add(x, x),
        "Axpb": ops.axpb(x, x, 2.0),
        "Scale": ops.scale(x),
        "BiasGelu": ops.bias_gelu(x, bias),
        "FlashAttention": ops.flash_attention(*[x.view(1, 1, 3, 4)] * 3)[1],
    }
    for name, result in results.items():
        assert result.grad_fn is not None
        assert result.grad_fn.name() == f"CustomOps{name}Backward"
        with torch.no_grad():
            assert not ops.scale(x).requires_grad


@needs_nodes
def test_functional_gradients_are_those_of_backward() -> None:
    x, bias = torch.randn(3, 4), torch.randn(4)
    functional = torch.func.grad(lambda x: ops.bias_gelu(x, bias).sum())(x)
    leaf = x.clone().requires_grad_()
    (direct,) = torch.autograd.grad(torch.nn.functional.gelu(leaf + bias, approximate="tanh").sum(), leaf)
    torch.testing.assert_close(functional, direct)


@needs_nodes
def test_attention_under_torch_func_with_features() -> None:
    q, k, v, sinks, mask = (torch.randn(*s, dtype=torch.float64) for s in (*[(1, 2, 5, 8)] * 3, (2,), (1, 1, 5, 5)))

    def of(call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
        def loss(*operands: torch.Tensor) -> torch.Tensor:
            out, lse = call(*operands)
            return out.square().sum() + lse.sin().sum()

        return loss

    def kernel(q: Any, k: Any, v: Any, sinks: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return custom_ops.flash_attention(q, k, v, True, softcap=4.0, sinks=sinks, attn_mask=mask)

    def formula(q: Any, k: Any, v: Any, sinks: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(q, k, v, True, None, softcap=4.0, sinks=sinks, bias=mask)

    places = (0, 1, 2, 3, 4)
    wanted = torch.func.grad(of(formula), places)(q, k, v, sinks, mask)
    torch.testing.assert_close(torch.func.grad(of(kernel), places)(q, k, v, sinks, mask), wanted)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks, mask)]
    torch.testing.assert_close(torch.autograd.grad(of(kernel)(*leaves), leaves), wanted)


@needs_nodes
def test_what_attention_keeps_is_freed_with_its_results() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    q = Same.apply(torch.randn(1, 1, 4, 8, requires_grad=True))  # type: ignore[no-untyped-call]
    before = weakref.ref(q.grad_fn)
    out, lse = ops.flash_attention(q, q, q)
    del q, out, lse
    assert before() is None


@needs_nodes
def test_only_the_gradient_that_is_asked_for() -> None:
    x, b = torch.randn(3), torch.randn(3, requires_grad=True)
    ops.axpb(x, b, 2.0).sum().backward()
    assert x.grad is None
    assert torch.equal(b.grad, torch.ones(3))  # type: ignore[arg-type]
    ops.bias_gelu(x, b).sum().backward()
    assert x.grad is None


@needs_nodes
def test_an_operand_changed_before_the_backward_pass_is_refused() -> None:
    x = torch.randn(3, 4, requires_grad=True).mul(1.0)
    y = ops.bias_gelu(x, torch.zeros(4))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_nodes
def test_forward_mode_is_refused_and_not_dropped() -> None:
    x = torch.randn(3)
    for scale in (ops.scale, custom_ops.scale):
        with pytest.raises(
            NotImplementedError, match="custom_ops::scale has no forward-mode derivative; use reverse mode"
        ):
            torch.func.jvp(scale, (x,), (x,))


def test_python_serves_where_the_environment_asks_for_it() -> None:
    """The derivatives are written twice; those in C++ pass the same checks in test_operators and test_vector_add."""
    code = (
        "import torch, custom_ops as ops\n"
        "x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()\n"
        "b = torch.ones(3, dtype=torch.float64, requires_grad=True)\n"
        "for call, operands in ((ops.vector_add, (x, x)), (lambda x, y: ops.axpb(x, y, 2.0), (x, x)),\n"
        "                       (ops.scale, (x,)), (ops.bias_gelu, (x, b))):\n"
        "    assert torch.autograd.gradgradcheck(call, operands) and torch.autograd.gradcheck(call, operands)\n"
        "print(ops.load().autograd, ops.build_info().missing)\n"
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, loading.AUTOGRAD_VARIABLE: "python"}
    answer = warm_python.run(["-c", code], env=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("Python {")
    assert "'derivatives in C++': 'CUSTOM_OPS_AUTOGRAD is python'" in answer.stdout


def test_another_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loading.AUTOGRAD_VARIABLE, "c++")
    with pytest.raises(native_build.LibraryError, match=r"CUSTOM_OPS_AUTOGRAD: expected nodes or python, got 'c\+\+'"):
        loading.build_info()


def test_a_wheel_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    library = custom_ops.load().file
    monkeypatch.delenv(loading.AUTOGRAD_VARIABLE, raising=False)
    monkeypatch.setenv(loading.VARIABLE, str(library))
    monkeypatch.setattr(autograd_nodes, "cached", lambda: None)
    monkeypatch.setattr(native_build, "missing_cxx", lambda: None)
    found = loading.build_info()
    assert found.autograd == "Python"
    assert found.missing["derivatives in C++"].endswith("(custom-ops build autograd)")
    monkeypatch.setattr(autograd_nodes, "cached", lambda: Path("nodes.so"))
    assert loading.build_info().autograd == "compiled nodes"


def test_nodes_that_do_not_compile_leave_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise native_build.BuildError("cannot build custom_ops_autograd: no member named 'set_history'")

    monkeypatch.setattr(autograd_nodes, "build", fail)
    monkeypatch.delenv(loading.AUTOGRAD_VARIABLE, raising=False)
    asked = loading.BuildInfo("wheel", None, Path("library.so"), {}, "compiled nodes")
    found, library = loading._load_nodes(asked)
    assert library is None
    assert found.autograd == "Python"
    assert "set_history" in found.missing["derivatives in C++"]
    monkeypatch.setenv(loading.AUTOGRAD_VARIABLE, "nodes")
    with pytest.raises(native_build.BuildError, match="set_history"):
        loading._load_nodes(asked)


@needs_nodes
def test_a_graph_of_many_nodes_is_freed_without_recursion() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(100_000):
        y = ops.scale(y, 1.0)
    assert y.item() == 1.0
    del y

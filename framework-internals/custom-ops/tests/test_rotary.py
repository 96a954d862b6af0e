"""Rotary positions, on a CPU and on a GPU: results, layouts, derivatives, lowerings, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import custom_ops
from custom_ops.operators.calls import calls
from custom_ops.operators.checks import wide
from custom_ops.operators.rotary import formula
from lowering import in_graph

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def tables(tokens: int, half: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float64."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(
        cos.double(), sin.double()
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), -1)


def layouts(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    batch, tokens, heads, size = shape
    fused = drawn((batch, tokens, 3, heads, size), dtype, device)
    return {
        "contiguous": drawn(shape, dtype, device),
        "a slice of a projection": fused[:, :, 1],
        "heads before tokens": drawn((batch, heads, tokens, size), dtype, device).transpose(1, 2),
        "not aligned": drawn((math.prod(shape) + 1,), dtype, device)[1:].view(shape),
        "strides in a head": drawn((batch, tokens, size, heads), dtype, device).transpose(2, 3),
    }


@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 1, 1, 2), (3, 7, 2, 36), (2, 3, 40, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_in_every_layout(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    cos, sin = tables(shape[1], shape[3] // 2, wide(dtype), device)
    for name, x in layouts(shape, dtype, device).items():
        found = custom_ops.rotary(x, cos, sin)
        assert (found.shape, found.dtype, found.is_contiguous()) == (x.shape, dtype, True), name
        # Two products and a sum, each rounded in the wide dtype, of a vector that is no longer than √2 of the larger
        # operand in absolute value on either side; then one rounding of the result.
        half = shape[3] // 2
        size = torch.hypot(x[..., :half].double(), x[..., half:].double()).repeat(1, 1, 1, 2)
        wanted = exact(x, cos, sin)
        bound = 3 * torch.finfo(wide(dtype)).eps * size + torch.finfo(dtype).eps * wanted.abs()
        assert ((found.double() - wanted).abs() <= bound).all(), name


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("pairs", [8, 16, 5, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_forms_of_positions_and_pairs(
    dtype: torch.dtype, pairs: int, per_batch: bool, interleaved: bool, device: str
) -> None:
    shape = (2, 5, 3, 32)
    for name, x in layouts(shape, dtype, device).items():
        cos, sin = tables(20, pairs, wide(dtype), device)
        positions = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 19, 3, 0]], device=device)
        cos, sin = (x[positions] if per_batch else x[:5] for x in (cos, sin))
        leaf = x.detach().requires_grad_()
        found = custom_ops.rotary(leaf, cos, sin, interleaved=interleaved)
        y = x.double()[..., : 2 * pairs]
        first, second = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :pairs], y[..., pairs:])
        turned = torch.complex(first, second) * torch.complex(cos.double(), sin.double()).unsqueeze(-2)
        both = (turned.real, turned.imag)
        wanted = torch.cat(
            [torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), x[..., 2 * pairs :].double()],
            -1,
        )
        size = 8 * torch.finfo(wide(dtype)).eps + torch.finfo(dtype).eps
        assert ((found.double() - wanted).abs() <= size * x.double().abs().max() * 2).all(), name
        assert torch.equal(found[..., 2 * pairs :], x[..., 2 * pairs :]), name
        # The derivative turns back: a rotation keeps lengths.
        back = torch.autograd.grad(found, leaf, found)[0]
        torch.testing.assert_close(back, x, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
        torch.testing.assert_close(
            formula(x, cos, sin, interleaved), found, rtol=4 * torch.finfo(dtype).eps, atol=1e-12
        )


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (2, 4, 2, 0)], ids=str)
def test_nothing_to_rotate(shape: tuple[int, ...], device: str) -> None:
    cos, sin = tables(shape[1], shape[3] // 2, torch.float32, device)
    x = torch.ones(shape, device=device, requires_grad=True)
    found = custom_ops.rotary(x, cos, sin)
    assert found.shape == x.shape
    found.sum().backward()


def test_gradients_of_every_order(device: str) -> None:
    cos, sin = tables(3, 4, torch.float64, device)
    x = drawn((2, 3, 2, 8), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: custom_ops.rotary(x, cos, sin), x)
    assert torch.autograd.gradgradcheck(lambda x: custom_ops.rotary(x, cos, sin).square(), x)


def test_the_gradient_is_the_inverse_rotation_bit_for_bit(device: str) -> None:
    cos, sin = tables(5, 16, torch.float32, device)
    x = drawn((2, 5, 3, 32), torch.bfloat16, device).requires_grad_()
    gradient = drawn((2, 5, 3, 32), torch.bfloat16, device, 1)
    custom_ops.rotary(x, cos, sin).backward(gradient)
    assert x.grad is not None
    assert torch.equal(x.grad, calls.rotary(gradient, cos, -sin))
    assert torch.equal(x.grad, calls.rotary(gradient, cos, sin, True))


@pytest.mark.parametrize("over_tables", [False, True])
def test_vmap(over_tables: bool, device: str) -> None:
    cos, sin = tables(5, 4, torch.float32, device)
    x = drawn((3, 2, 5, 2, 8), torch.float32, device)
    several = torch.stack([cos, sin, cos]) if over_tables else cos
    found = torch.vmap(custom_ops.rotary, in_dims=(0, 0 if over_tables else None, None))(x, several, sin)
    for index in range(3):
        assert torch.equal(found[index], custom_ops.rotary(x[index], several[index] if over_tables else cos, sin))


@pytest.mark.parametrize("lowering", ["formula", "kernel"])
def test_compiles_whole_with_gradients(lowering: Any, device: str) -> None:
    cos, sin = tables(5, 4, torch.float32, device)
    x = drawn((2, 5, 2, 8), torch.float32, device).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return custom_ops.rotary(x, cos, sin, lowering=lowering).exp().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(function(x), x)[0] for function in (compiled, loss))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_opcheck(device: str) -> None:
    cos, sin = tables(3, 4, torch.float32, device)
    x = drawn((2, 3, 2, 8), torch.float32, device).requires_grad_()
    torch.library.opcheck(torch.ops.custom_ops.rotary.default, (x, cos, sin))
    torch.library.opcheck(torch.ops.custom_ops.rotary.default, (x, cos, sin, True))


def test_the_formula_is_the_models(device: str) -> None:
    from torch_baseline.model import rotate

    cos, sin = tables(5, 16, torch.float32, device)
    x = drawn((2, 5, 3, 32), torch.bfloat16, device)
    assert torch.equal(formula(x, cos, sin), rotate(x, cos, sin))


def test_the_default_lowering_is_the_formula() -> None:
    cos, sin = tables(5, 4, torch.float32, "cpu")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(custom_ops.rotary, fullgraph=True, backend=backend)(torch.ones(2, 5, 2, 8), cos, sin)
    (graph,) = graphs
    assert not any("custom_ops" in str(node.target) for node in graph.graph.nodes)
    assert in_graph(graph) == {"rotary": {"formula"}}

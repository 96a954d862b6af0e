"""swiglu and geglu on a CPU and on a GPU: results, derivatives, registration, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
import lowering
from custom_ops.operators.checks import DTYPES, wide

from .activations import GELU, GELU_TANH, SILU, Activation

FORMS: dict[str, tuple[Callable[..., Tensor], Activation]] = {
    "swiglu": (custom_ops.swiglu, SILU),
    "geglu": (custom_ops.geglu, GELU),
    "geglu by tanh": (lambda gate, up=None: custom_ops.geglu(gate, up, approximate="tanh"), GELU_TANH),
}
SHAPES = [(1,), (3, 7), (2, 3, 65), (40, 256), (0, 6), (5, 0), ()]


def operands(dtype: torch.dtype, device: str, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    packed = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64).mul(4).to(device, dtype)
    return packed, torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("layout", ["packed", "two tensors", "halves in place"])
def test_against_float64(name: str, dtype: torch.dtype, layout: str, device: str) -> None:
    for shape in SHAPES[:-1]:
        packed, grad = operands(dtype, device, *shape)
        leaf = packed.requires_grad_()
        halves = leaf.chunk(2, -1)
        given = (leaf,) if layout == "packed" else halves
        if layout == "two tensors":
            given = tuple(half.contiguous() for half in halves)
        check(name, leaf, given, grad)


def check(name: str, leaf: Tensor, given: tuple[Tensor, ...], grad: Tensor) -> None:
    op, activation = FORMS[name]
    dtype = leaf.dtype
    y = op(*given)
    (gradient,) = torch.autograd.grad(y, leaf, grad)
    assert y.is_contiguous()
    assert y.dtype == gradient.dtype == dtype
    (gate, up), wide_grad = leaf.detach().double().chunk(2, -1), grad.double()
    value, slope = activation.value(gate), activation.slope(gate)
    # One rounding to the dtype, and the arithmetic's own error, in float64 that of the reference too. In bfloat16 the
    # tanh form takes a gate of 13 bits, twice in a slope, or cubics with the error that stands in bias_gelu/gelu.h.
    unit, wide_unit = torch.finfo(dtype).eps, torch.finfo(wide(dtype)).eps
    short = dtype == torch.bfloat16 and "tanh" in name
    own = activation.units(gate) * wide_unit * (2 if dtype == torch.float64 else 1)
    of_value = (own + short * 2.0**-12.8) * value.abs() + short * 2.0**-24
    of_slope = (own + short * 2.0**-11.8) * activation.slope_size(gate) + short * 2.0**-19
    lost = 2 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 2.0**-24 * wide_unit
    for ours, exact, error in (
        (y, value * up, of_value * up.abs()),
        (gradient.chunk(2, -1)[0], slope * wide_grad * up, of_slope * (wide_grad * up).abs()),
        (gradient.chunk(2, -1)[1], value * wide_grad, of_value * wide_grad.abs()),
    ):
        assert ((ours.double() - exact).abs() <= unit / 2 * exact.abs() + error + lost).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_against_forty_digits(name: str, dtype: torch.dtype, device: str) -> None:
    """What a reference in float64 cannot decide for a kernel in float64."""
    op, activation = FORMS[name]
    gate = torch.cat((torch.linspace(-13, 13, 261), torch.tensor([-1e-3, 1e-9, -0.7517, -1.2784])))
    gate = gate.to(device, dtype).requires_grad_()
    y = op(gate, torch.ones_like(gate))
    (slope,) = torch.autograd.grad(y.sum(), gate)
    with mpmath.workdps(40):
        for u, *ours in torch.stack((gate, y, slope), 1).tolist():
            u = mpmath.mpf(u)
            value, units = activation.value(u, mpmath.mp), activation.units(u, mpmath.mp)
            of_each = units * torch.finfo(dtype).eps
            lost = (
                2 * units * torch.finfo(dtype).tiny
            )  # a power that underflows, of which a slope is at most 3 exponents
            assert abs(ours[0] - value) <= of_each * abs(value) + lost
            error = of_each * activation.slope_size(u, mpmath.mp) + lost
            assert abs(ours[1] - activation.slope(u, mpmath.mp)) <= error


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_out(name: str, dtype: torch.dtype, device: str) -> None:
    gate = torch.tensor([3e4, -3e4, 100, -100, torch.inf, torch.nan], dtype=dtype, device=device).requires_grad_()
    y = FORMS[name][0](gate, torch.ones_like(gate))
    (slope,) = torch.autograd.grad(y, gate, torch.ones_like(y))
    assert torch.allclose(y[:4], gate[:4].clamp(min=0), atol=1e-30)
    assert torch.allclose(slope[:5], (gate[:5] > 0).to(dtype), atol=1e-30)
    assert y[4] == torch.inf
    assert y[5].isnan()
    assert slope[5].isnan()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_gradcheck_twice(name: str, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2 - packed)]
    assert torch.autograd.gradcheck(FORMS[name][0], given)
    assert torch.autograd.gradgradcheck(FORMS[name][0], given)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_operand_alone_may_need_a_gradient(wanted: int) -> None:
    packed, grad = operands(torch.float32, "cpu", 3, 5)
    given = [half.contiguous() for half in packed.chunk(2, -1)]
    every = torch.autograd.grad(custom_ops.swiglu(*(x.requires_grad_() for x in given)), given, grad)
    given = [x.detach().requires_grad_(place == wanted) for place, x in enumerate(given)]
    assert torch.equal(torch.autograd.grad(custom_ops.swiglu(*given), given[wanted], grad)[0], every[wanted])


def test_rows_that_do_not_lie_at_one_distance_are_copied() -> None:
    packed, _ = operands(torch.float32, "cpu", 4, 6, 8)
    gate, up = packed.chunk(2, -1)
    expected = F.silu(gate) * up
    for of in (lambda x: x.transpose(0, 1), lambda x: x.transpose(1, 2), lambda x: x[::2], lambda x: x[:, :, ::2]):
        torch.testing.assert_close(custom_ops.swiglu(of(gate), of(up)), of(expected))
    one = gate[0, 0].expand(5, 8)  # all rows at one place
    torch.testing.assert_close(custom_ops.swiglu(one, one), F.silu(one) * one)


@pytest.mark.parametrize("shape", [(4, 1, 8), (1, 6, 8), (4, 1, 1, 8), (1, 6, 1, 8)], ids=str)
def test_rows_that_are_repeated_within_others(shape: tuple[int, ...]) -> None:
    """As of a gate for each sequence and not for each token; beyond the repeated rows lies memory of others."""
    packed, grad = operands(torch.float64, "cpu", 4, 6, *shape[3:], 8)
    few = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    gate, up = few.expand_as(grad), packed.chunk(2, -1)[0]
    own, peer = custom_ops.swiglu(gate, up), F.silu(gate) * up
    torch.testing.assert_close(own, peer)
    torch.testing.assert_close(*(torch.autograd.grad(y, few, grad)[0] for y in (own, peer)))
    torch.testing.assert_close(custom_ops.geglu(gate), F.gelu(gate[..., :4]) * gate[..., 4:])


def arguments(name: str, packed: bool) -> tuple[Any, ...]:
    both, _ = operands(torch.float32, "cpu", 3, 5)
    given = (both, None) if packed else both.chunk(2, -1)
    return (*given, True) if name == "geglu" else given


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_opcheck(name: str, needed: bool, packed: bool) -> None:
    given = (x.requires_grad_(needed) if isinstance(x, Tensor) else x for x in arguments(name, packed))
    torch.library.opcheck(getattr(torch.ops.custom_ops, name).default, tuple(given))
    if not needed:
        backward = getattr(torch.ops.custom_ops, f"{name}_backward").default
        torch.library.opcheck(backward, (torch.ones(3, 5), *arguments(name, packed)))


@pytest.mark.parametrize(("chosen", "packed"), [("formula", True), ("kernel", False)])
@pytest.mark.parametrize("name", FORMS)
def test_both_lowerings_compile_whole_with_gradients(name: str, packed: bool, chosen: lowering.Choice) -> None:
    op = FORMS[name][0]
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(lambda *given: op(*given), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 4, 9):
        x, grad = operands(torch.float64, "cpu", rows, 5)
        given = [x.requires_grad_()] if packed else [half.contiguous().requires_grad_() for half in x.chunk(2, -1)]
        with lowering.choose(chosen):
            results = compiled(*given), op(*given)
        torch.testing.assert_close(*results)
        ours, others = (torch.autograd.grad(result, given, grad) for result in results)
        torch.testing.assert_close(ours, others)
    assert len(graphs) == 1
    assert lowering.in_graph(graphs[0]) == {name.split()[0]: {chosen}}


@pytest.mark.parametrize("packed", [True, False])
def test_autocast_and_vmap(packed: bool) -> None:
    x, _ = operands(torch.float32, "cpu", 3, 4, 5)
    given = (x,) if packed else x.chunk(2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        found = custom_ops.swiglu(*given)
    assert torch.equal(found, custom_ops.swiglu(*(x.bfloat16() for x in given)))
    expected = custom_ops.geglu(*given)
    assert torch.equal(torch.vmap(custom_ops.geglu)(*given), expected)
    if not packed:
        mapped = torch.vmap(custom_ops.swiglu, (0, None))(given[0], given[1][0])
        assert torch.equal(mapped, torch.stack([custom_ops.swiglu(gate, given[1][0]) for gate in given[0]]))
    found = torch.func.grad(lambda *given: custom_ops.swiglu(*given).sum())(*given)
    leaf = given[0].detach().requires_grad_()
    # torch.func records a graph, so the derivative is torch's formula.
    torch.testing.assert_close(found, torch.autograd.grad(custom_ops.swiglu(leaf, *given[1:]).sum(), leaf)[0])

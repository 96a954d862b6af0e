"""Products of matrices on a CPU and the linear layer: results, layouts, derivatives, lowerings, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
from custom_ops.operators.linear import FEWEST_ROWS
from lowering import in_graph

DTYPES = [torch.float32, torch.float64]
# Rows, columns and depth around a tile (6 rows, up to 64 columns), a sum in registers (176) and a block of rows (480).
SHAPES = [(1, 1, 1), (6, 64, 16), (7, 65, 177), (50, 130, 353), (61, 3, 1025), (500, 31, 33), (16, 300, 2)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layouts(rows: int, columns: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    return {
        "contiguous": drawn(rows, columns, dtype=dtype, seed=seed),
        "transposed": drawn(columns, rows, dtype=dtype, seed=seed).t(),
        "a slice": drawn(rows, columns + 3, dtype=dtype, seed=seed)[:, 3:],
        "every third": drawn(rows, 3 * columns, dtype=dtype, seed=seed)[:, ::3],
        "one row, repeated": drawn(1, columns, dtype=dtype, seed=seed).expand(rows, columns),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_in_every_layout(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    for name_a, a in layouts(rows, depth, dtype, 0).items():
        for name_b, b in layouts(depth, columns, dtype, 1).items():
            found = torch.ops.custom_ops.mm(a, b)
            assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, columns), dtype, True)
            wanted, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            # A sum of n products has an error of n roundings at most (Higham, 2002, section 3.1); the reference in
            # float64 has as many.
            bound = (1 + (dtype == torch.float64)) * depth * torch.finfo(dtype).eps / 2 * size * 1.01
            assert ((found.double() - wanted).abs() <= bound).all(), (name_a, name_b)


def test_threads_change_no_bit() -> None:
    threads = torch.get_num_threads()
    a, b = drawn(100, 400), drawn(400, 200, seed=1)
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found += [torch.ops.custom_ops.mm(a, b), torch.ops.custom_ops.mm(b.t(), a.t()).t()]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found[::2])
    assert all(torch.equal(each, found[1]) for each in found[1::2])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_stay_in_their_row(value: float) -> None:
    a, b = drawn(20, 40), drawn(40, 70, seed=1)
    a[3, 5] = value
    found = torch.ops.custom_ops.mm(a, b)
    torch.testing.assert_close(found, a @ b, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert not found[3].isfinite().any()
    assert found[:3].isfinite().all()
    assert found[4:].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    assert torch.equal(torch.ops.custom_ops.mm(drawn(rows, depth), drawn(depth, columns)), torch.zeros(rows, columns))


def test_gradients_of_every_order() -> None:
    x = drawn(17, 5, dtype=torch.float64).requires_grad_()
    weight = drawn(3, 5, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(custom_ops.linear, (x, weight))
    assert torch.autograd.gradgradcheck(custom_ops.linear, (x, weight))
    b = drawn(5, 3, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(torch.ops.custom_ops.mm, (x, b))
    assert torch.autograd.gradgradcheck(torch.ops.custom_ops.mm, (x, b))


def test_the_gradient_of_a_weight_lies_as_the_weight() -> None:
    weight = drawn(30, 20).requires_grad_()
    (gradient,) = torch.autograd.grad(custom_ops.linear(drawn(4, 16, 20), weight).sum(), weight)
    assert gradient.is_contiguous()


def test_only_wanted_gradients_are_computed() -> None:
    x, weight = drawn(32, 20), drawn(30, 20).requires_grad_()
    y = custom_ops.linear(x, weight)
    with torch.profiler.profile() as profile:
        y.sum().backward()
    assert [event.count for event in profile.key_averages() if event.key == "custom_ops::mm"] == [1]


def test_the_layer_drops_into_a_model() -> None:
    layer, peer = custom_ops.Linear(20, 30), torch.nn.Linear(20, 30)
    layer.load_state_dict(peer.state_dict())
    x = drawn(2, 16, 20)
    torch.testing.assert_close(layer(x), peer(x))
    for some, others in zip(
        torch.autograd.grad(layer(x).sum(), list(layer.parameters())),
        torch.autograd.grad(peer(x).sum(), list(peer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(some, others)


@pytest.mark.parametrize("case", ["few rows", "a vector", "float16", "autocast"])
def test_elsewhere_it_is_torchs_linear(case: str) -> None:
    shape = {"few rows": (FEWEST_ROWS - 1, 8), "a vector": (8,)}.get(case, (FEWEST_ROWS, 8))
    dtype = torch.float16 if case == "float16" else torch.float32
    x, weight = drawn(*shape, dtype=dtype), drawn(4, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), torch.profiler.profile() as profile:
        found = custom_ops.linear(x, weight)
        assert torch.equal(found, F.linear(x, weight))
        layer, peer = (kind(8, 4, dtype=dtype) for kind in (custom_ops.Linear, torch.nn.Linear))
        layer.load_state_dict(peer.state_dict())
        of_layer = layer(x)
        assert torch.equal(of_layer, peer(x))
    assert found.dtype == of_layer.dtype == (torch.bfloat16 if case == "autocast" else dtype)
    assert not any(event.key == "custom_ops::mm" for event in profile.key_averages())


def test_an_exported_program_takes_any_number_of_rows() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = custom_ops.Linear(8, 6), torch.nn.Parameter(torch.ones(5, 6))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return custom_ops.linear_cross_entropy(self.layer(x), self.weight, targets, mode="least_memory")

    model, rows = Classifier(), torch.export.Dim("rows", min=FEWEST_ROWS + 1, max=64)
    shapes = {"x": {0: rows}, "targets": {0: rows}}
    arguments = drawn(20, 8, dtype=torch.float32), torch.arange(20) % 5
    program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False).module()
    others = drawn(33, 8, dtype=torch.float32), torch.arange(33) % 5
    torch.testing.assert_close(program(*others), model(*others))


@pytest.mark.gpu
def test_on_a_gpu_it_is_torchs_linear() -> None:
    x, weight = drawn(32, 8).cuda(), drawn(4, 8).cuda()
    assert torch.equal(custom_ops.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("over_b", [False, True])
def test_vmap(over_b: bool) -> None:
    a, b = drawn(3, 5, 4), drawn(3, 4, 2) if over_b else drawn(4, 2)
    found = torch.vmap(torch.ops.custom_ops.mm.default, in_dims=(0, 0 if over_b else None))(a, b)
    for index in range(3):
        assert torch.equal(found[index], torch.ops.custom_ops.mm(a[index], b[index] if over_b else b))


@pytest.mark.parametrize("lowering", ["formula", "kernel", None])
def test_compiles_whole_with_gradients(lowering: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    x, weight = drawn(2, 8, 20).requires_grad_(), drawn(30, 20, seed=1).requires_grad_()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return custom_ops.linear(x, weight, lowering=lowering).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradients = torch.autograd.grad(compiled(x, weight), (x, weight))
    rows, w = x.detach().double().flatten(0, 1), weight.detach().double()
    y, size = rows @ w.t(), rows.abs() @ w.abs().t()
    # d(sum of y²) is 2 y · weight and 2 yᵀ · x. An error of y by 20 roundings goes through the second product, whose
    # own sums have as many as their terms (Higham, 2002, section 3.1), and the factor 2 is exact.
    unit = torch.finfo(torch.float32).eps / 2 * 1.01
    wanted = (2 * y @ w, 2 * y.t() @ rows)
    bounds = (
        2 * unit * (20 * size @ w.abs() + 30 * y.abs() @ w.abs()),
        2 * unit * (20 * size.t() @ rows.abs() + 16 * y.t().abs() @ rows.abs()),
    )
    for gradient, exact, bound in zip(gradients, wanted, bounds, strict=True):
        assert ((gradient.double().reshape(exact.shape) - exact).abs() <= bound).all()
    assert in_graph(graphs[0]) == {"linear": {lowering or "formula"}}


def test_opcheck() -> None:
    a, b = drawn(7, 5).requires_grad_(), drawn(5, 3).requires_grad_()
    torch.library.opcheck(torch.ops.custom_ops.mm.default, (a, b))
    torch.library.opcheck(torch.ops.custom_ops.mm.default, (a, drawn(3, 5).t()))

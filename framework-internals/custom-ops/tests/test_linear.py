"""Products of matrices on a CPU and the linear layer: results, layouts, derivatives, lowerings, errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import custom_ops
from custom_ops.operators import linear as layer
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.linear import FEWEST_ROWS
from lowering import in_graph

NARROW = (torch.bfloat16, torch.float16)
# Rows, columns and depth around a tile (6 × up to 64), a sum in registers (176) and a block (480 rows, 256 columns).
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


def assert_product(found: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """A sum of n terms has n roundings at most (Higham, 2002, section 3.1), as has the reference; a result has one."""
    dtype, unit = found.dtype, torch.finfo(wide(found.dtype)).eps / 2
    a, b, more = a.detach().double(), b.detach().double(), torch.zeros(b.shape[1]) if bias is None else bias.detach()
    exact, size = a @ b + more.double(), a.abs() @ b.abs() + more.double().abs()
    terms = (1 + (dtype == torch.float64)) * (a.shape[1] + (bias is not None)) + 1
    bound = terms * unit * size * 1.01
    if dtype in NARROW:
        narrow = torch.finfo(dtype)
        bound += narrow.eps / 2 * (exact.abs() + bound) + narrow.smallest_normal * narrow.eps
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.fixture(params=NARROW, ids=str)
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A 16-bit dtype on a processor for which torch has no products of it."""
    monkeypatch.setattr(layer, "slow_in_torch", lambda: frozenset(NARROW))
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64_in_every_layout(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    bias = drawn(columns, dtype=dtype, seed=2)
    for a in layouts(rows, depth, dtype, 0).values():
        for name, b in layouts(depth, columns, dtype, 1).items():
            own_bias = bias if name == "contiguous" else None
            found = torch.ops.custom_ops.mm(a, b, own_bias)
            assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, columns), dtype, True)
            assert_product(found, a, b, own_bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    a, b = drawn(100, 400, dtype=dtype), drawn(400, 200, dtype=dtype, seed=1)
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found += [torch.ops.custom_ops.mm(a, b), torch.ops.custom_ops.mm(b.t(), a.t()).t()]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found[::2])
    assert all(torch.equal(each, found[1]) for each in found[1::2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinity_and_nan_stay_in_their_row(value: float, dtype: torch.dtype) -> None:
    a, b = drawn(20, 40, dtype=dtype), drawn(40, 70, dtype=dtype, seed=1)
    a[3, 5] = value
    found = torch.ops.custom_ops.mm(a, b)
    torch.testing.assert_close(found[3].double(), value * b[5].double(), equal_nan=True)
    others = [*range(3), *range(4, 20)]
    assert_product(found[others], a[others], b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_nothing_to_multiply(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    a, b, bias = (drawn(*size, dtype=dtype) for size in ((rows, depth), (depth, columns), (columns,)))
    assert torch.equal(torch.ops.custom_ops.mm(a, b), torch.zeros(rows, columns, dtype=dtype))
    if depth == 0:
        assert torch.equal(torch.ops.custom_ops.mm(a, b, bias), bias.expand(rows, columns))


def test_gradients_of_every_order() -> None:
    x = drawn(17, 5, dtype=torch.float64).requires_grad_()
    weight = drawn(3, 5, dtype=torch.float64, seed=1).requires_grad_()
    bias = drawn(3, dtype=torch.float64, seed=2).requires_grad_()
    for leaves in ((x, weight), (x, weight, bias)):
        assert torch.autograd.gradcheck(custom_ops.linear, leaves)
        assert torch.autograd.gradgradcheck(custom_ops.linear, leaves)
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


def test_16_bits_where_torch_is_slow(narrow: torch.dtype) -> None:
    x, weight, bias = (drawn(*shape, dtype=narrow).requires_grad_() for shape in ((2, 20, 70), (30, 70), (30,)))
    grad = drawn(2, 20, 30, dtype=narrow, seed=1)
    with torch.profiler.profile() as profile:
        y = custom_ops.linear(x, weight, bias)
        dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), grad)
    assert [event.count for event in profile.key_averages() if event.key == "custom_ops::mm"] == [3]
    rows, flat = x.flatten(0, 1), grad.flatten(0, 1)
    assert_product(y.flatten(0, 1), rows, weight.t(), bias)
    assert_product(dx.flatten(0, 1), flat, weight)
    assert_product(dweight, flat.t(), rows)
    assert_product(dbias[None], torch.ones(1, 40), flat)


def test_autocast_where_torch_is_slow(narrow: torch.dtype) -> None:
    x, weight, bias = (drawn(*shape).requires_grad_() for shape in ((20, 7), (30, 7), (30,)))
    with torch.autocast("cpu", narrow):
        y = custom_ops.linear(x, weight, bias)
        assert custom_ops.linear(x.double(), weight.double()).dtype == torch.float64
    assert y.dtype == narrow
    assert_product(y, x.to(narrow), weight.to(narrow).t(), bias.to(narrow))
    gradients = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3


@pytest.mark.parametrize("case", ["few rows", "a vector", "float16", "autocast"])
def test_elsewhere_it_is_torchs_linear(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "slow_in_torch", frozenset)
    shape = {"few rows": (FEWEST_ROWS - 1, 8), "a vector": (8,)}.get(case, (FEWEST_ROWS, 8))
    dtype = torch.float16 if case == "float16" else torch.float32
    x, weight = drawn(*shape, dtype=dtype), drawn(4, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), torch.profiler.profile() as profile:
        found = custom_ops.linear(x, weight)
        assert torch.equal(found, F.linear(x, weight))
        own, peer = (kind(8, 4, dtype=dtype) for kind in (custom_ops.Linear, torch.nn.Linear))
        own.load_state_dict(peer.state_dict())
        of_layer = own(x)
        assert torch.equal(of_layer, peer(x))
    assert found.dtype == of_layer.dtype == (torch.bfloat16 if case == "autocast" else dtype)
    assert not any(event.key == "custom_ops::mm" for event in profile.key_averages())


def test_a_dtype_is_slow_where_torch_does_not_pass_it_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    known = layer.slow_in_torch.__wrapped__
    monkeypatch.setattr(layer.platform, "machine", lambda: "x86_64")
    if torch.backends.mkldnn.is_available():
        by_onednn = {torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
                     torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported()}  # fmt: skip
        assert known() == {dtype for dtype, supported in by_onednn.items() if not supported}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert known() == set(NARROW)
    monkeypatch.setattr(layer.platform, "machine", lambda: "aarch64")
    assert known() == set()


def test_an_exported_program_takes_any_number_of_rows() -> None:
    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = custom_ops.Linear(8, 6), torch.nn.Parameter(torch.ones(5, 6))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return custom_ops.linear_cross_entropy(self.layer(x), self.weight, targets, mode="least_memory")

    model, rows = Classifier(), torch.export.Dim("rows", max=64)
    shapes = {"x": {0: rows}, "targets": {0: rows}}
    arguments = drawn(20, 8, dtype=torch.float32), torch.arange(20) % 5
    program = torch.export.export(model, arguments, dynamic_shapes=shapes, strict=False).module()
    for count in (FEWEST_ROWS // 4, 33):
        others = drawn(count, 8, dtype=torch.float32), torch.arange(count) % 5
        torch.testing.assert_close(program(*others), model(*others))


class Quantised(torch.Tensor):
    """A weight as libraries of quantisation make it: torch.nn.functional.linear is all that it can do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return F.linear(args[0], args[1].as_subclass(torch.Tensor), *args[2:])
            if getattr(func, "__name__", "") == "__get__":  # an attribute
                return func(*args)
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_product_that_is_not_of_elements_is_torchs() -> None:
    own, peer = custom_ops.Linear(8, 4), torch.nn.Linear(8, 4)
    own.load_state_dict(peer.state_dict())
    rows = [drawn(count, 8) for count in (FEWEST_ROWS, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert torch.equal(own(jagged).values(), peer(jagged).values())
    sparse = peer.weight.detach().to_sparse_csr()
    assert torch.equal(custom_ops.linear(rows[0], sparse), F.linear(rows[0], sparse))
    quantised = peer.weight.detach().as_subclass(Quantised)
    assert torch.equal(custom_ops.linear(rows[0], quantised, peer.bias), peer(rows[0]))


def test_a_layer_of_torch_becomes_one_of_ours_by_its_class() -> None:
    layer_of_torch, x = torch.nn.Linear(8, 4), drawn(FEWEST_ROWS, 8)
    expected = layer_of_torch(x)
    layer_of_torch.__class__ = custom_ops.Linear
    torch.testing.assert_close(layer_of_torch(x), expected)


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


def traced(call: Any, *leaves: Tensor) -> tuple[Tensor, tuple[Tensor, ...], dict[str, set[Any]]]:
    """What a call returns under torch.compile, in one graph, its gradients, and the lowerings in the graph."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    y = torch.compile(call, fullgraph=True, backend=backend)(*leaves)
    return y, torch.autograd.grad(y, leaves, y.detach()), in_graph(graphs[0])


@pytest.mark.parametrize("lowering", ["formula", "kernel", None])
def test_compiles_whole_with_gradients(lowering: Any) -> None:
    x, weight = drawn(2, 8, 20).requires_grad_(), drawn(30, 20, seed=1).requires_grad_()
    y, gradients, choices = traced(partial(custom_ops.linear, lowering=lowering), x, weight)
    assert_gradients(y, gradients, x, weight)
    assert choices == {"linear": {lowering or "formula"}}


@pytest.mark.parametrize(
    ("lowering", "cast"),
    [
        pytest.param("formula", False, id="formula"),
        pytest.param(None, True, id="autocast"),
        pytest.param("formula", True, id="formula, autocast", marks=pytest.mark.slow),
        pytest.param(None, False, id="neither", marks=pytest.mark.slow),
    ],
)
def test_16_bits_compile_whole_by_the_kernel(narrow: torch.dtype, lowering: Any, cast: bool) -> None:
    dtype = torch.float32 if cast else narrow
    x, weight, bias = (drawn(*shape, dtype=dtype).requires_grad_() for shape in ((2, 8, 20), (30, 20), (30,)))

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", narrow, enabled=cast):
            return custom_ops.linear(x, weight, bias, lowering=lowering)

    y, gradients, choices = traced(call, x, weight, bias)
    assert y.dtype == narrow
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    x, weight, bias = (leaf.detach().to(narrow) for leaf in (x, weight, bias))
    assert_product(y.flatten(0, 1), x.flatten(0, 1), weight.t(), bias)
    assert_gradients(y, [gradient.to(narrow) for gradient in gradients], x, weight)
    assert choices == {"linear": {lowering or "kernel"}}


def assert_gradients(y: Tensor, gradients: Sequence[Tensor], x: Tensor, weight: Tensor) -> None:
    rows, flat = x.flatten(0, 1), y.detach().flatten(0, 1)
    assert_product(gradients[0].flatten(0, 1), flat, weight)
    assert_product(gradients[1], flat.t(), rows)


def test_opcheck() -> None:
    a, b = drawn(7, 5).requires_grad_(), drawn(5, 3).requires_grad_()
    torch.library.opcheck(torch.ops.custom_ops.mm.default, (a, b, drawn(3).requires_grad_()))
    torch.library.opcheck(torch.ops.custom_ops.mm.default, (a.bfloat16(), b.bfloat16()))
    torch.library.opcheck(torch.ops.custom_ops.mm.default, (a, drawn(3, 5).t()))


def test_a_compiled_layer_without_a_bias_has_gradients() -> None:
    """AOTAutograd calls an operator without arguments that have their defaults."""
    own = layer.Linear(32, 24, bias=False, lowering="kernel")
    x = torch.randn(20, 32, requires_grad=True)
    wanted = torch.autograd.grad(own(x).square().sum(), (x, own.weight))
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), (x, own.weight))
    assert all(torch.equal(mine, eager) for mine, eager in zip(found, wanted, strict=True))

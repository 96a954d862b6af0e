"""vector_add and axpb: exact results, gradients, registration, errors, on every available device."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import custom_ops
from custom_ops.bench.cases import ALPHA
from custom_ops.bench.measure import differing, hard_operands, largest_error
from custom_ops.operators.checks import DTYPES
from custom_ops.roads.just_in_time import load as extension

OPERATORS = {"vector_add": custom_ops.vector_add, "axpb": lambda x, b: custom_ops.axpb(x, b, ALPHA)}


def equal_bits(result: torch.Tensor, expected: torch.Tensor) -> bool:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    return differing(result, expected) == 0


def test_a_zero_of_the_other_sign_differs_and_a_nan_does_not() -> None:
    nan = float("nan")
    assert differing(torch.tensor([0.0, nan, 1.0]), torch.tensor([-0.0, -nan, 1.0])) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31, 255, 4097, 100_003])
def test_sum_is_bit_equal_to_torch(device: str, dtype: torch.dtype, count: int) -> None:
    a, b = hard_operands(count, dtype, device)
    assert equal_bits(custom_ops.vector_add(a, b), a + b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_axpb_is_rounded_once(device: str, dtype: torch.dtype) -> None:
    x, b = hard_operands(100_003, dtype, device)
    error = largest_error(custom_ops.axpb(x, b, ALPHA), x, b, ALPHA)
    # Half a unit of the result, and for the 16-bit types half a unit of float32 more. The reference itself is exact to
    # 2^-64, which is 2^-11 units of float64.
    assert error <= 0.5 + 2**-11


def test_reference_error_sees_a_wrong_last_bit() -> None:
    x, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert largest_error(torch.tensor([3.0]), x, b, 1.0) == 0.0
    assert largest_error(torch.nextafter(torch.tensor([3.0]), torch.tensor(4.0)), x, b, 1.0) == 1.0


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4),
    dtype=st.sampled_from(DTYPES),
    first=st.integers(0, 3),
    second=st.integers(0, 3),
    reverse=st.booleans(),
    operator=st.sampled_from(sorted(OPERATORS)),
)
def test_any_shape_offset_and_stride(
    shape: list[int], dtype: torch.dtype, first: int, second: int, reverse: bool, operator: str
) -> None:
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(count)
    a = torch.randn(count + first, generator=generator).to(dtype)[first:].view(shape)
    b = torch.randn(count + second, generator=generator).to(dtype)[second:].view(shape)
    if reverse:
        a = a.permute(tuple(reversed(range(a.dim()))))
        b = b.permute(tuple(reversed(range(b.dim())))).contiguous()
    wide = {"vector_add": 1.0, "axpb": ALPHA}[operator] * a.double() + b.double()
    result = OPERATORS[operator](a, b)
    assert result.is_contiguous()
    # ALPHA has three binary digits and randn float32 or fewer: float64 holds the exact result, rounded once to float32.
    expected = wide if dtype == torch.float64 else wide.float().to(dtype)
    assert equal_bits(result, expected)


def test_large_sum_is_split_over_threads_without_a_gap() -> None:
    a = torch.arange(1_000_003, dtype=torch.float64)
    assert torch.equal(custom_ops.vector_add(a, a), 2 * a)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_views(device: str, dtype: torch.dtype, offset: int) -> None:
    a, b = hard_operands(4099, dtype, device)
    assert equal_bits(custom_ops.vector_add(a[offset:], b[offset:]), a[offset:] + b[offset:])
    assert equal_bits(custom_ops.vector_add(a[:-offset], b[offset:]), a[:-offset] + b[offset:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 63, 65, 300])
def test_transposed_matrices_and_their_slices(device: str, dtype: torch.dtype, rows: int) -> None:
    columns = 70
    a, b = (x.view(columns, rows + 3) for x in hard_operands(columns * (rows + 3), dtype, device))
    turned = [x[:, :rows].t() for x in (a, b)] + [x[3:].t() for x in (a, b)]
    in_order = [x.contiguous() for x in turned]
    for first, second in ((0, 1), (2, 3)):
        expected = in_order[first] + in_order[second]
        for x in (turned[first], in_order[first]):
            for other in (turned[second], in_order[second]):
                assert equal_bits(custom_ops.vector_add(x, other), expected)
        assert equal_bits(custom_ops.scale(turned[first], 2.0), 2 * in_order[first])


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_gradcheck(device: str, operator: str) -> None:
    a, b = (torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(OPERATORS[operator], (a, b))
    assert torch.autograd.gradgradcheck(OPERATORS[operator], (a, b))


def test_gradient_of_axpb_is_alpha_and_one(device: str) -> None:
    x, b = (torch.randn(4, device=device, requires_grad=True) for _ in range(2))
    custom_ops.axpb(x, b, 2.5).sum().backward()
    assert x.grad is not None
    assert b.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.5))
    assert torch.equal(b.grad, torch.ones_like(b))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "empty", "gradients"])
def test_opcheck(device: str, layout: str) -> None:
    a, b = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    if layout == "transposed":
        a, b = a.t(), b.t()
    elif layout == "empty":
        a, b = a[:0], b[:0]
    elif layout == "gradients":
        a.requires_grad_()
    torch.library.opcheck(torch.ops.custom_ops.vector_add.default, (a, b))
    torch.library.opcheck(torch.ops.custom_ops.axpb.default, (a, b, ALPHA))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_public_functions_compile_whole_with_dynamic_shapes(device: str, backend: str) -> None:
    def function(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return custom_ops.axpb(custom_ops.vector_add(x, b), b, 2.0).relu()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for count in (5, 17, 64):
        x, b = (torch.randn(count, 3, device=device, requires_grad=True) for _ in range(2))
        expected = torch.autograd.grad(function(x, b).sum(), (x, b))
        result = compiled(x, b)
        assert torch.equal(result, function(x, b))
        for own, other in zip(torch.autograd.grad(result.sum(), (x, b)), expected, strict=True):
            assert torch.equal(own, other)


def wrong_operands() -> dict[str, tuple[torch.Tensor, torch.Tensor, type[Exception], str]]:
    one = torch.ones(2, 3)
    return {
        "shape": (one, torch.ones(3), ValueError, "argument 'b': expected shape [2, 3] like 'a', got [3]"),
        "dtype": (one, one.double(), TypeError, "argument 'b': expected dtype torch.float32 like 'a', got torch.float"),
        "no kernel": (one.int(), one.int(), TypeError, "argument 'a': expected dtype torch.float32, torch.float64, "),
    }


@pytest.mark.parametrize("case", sorted(wrong_operands()))
def test_every_entrance_refuses_in_the_same_words(case: str) -> None:
    a, b, error, message = wrong_operands()[case]
    said = []
    for function in (custom_ops.vector_add, extension().vector_add):
        with pytest.raises(error) as caught:
            function(a, b)
        said.append(str(caught.value))
    with FakeTensorMode() as mode, pytest.raises(error) as caught:
        custom_ops.vector_add(mode.from_tensor(a), mode.from_tensor(b))
    said.append(str(caught.value))
    with pytest.raises(RuntimeError) as of_abi:
        torch.ops.custom_ops.vector_add(a, b)
    said.append(str(of_abi.value))
    assert said[0].startswith(f"vector_add: {message}")
    assert said == [said[0]] * 4


def test_axpb_names_its_own_arguments() -> None:
    with pytest.raises(ValueError, match=r"axpb: argument 'b': expected shape \[2\] like 'x', got \[3\]"):
        custom_ops.axpb(torch.ones(2), torch.ones(3), 1.0)


def test_other_arguments_than_tensors_are_named() -> None:
    with pytest.raises(TypeError, match=r"vector_add: argument 'b': expected a torch\.Tensor, got float"):
        custom_ops.vector_add(torch.ones(2), 3.0)  # type: ignore[arg-type]


def test_threads_of_torch_do_the_work() -> None:
    before = torch.get_num_threads()
    a = torch.randn(300_000)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(custom_ops.vector_add(a, a), a + a)
    finally:
        torch.set_num_threads(before)

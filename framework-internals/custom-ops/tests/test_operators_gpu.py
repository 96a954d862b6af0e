"""Tests that need a GPU: streams, devices, graphs, indices beyond 32 bits, and the kernels' results."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import custom_ops
from custom_ops.operators.calls import calls
from custom_ops.operators.flash_attention import reference

from .test_operators import check_bias_gelu, rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_build_has_cuda_kernels() -> None:
    assert custom_ops.load().cuda is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (3, 7), (128, 33), (129, 33), (257, 1000), (1024, 96), (1025, 96), (64, 4096), (5, 2**15), (40000, 8)],
)
def test_bias_gelu_against_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_bias_gelu(*(operand.cuda() for operand in rows(dtype, *shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 0), (0, 5)])
def test_bias_gelu_of_nothing(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.ones(shape[1], device="cuda", dtype=dtype, requires_grad=True)
    custom_ops.bias_gelu(x, bias).sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert x.grad.shape == shape
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 0, 5, 64), (2, 4, 0, 64)], ids=["no heads", "no queries"])
def test_attention_of_keys_that_no_query_reads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.ones(2, 2, 70, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    out, lse = custom_ops.flash_attention(q, k, v)
    (out.sum() + lse.sum()).backward()
    assert (out.shape, lse.shape) == (shape, shape[:3])
    for x in (k, v):
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("tokens", [700, 1024, 2560, 2561, 4100])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_short_and_of_long_sequences(tokens: int, causal: bool) -> None:
    """Their kernels have other tiles, and a multiprocessor has several blocks of queries."""
    torch.manual_seed(0)
    batch = 20_000 // tokens
    q, k, v = (torch.randn(batch, heads, tokens, 64, device="cuda").bfloat16() for heads in (12, 6, 6))
    out, lse = custom_ops.flash_attention(q, k, v, causal)
    exact, exact_lse = reference(*(x[:2].double() for x in (q, k, v)), causal, None)
    assert (out[:2].double() - exact).norm() <= 2 * 2.0**-8 * exact.norm()  # two roundings, as in the kernels' tests
    assert (lse[:2].double() - exact_lse).norm() <= 2.0**-20 * exact_lse.norm()
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_of_misaligned_tensors_is_by_the_same_kernel(dtype: torch.dtype) -> None:
    shape = (1, 4, 200, 64)
    q, k, v, grad = (torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(4))

    def moved(x: Tensor) -> Tensor:  # contiguous, two bytes off
        buffer = x.new_empty(x.numel() + 1)
        return buffer[1:].view(shape).copy_(x.detach()).requires_grad_()

    operands = [moved(x) for x in (q, k, v)]
    assert all(x.is_contiguous() and x.data_ptr() % 16 != 0 for x in operands)
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for three, arriving in (((q, k, v), grad), (operands, moved(grad))):
            out, lse = custom_ops.flash_attention(*three)
            results.append([out, lse, *torch.autograd.grad(out, three, arriving)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_attention_has_the_same_gradients_every_time_if_torch_asks(head_size: int) -> None:
    q, k, v, grad = (torch.randn(2, 4, 1500, head_size, device="cuda").bfloat16().requires_grad_() for _ in range(4))
    out, _ = custom_ops.flash_attention(q, k, v, causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for _ in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@pytest.mark.parametrize(("deterministic", "biased"), [(False, False), (True, False), (False, True)])
def test_attention_backward_in_a_cuda_graph(deterministic: bool, biased: bool) -> None:
    # The sums of dq and the turns of their blocks lie in a workspace that every replay uses again.
    q, k, v, grad = (torch.randn(1, 4, 696, 128 if biased else 64, device="cuda").bfloat16() for _ in range(4))
    bias = torch.randn(1, 4, 696, 696, device="cuda").bfloat16() if biased else None
    out, lse = custom_ops.flash_attention(q, k, v, attn_mask=bias)
    backward = partial(torch.ops.custom_ops.flash_attention_backward, attn_mask=bias, bias_gradient=biased)

    def gradients() -> tuple[Tensor, ...]:
        return backward(grad, None, q, k, v, out, lse, False, None, deterministic)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients()
    for _ in range(3):
        grad.normal_()
        graph.replay()
        for name, result, expected in zip(("dq", "dk", "dv", "dbias"), results, gradients(), strict=True):
            if deterministic or name != "dq":
                assert torch.equal(result, expected), name
            else:  # one rounding to bfloat16 of sums that differ in their last bits
                assert (result.double() - expected.double()).norm() <= 2**-9 * expected.double().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("access", [1, 2, 3, 4])
def test_every_access_gives_the_same_bits(dtype: torch.dtype, access: int) -> None:
    x, bias = torch.randn(123, 512, device="cuda").to(dtype), torch.randn(512, device="cuda").to(dtype)
    assert torch.equal(torch.ops.custom_ops_kernels.bias_gelu.access(x, bias, access), custom_ops.bias_gelu(x, bias))


@pytest.mark.parametrize("across", [32, 64, 128, 256])
def test_every_plan_gives_the_same_gradient(across: int) -> None:
    grad, x = (torch.randn(1030, 776, device="cuda") for _ in range(2))
    bias = torch.randn(776, device="cuda")
    dx, dbias = calls.bias_gelu_backward(grad, x, bias)
    other_dx, other_dbias = torch.ops.custom_ops_kernels.bias_gelu_backward.plan(grad, x, bias, across, 4, 16)
    assert torch.equal(dx, other_dx)
    assert torch.allclose(dbias, other_dbias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("count", [20000, 700])
def test_gradients_are_the_same_every_time(count: int) -> None:
    grad, x = (torch.randn(count, 768, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(768, device="cuda", dtype=torch.bfloat16)
    first = calls.bias_gelu_backward(grad, x, bias)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(calls.bias_gelu_backward(grad, x, bias), first, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels", "side"), [(8, 16), (7, 9), (16, 7)])
def test_conv_bn_relu_is_the_convolution_scaled_shifted_and_clipped(
    dtype: torch.dtype, channels_last: bool, channels: int, side: int
) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(2, 3, side, side, device="cuda").to(dtype)
    weight = torch.randn(channels, 3, 3, 3, device="cuda").to(dtype)
    if channels_last:
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    scale, shift = (torch.randn(channels, device="cuda", dtype=wide) for _ in range(2))
    y = custom_ops.conv_bn_relu(x, weight, scale, shift, padding=1)
    convolved = torch.conv2d(x, weight, padding=1)
    expected = torch.relu(convolved.to(torch.float64) * scale.double().view(-1, 1, 1) + shift.double().view(-1, 1, 1))
    bound = torch.finfo(dtype).eps * expected.abs() + 4 * torch.finfo(wide).eps * (convolved.double().abs() * 4 + 4)
    assert ((y.double() - expected).abs() <= bound).all()
    assert y.stride() == convolved.stride()


def heavy(matrix: Tensor) -> Tensor:
    return torch.linalg.multi_dot([matrix] * 8)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector_add": lambda x: custom_ops.vector_add(x, x),
    "axpb": lambda x: custom_ops.axpb(x, x, 2.0),
    "scale": custom_ops.scale,
    "bias_gelu": lambda x: custom_ops.bias_gelu(x, x[0]),
    "bias_gelu_backward": lambda x: calls.bias_gelu_backward(x, x, x[0])[1],
    "conv_bn_relu": lambda x: custom_ops.conv_bn_relu(
        x[:32, :32].reshape(1, 1, 32, 32), x[:3, :3].reshape(1, 1, 3, 3), x[0, :1], x[0, :1]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_launch_is_on_the_current_stream(name: str) -> None:
    # On the default stream the kernel would read its operand long before the side stream's products have written it.
    matrix = torch.randn(4096, 4096, device="cuda") / 64
    call = CALLS[name]
    expected = call(heavy(matrix))  # also loads whatever is loaded at the first call
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = call(heavy(matrix))
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("name", CALLS)
def test_capture_into_a_cuda_graph_and_replay(name: str) -> None:
    x = torch.randn(128, 64, device="cuda")
    call = CALLS[name]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(result, call(x))


def test_mixed_devices_are_refused() -> None:
    host, card = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="argument 'b': expected device cuda:0 like 'a', got cpu"):
        custom_ops.vector_add(card, host)
    with pytest.raises(ValueError, match="argument 'b': expected device cpu like 'a', got cuda:0"):
        custom_ops.vector_add(host, card)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_decide_the_device(name: str) -> None:
    x = torch.randn(64, 64, device="cuda:1")
    with torch.cuda.device(0):
        result = CALLS[name](x)
    assert result.device == x.device
    assert torch.equal(result, CALLS[name](x))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 1])
def test_vector_add_of_more_elements_than_32_bits_count(offset: int) -> None:
    count = 2**32 + 5
    need_memory(4 * 2 * count)
    a = torch.zeros(count + offset, dtype=torch.float16, device="cuda")[offset:]
    b = torch.zeros(count + offset, dtype=torch.float16, device="cuda")[offset:]
    positions = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, count - 1], device="cuda")
    a[positions] = torch.arange(1, 7, dtype=torch.float16, device="cuda")
    b[positions] = 10
    result = custom_ops.vector_add(a, b)
    assert torch.equal(result[positions], torch.arange(11, 17, dtype=torch.float16, device="cuda"))
    assert nonzero(result) == len(positions)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [8, 7])
def test_bias_gelu_of_more_elements_than_32_bits_count(columns: int) -> None:
    rows = 2**32 // columns + 3
    need_memory(6 * 2 * rows * columns)
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    bias = torch.arange(columns, device="cuda").to(torch.float16)
    expected = custom_ops.bias_gelu(x[:1], bias)[0]
    y = custom_ops.bias_gelu(x, bias)
    for row in (0, 2**31 // columns - 1, 2**31 // columns + 1, rows - 1):
        assert torch.equal(y[row], expected)
    del y
    x[-1] = 1
    dx, dbias = calls.bias_gelu_backward(x, x, bias)
    assert nonzero(dx.flatten()) == columns
    assert torch.equal(dbias, dx[-1])


def nonzero(x: Tensor) -> int:
    """How many elements are not zero, a slice at a time: torch.count_nonzero allocates 8 bytes for each element."""
    return sum(int(torch.count_nonzero(part)) for part in x.split(2**28))


def need_memory(size: int) -> None:
    if torch.cuda.mem_get_info()[0] < size:
        pytest.skip(f"needs {size >> 30} GiB of free GPU memory")

"""Values and gradients of every implementation against float64, within the bound that accuracy.py derives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmsnorm_fused import rms_norm
from rmsnorm_fused.accuracy import expected

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTHS = (1, 7, 100, 511, 4096, 4097)


def gradients(x, weight, dy, *, eps, backend):
    x = x.detach().requires_grad_()
    weight = None if weight is None else weight.detach().requires_grad_()
    y = rms_norm(x, weight, eps=eps, backend=backend)
    wanted = (x,) if weight is None else (x, weight)
    found = torch.autograd.grad(y, wanted, dy)
    return dict(zip(("y", "dx", "dweight"), (y.detach(), *found), strict=False))


def check(where, x, weight, dy, *, eps=1e-6):
    before = [t.clone() for t in (x, dy)]
    results = gradients(x, weight, dy, eps=eps, backend=where.backend)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, dy), strict=True)), "an argument was modified"
    references = expected(x, weight, dy, eps)
    assert results.keys() == references.keys()
    for part, actual in results.items():
        dtype = weight.dtype if part == "dweight" else x.dtype
        assert actual.dtype == dtype
        assert actual.shape == references[part].value.shape
        roundings = 2.0 if where.truncates_bfloat16 and dtype == torch.bfloat16 else 1.0
        share = references[part].share_of_bound(actual, roundings=roundings)
        assert share <= 1, f"{part} of {tuple(x.shape)} {x.dtype}: {share:.3g} times the bound"


def random(seed, shape, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def laid_out(kind, seed, shape, dtype, device):
    """A tensor of that shape whose memory is laid out in one of the ways that models do it."""
    *lead, n = shape
    if kind == "columns of a wider tensor":
        return random(seed, (*lead, 3 * n + 1), dtype, device)[..., n : 2 * n]
    if kind == "heads of a projection" and lead:
        return random(seed, (*lead[:-1], 3, lead[-1], n), dtype, device).select(-3, 1)
    if kind == "transposed":
        return random(seed, (n, *lead), dtype, device).movedim(0, -1)
    if kind == "swapped heads" and len(lead) >= 2:
        return random(seed, (*lead[:-2], lead[-1], lead[-2], n), dtype, device).transpose(-2, -3)
    if kind == "misaligned":
        count = torch.Size(shape).numel()
        return random(seed, (count + 1,), dtype, device)[1:].view(shape)
    if kind == "expanded":
        return random(seed, (*(1 for _ in lead), n), dtype, device).expand(shape)
    return random(seed, shape, dtype, device)


LAYOUTS = (
    "contiguous", "columns of a wider tensor", "heads of a projection", "transposed", "swapped heads", "misaligned",
    "expanded",
)  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_cases(where, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    weights = [None, dtype, torch.float32, torch.bfloat16]
    weight_dtype = data.draw(st.sampled_from(weights))
    lead = data.draw(st.lists(st.integers(1, 5), max_size=3))
    n = data.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 511, 768, 1030])))
    x = laid_out(data.draw(st.sampled_from(LAYOUTS)), 1, (*lead, n), dtype, where.device)
    dy = laid_out(data.draw(st.sampled_from(LAYOUTS)), 2, (*lead, n), dtype, where.device)
    weight = None if weight_dtype is None else random(3, (n,), weight_dtype, where.device)
    check(where, x, weight, dy, eps=data.draw(st.sampled_from([1e-6, 1e-5, 0.1])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_widths(where, n, dtype):
    m = 70 if n < 1000 else 5
    check(
        where,
        random(1, (m, n), dtype, where.device),
        random(3, (n,), dtype, where.device),
        random(2, (m, n), dtype, where.device),
    )


def test_more_rows_than_one_partial_sum_holds(where):
    x, dy = (random(seed, (1000, 24), torch.float32, where.device) for seed in (1, 2))
    check(where, x, random(3, (24,), torch.float32, where.device), dy)


@pytest.mark.parametrize("n", [9000, 9001, 20000])
def test_rows_wider_than_a_block(where, n):
    x, dy = (random(seed, (3, n), torch.bfloat16, where.device) for seed in (1, 2))
    check(where, x, random(3, (n,), torch.bfloat16, where.device), dy)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pytorch", "triton", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 64, 100, 511, 1000, 4096, 4097, 8192, 8200, 16384, 16400, 65536, 131072])
def test_widths_at_size_on_a_gpu(n, dtype, backend):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    m = max((1 << 21) // n + 3, 5)
    x, dy = (torch.randn(m, n, device="cuda", dtype=torch.float32).to(dtype) for _ in range(2))
    weight = torch.randn(n, device="cuda").to(dtype)
    results = gradients(x, weight, dy, eps=1e-6, backend=backend)
    for part, reference in expected(x, weight, dy, 1e-6).items():
        assert reference.share_of_bound(results[part]) <= 1, part


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_two_to_the_31_elements(backend):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    m, n = (1 << 19) + 3, 4096
    if torch.cuda.mem_get_info()[0] < 10 * m * n * 2:
        pytest.skip("needs 43 GB of free GPU memory")
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    results = gradients(x, weight, dy, eps=1e-6, backend=backend)
    last = slice(m - 64, m)
    for part, reference in expected(x[last], weight, dy[last], 1e-6).items():
        if part != "dweight":
            assert reference.share_of_bound(results[part][last]) <= 1, part


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 5), (2, 3, 0)])
def test_empty(where, shape):
    x = torch.empty(shape, device=where.device)
    results = gradients(
        x, torch.ones(shape[-1], device=where.device), torch.empty_like(x), eps=1e-6, backend=where.backend
    )
    assert results["y"].shape == results["dx"].shape == shape
    assert torch.equal(results["dweight"], torch.zeros(shape[-1], device=where.device))


def test_a_row_does_not_depend_on_the_others(kernel):
    x = random(1, (37, 200), torch.bfloat16, kernel.device)
    weight = random(2, (200,), torch.bfloat16, kernel.device)
    whole = rms_norm(x, weight, eps=1e-6, backend=kernel.backend)
    for row in (0, 17, 36):
        assert torch.equal(rms_norm(x[row], weight, eps=1e-6, backend=kernel.backend), whole[row])


@pytest.mark.parametrize("n", [96, 9000])
def test_deterministic(kernel, n):
    m = 300 if n < 1000 else 7
    x, dy = (random(seed, (m, n), torch.float32, kernel.device) for seed in (1, 2))
    weight = random(3, (n,), torch.float32, kernel.device)
    first = gradients(x, weight, dy, eps=1e-6, backend=kernel.backend)
    for _ in range(3):
        again = gradients(x, weight, dy, eps=1e-6, backend=kernel.backend)
        assert all(torch.equal(first[part], again[part]) for part in first)


def test_cpp_does_not_depend_on_the_number_of_threads():
    x, dy = (random(seed, (500, 64), torch.float32, "cpu") for seed in (1, 2))
    weight = random(3, (64,), torch.float32, "cpu")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(gradients(x, weight, dy, eps=1e-6, backend="cpp"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][part], found[1][part]) for part in found[0])


def test_zero_rows_and_huge_values_stay_finite(where):
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e4), torch.full((64,), 1e-4)]).to(where.device).half()
    y = rms_norm(x, eps=1e-6, backend=where.backend)
    assert torch.isfinite(y).all()
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert torch.allclose(y[1], torch.ones_like(y[1]))  # squares beyond float16's range

"""Values and gradients of layer normalisation against float64, within the bound of bench/accuracy.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmsnorm_fused import layer_norm
from rmsnorm_fused.backends import resolve
from rmsnorm_fused.bench.accuracy import expected_layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random(seed, shape, dtype, device, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype).to(device)


def check(where, x, weight=None, bias=None, *, residual=None, ds=True):
    dy, ds = random(7, x.shape, x.dtype, x.device), random(8, x.shape, x.dtype, x.device) if ds else None
    named = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items() if tensor is not None}
    outputs = layer_norm(**leaves, backend=where.backend)
    outputs = outputs if residual is not None else (outputs,)
    used, incoming = (outputs, (dy, ds)) if residual is not None and ds is not None else (outputs[:1], (dy,))
    gradients = dict(zip(leaves, torch.autograd.grad(used, tuple(leaves.values()), incoming), strict=True))
    results = {"y": outputs[0].detach(), "dx": gradients["x"]}
    if residual is not None:
        results["s"] = outputs[1].detach()
        assert torch.equal(gradients["residual"], gradients["x"])
    results |= {f"d{name}": gradients[name] for name in ("weight", "bias") if name in gradients}
    given_ds = ds if residual is not None else None
    references = expected_layer(
        x, weight, bias, dy, 1e-5,
        residual=residual, ds=given_ds, ds_added_apart=where.backend == "pytorch" and given_ds is not None,
    )  # fmt: skip
    assert results.keys() == references.keys()
    assert results["y"].is_contiguous()
    for part, actual in results.items():
        assert actual.dtype == (leaves[part[1:]].dtype if part in ("dweight", "dbias") else x.dtype)
        share = references[part].share_of_bound(actual)
        assert share <= 1, f"{part} of {tuple(x.shape)} {x.dtype}: {share:.3g} times the bound"


@st.composite
def cases(draw, device):
    """Any shape, dtypes, strides and parameters that the public function takes."""
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 511, 768, 1030])))
    lead = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    of_parameters = draw(st.sampled_from([dtype, torch.float32]))

    def like_x(seed):
        if draw(st.booleans()):
            return random(seed, (*lead, n), dtype, device, mean=2)
        return random(seed, (*lead, 2 * n + 1), dtype, device, mean=2)[..., n : 2 * n]

    parameters = [random(seed, (n,), of_parameters, device) if draw(st.booleans()) else None for seed in (3, 4)]
    return (like_x(1), *parameters), {"residual": like_x(2) if draw(st.booleans()) else None, "ds": draw(st.booleans())}


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(data=st.data())
def test_random_cases(where, data):
    arguments, options = data.draw(cases(where.device))
    check(where, *arguments, **options)


def made(m, n, dtype, device, mean=0.5):
    return random(1, (m, n), dtype, device, mean), *(random(seed, (n,), dtype, device) for seed in (2, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 100, 511, 4096, 4097])
def test_widths(where, n, dtype):
    x, weight, bias = made(70 if n < 1000 else 5, n, dtype, where.device)
    check(where, x, weight, bias, residual=random(4, x.shape, dtype, where.device))


@pytest.mark.parametrize("n", [16384, 20001, 40000])
def test_rows_wider_than_a_block(where, n):
    check(where, *made(3, n, torch.bfloat16, where.device))


def test_more_rows_than_one_partial_sum_holds(where):
    check(where, *made(1000, 24, torch.float32, where.device))


@pytest.mark.parametrize("n", [96, 1000, 4096])
def test_a_mean_far_from_zero_does_not_cancel_the_variance(where, n):
    x, weight, bias = made(12, n, torch.float32, where.device, mean=1e4)
    check(where, x, weight, bias)
    y = layer_norm(x, backend=where.backend).double()
    # Rounding the mean, 1e4, to float32 moves a row by 2^-11; squares of 1e8 would be wrong by units.
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.double(), (n,)), atol=4e-3, rtol=1e-3)


@pytest.mark.parametrize(("rows", "n"), [(9, 768), (40, 1000), (2, 40000)])  # whole rows, rows ahead, blocks of columns
def test_a_row_of_equal_numbers_has_no_deviations(rows, n):
    if resolve("auto", "cpu") != "cpp":
        pytest.skip("about the kernels in C++")
    for dtype in (torch.float32, torch.float64):
        for value in (0.1, 3.3, 1000.1, -12345.678):
            x, bias = torch.full((rows, n), value, dtype=dtype), torch.ones(n, dtype=dtype)
            assert not layer_norm(x, backend="cpp").any()
            assert (layer_norm(x / 2, None, bias, residual=x / 2, backend="cpp")[0] == 1).all()


@pytest.mark.parametrize(("dtype", "residual"), [(torch.bfloat16, True), (torch.float64, False)])
def test_triton_row_in_blocks(kernel, monkeypatch, dtype, residual):
    if kernel.backend != "triton":
        pytest.skip("about the kernels in Triton")
    from rmsnorm_fused.impl import triton

    narrow = triton.Tiling(1, 64, warps=2, programs=1, stages=3)
    monkeypatch.setattr(triton, "forward_tiling", lambda columns, wide_bytes: narrow)
    monkeypatch.setattr(triton, "backward_tiling", lambda columns, wide_bytes: narrow)
    x, weight, bias = made(5, 150, dtype, kernel.device)
    check(kernel, x, weight, bias, residual=random(4, x.shape, dtype, kernel.device) if residual else None)


def test_a_float32_residual_beside_16_bits_is_added_first(where):
    x = random(1, (5, 96), torch.bfloat16, where.device)
    residual, weight, bias = (random(seed, x.shape[:rank], torch.float32, where.device) for seed, rank in ((2, 2),) * 3)
    weight, bias = weight[0], bias[0]
    y, s = layer_norm(x, weight, bias, residual=residual, backend=where.backend)
    assert (y.dtype, s.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(s, residual + x)
    assert torch.equal(y, layer_norm(s, weight, bias, backend=where.backend).bfloat16())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 5)])
def test_empty(where, shape):
    x, weight, bias = (torch.ones(s, device=where.device, requires_grad=True) for s in (shape, shape[-1:], shape[-1:]))
    y = layer_norm(x, weight, bias, backend=where.backend)
    assert y.shape == shape
    for gradient in torch.autograd.grad(y.sum(), (x, weight, bias)):
        assert not gradient.any()


@pytest.mark.parametrize("n", [1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(kernel, n, dtype):
    if kernel.interpreted:
        pytest.skip("as on a GPU")
    x, weight, bias = made(300, n, dtype, kernel.device)
    alone = layer_norm(x[17:18], weight, bias, backend=kernel.backend)
    assert torch.equal(layer_norm(x, weight, bias, backend=kernel.backend)[17:18], alone)


def test_a_nan_shows_in_its_row_alone(where):
    x, weight, bias = made(4, 100, torch.bfloat16, where.device)
    x[2, 5] = float("nan")
    y = layer_norm(x, weight, bias, backend=where.backend)
    assert y[2].isnan().all()
    assert not y[[0, 1, 3]].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [24, 768, 1024, 1536, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536, 131072])
def test_widths_at_size_on_a_gpu(backend, n, dtype):
    from types import SimpleNamespace

    check(SimpleNamespace(backend=backend, device="cuda"), *made(300, n, dtype, "cuda"))

"""Values and gradients of every implementation against float64, within the bound of bench/accuracy.py."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchkit.timing.comparison import last_level_cache
from rmsnorm_fused import rms_norm
from rmsnorm_fused.bench.accuracy import expected, expected_quantised, expected_row_scales
from rmsnorm_fused.options import CASTINGS, Options

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn

LAYOUTS = (
    "contiguous", "columns of a wider tensor", "heads of a projection", "transposed", "swapped heads", "misaligned",
    "expanded",
)  # fmt: skip

bounded = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def random(seed, shape, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def laid_out(kind, seed, shape, dtype, device):
    """A tensor of a given shape, in one of the memory layouts that models use."""
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


@dataclass(frozen=True)
class Case:
    """One normalisation and the incoming gradients; None omits an argument."""

    x: torch.Tensor
    dy: torch.Tensor | None
    weight: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    ds: torch.Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0
    casting: str = "exact"

    @property
    def tensors(self):
        return [t for t in (self.x, self.dy, self.weight, self.residual, self.ds) if t is not None]

    @property
    def options(self):
        return Options(self.eps, self.weight_offset, self.casting == "llama")


def made(m, n, dtype, device, *, residual=False, weight_dtype=None, **numbers):
    """A case of contiguous tensors."""
    shape = (m, n)
    x, dy, other, ds = (random(seed, shape, dtype, device) for seed in range(1, 5))
    weight = random(5, (n,), weight_dtype or dtype, device)
    return Case(x, dy, weight, *((other, ds) if residual else ()), **numbers)


def run(backend, case):
    """The results by their names in bench/accuracy.py."""
    x, residual, weight = (
        None if t is None else t.detach().requires_grad_() for t in (case.x, case.residual, case.weight)
    )
    numbers = {"eps": case.eps, "weight_offset": case.weight_offset, "casting": case.casting}
    found = rms_norm(x, weight, residual=residual, backend=backend, **numbers)
    outputs = found if residual is not None else (found,)
    used, incoming = zip(
        *((output, dy) for output, dy in zip(outputs, (case.dy, case.ds), strict=False) if dy is not None), strict=True
    )
    gradients = iter(torch.autograd.grad(used, [t for t in (x, residual, weight) if t is not None], incoming))
    results = {"y": outputs[0].detach(), "dx": next(gradients)}
    if residual is not None:
        results["s"] = outputs[1].detach()
        assert torch.equal(next(gradients), results["dx"]), "x and residual have the same gradient"
    if weight is not None:
        results["dweight"] = next(gradients)
    return results


@dataclass(frozen=True)
class Where:
    """As the fixture of that name has it, for tests that name the back end themselves."""

    backend: str
    device: str


def fingerprint(tensor):
    """A hash of the memory that a tensor views, gaps included."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return hashlib.sha256(memory.cpu().numpy().tobytes()).hexdigest()


def check(where, case):
    before = [fingerprint(tensor) for tensor in case.tensors]
    results = run(where.backend, case)
    assert before == [fingerprint(tensor) for tensor in case.tensors], "an argument was modified"
    references = expected(
        case.x, case.weight, case.dy, case.eps,
        residual=case.residual, ds=case.ds, weight_offset=case.weight_offset, llama=case.options.llama,
        ds_added_apart=where.backend == "pytorch" and case.ds is not None,
    )  # fmt: skip
    assert results.keys() == references.keys()
    assert results["y"].is_contiguous()
    for part, actual in results.items():
        assert actual.dtype == (case.weight.dtype if part == "dweight" else case.x.dtype)
        assert actual.shape == references[part].value.shape
        share = references[part].share_of_bound(actual)
        assert share <= 1, f"{part} of {tuple(case.x.shape)} {case.x.dtype}: {share:.3g} times the bound"


@st.composite
def shapes(draw):
    lead = draw(st.lists(st.integers(1, 5), max_size=3))
    return (*lead, draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 511, 768, 1030]))))


@st.composite
def cases(draw, device, dtypes=DTYPES):
    """Any shape, dtypes, layouts and options that the public function takes."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(shapes())
    weight_dtype = draw(st.sampled_from([None, *NARROW, *([torch.float64] if dtype == torch.float64 else [])]))

    def like_x(seed):
        return laid_out(draw(st.sampled_from(LAYOUTS)), seed, shape, dtype, device)

    residual = draw(st.booleans())
    return Case(
        x=like_x(1),
        dy=like_x(2),
        weight=None if weight_dtype is None else random(3, shape[-1:], weight_dtype, device),
        residual=like_x(4) if residual else None,
        ds=like_x(5) if residual and draw(st.booleans()) else None,
        eps=draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        weight_offset=draw(st.sampled_from([0.0, 1.0, -0.75])),
        casting=draw(st.sampled_from(CASTINGS)),
    )


@settings(bounded, max_examples=40)
@given(data=st.data())
def test_random_cases(where, data):
    check(where, data.draw(cases(where.device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 100, 511, 4096, 4097])
def test_widths(where, n, dtype):
    check(where, made(70 if n < 1000 else 5, n, dtype, where.device, residual=True))


@pytest.mark.parametrize(("n", "casting"), [(16384, "exact"), (20001, "llama"), (40000, "exact")])
def test_rows_wider_than_a_block(where, n, casting):
    check(where, made(3, n, torch.bfloat16, where.device, residual=n != 16384, weight_offset=1.0, casting=casting))


def test_more_rows_than_one_partial_sum_holds(where):
    check(where, made(1000, 24, torch.float32, where.device))


@pytest.mark.parametrize(
    ("dtype", "casting", "residual"),  # every pair of values
    [
        (torch.bfloat16, "exact", True),
        (torch.bfloat16, "llama", False),
        (torch.float64, "exact", False),
        (torch.float64, "llama", True),
    ],
)
def test_triton_row_in_blocks(kernel, monkeypatch, dtype, casting, residual):
    """The kernels for the widest rows, at a width that is fast under the interpreter."""
    if kernel.backend != "triton":
        pytest.skip("about the kernels in Triton")
    from rmsnorm_fused.impl import triton

    narrow = triton.Tiling(1, 64, warps=2, programs=1, stages=3)
    monkeypatch.setattr(triton, "forward_tiling", lambda columns, wide_bytes: narrow)
    monkeypatch.setattr(triton, "backward_tiling", lambda columns, wide_bytes: narrow)
    case = made(5, 150, dtype, kernel.device, residual=residual, weight_offset=1.0, casting=casting)
    check(kernel, case)
    if dtype != torch.float64:
        for scale in ("dynamic", 0.02):
            check_quantised(kernel, case, scale)


@pytest.mark.parametrize("rows", [2, 4])
def test_triton_rows_side_by_side(kernel, monkeypatch, rows):
    """Tiles of several rows, with a partial last tile, with and without folding of the terms of dweight."""
    if kernel.backend != "triton":
        pytest.skip("about the kernels in Triton")
    from rmsnorm_fused.impl import triton

    for warps in (1, 4):
        tiling = triton.Tiling(rows, 512, warps=warps, programs=2, stages=2)
        monkeypatch.setattr(triton, "backward_tiling", lambda columns, wide_bytes, tiling=tiling: tiling)
        check(kernel, made(13, 400, torch.bfloat16, kernel.device, residual=True))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("n", [64, 1000])
def test_llama_casting_is_hugging_faces(where, n, dtype):
    case = made(50, n, dtype, where.device, casting="llama")
    wide = case.x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + case.eps)
    theirs = case.weight * normalised.to(dtype)
    ours = run(where.backend, case)["y"]
    # They differ where x̂ in float32 lies between two numbers of dtype and is one place of float32 apart: one element in
    # 2¹⁵ for bfloat16, in 2¹² for float16, and many in float32, whose last place it is.
    assert (ours == theirs).double().mean() >= (0.5 if dtype == torch.float32 else 0.998)
    references = expected(case.x, case.weight, case.dy, case.eps, llama=True)
    assert references["y"].share_of_bound(ours) <= 1
    if dtype != torch.float32:
        rounded_once = run(where.backend, replace(case, casting="exact"))["y"]
        assert (rounded_once == theirs).double().mean() < 0.9, "the test would not see where it rounds"


@pytest.mark.parametrize("casting", CASTINGS)
def test_a_weight_about_zero_with_an_offset_is_gemmas(where, casting):
    case = made(20, 96, torch.bfloat16, where.device, weight_offset=1.0, casting=casting)
    shifted = replace(case, weight=1.0 + case.weight.float(), weight_offset=0.0)  # bfloat16 would not hold 1 + w
    ours, theirs = run(where.backend, case), run(where.backend, shifted)
    assert torch.equal(ours["y"], theirs["y"])
    assert torch.equal(ours["dx"], theirs["dx"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_may_span_more_than_2_31_elements(kernel, dtype):
    memory = torch.empty(2**31 + 400, dtype=dtype, device=kernel.device)  # only what is used is touched
    operands = [memory.as_strided((2, 3, 40), (2**31, 40, 1), first) for first in (0, 120, 240)]
    for seed, operand in enumerate(operands):
        operand.copy_(random(seed, (2, 3, 40), dtype, kernel.device))
    results = []
    for x, residual, dy in (operands, [operand.contiguous() for operand in operands]):
        x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
        y = rms_norm(x, eps=1e-6, backend=kernel.backend)
        both = rms_norm(x, eps=1e-6, residual=residual, backend=kernel.backend)
        results.append([y, *both, *torch.autograd.grad((y, *both), (x, residual), (dy, dy, dy))])
    for found, other in zip(*results, strict=True):
        assert torch.equal(found, other)


# ---- the two results of a call with a residual


def test_gradient_through_the_sum_alone_passes_on(where):
    case = made(6, 40, torch.bfloat16, where.device, residual=True)
    x, residual, weight = (t.clone().requires_grad_() for t in (case.x, case.residual, case.weight))
    _, s = rms_norm(x, weight, eps=1e-6, residual=residual, backend=where.backend)
    for found in torch.autograd.grad(s, (x, residual), case.ds):
        assert torch.equal(found, case.ds)


def test_the_sum_is_rounded_before_it_is_normalised(where):
    case = made(6, 200, torch.bfloat16, where.device, residual=True)
    y, s = rms_norm(case.x, case.weight, eps=1e-6, residual=case.residual, backend=where.backend)
    assert torch.equal(s, case.x + case.residual)
    assert torch.equal(y, rms_norm(s, case.weight, eps=1e-6, backend=where.backend))


@pytest.mark.parametrize(
    ("dtype", "m", "n", "in_blocks"),
    [
        (torch.bfloat16, 5, 24, False),
        (torch.float16, 1, 1, False),
        (torch.float16, 7, 768, False),
        (torch.bfloat16, 3, 150, True),
        (torch.float16, 3, 150, True),
    ],
)
def test_a_float32_residual_beside_16_bits(where, monkeypatch, dtype, m, n, in_blocks):
    # The compiled kernels take a residual in the dtype of x; what "auto" does with them is tested in their place.
    backend = where.backend if where.backend in ("triton", "pytorch") else "auto"
    if in_blocks and where.backend == "triton":
        from rmsnorm_fused.impl import triton

        narrow = triton.Tiling(1, 64, warps=2, programs=1, stages=3)
        monkeypatch.setattr(triton, "forward_tiling", lambda columns, wide_bytes: narrow)
        monkeypatch.setattr(triton, "backward_tiling", lambda columns, wide_bytes: narrow)
    x, dy = (random(seed, (m, n), dtype, where.device) for seed in (1, 2))
    residual, ds, weight = (
        random(seed, shape, torch.float32, where.device) for seed, shape in ((3, (m, n)), (4, (m, n)), (5, (n,)))
    )
    for tensor in (x, residual, weight):
        tensor.requires_grad_()
    y, s = rms_norm(x, weight, eps=1e-6, residual=residual, backend=backend)
    torch.autograd.backward((y, s), (dy, ds))
    assert (y.dtype, s.dtype, x.grad.dtype, residual.grad.dtype) == (dtype, torch.float32, dtype, torch.float32)
    assert torch.equal(s, x + residual)
    wide, w = s.detach().double(), weight.detach().double()
    rstd = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normalised, g = wide * rstd, dy.double() * w
    along = (g * normalised).mean(-1, keepdim=True)
    gradient = rstd * (g - normalised * along) + ds.double()
    # One rounding to the result's dtype, and roundings of float32: a few of each term, log2(n) and more of each sum.
    steps = 8 + n.bit_length()
    of_float32 = steps * 2.0**-24
    terms = rstd * (g.abs() + normalised.abs() * (g * normalised).abs().mean(-1, keepdim=True)) + ds.double().abs()
    half = torch.finfo(dtype).eps / 2
    assert_within(y, normalised * w, of_float32 * (normalised * w).abs(), half)
    assert_within(residual.grad, gradient, 4 * of_float32 * terms, 2.0**-24)
    assert_within(x.grad, gradient, 4 * of_float32 * terms, half)
    products = dy.double() * normalised
    assert_within(weight.grad, products.sum(0), (4 * steps + m) * 2.0**-24 * products.abs().sum(0), 2.0**-24)


def assert_within(found, exact, error, rounding):
    """|found − exact| ≤ error + rounding · (|exact| + error), or half of the smallest number of the dtype."""
    smallest = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps / 2
    allowed = error + (rounding * (exact.abs() + error)).clamp(min=smallest)
    assert ((found.detach().double() - exact).abs() <= allowed).all()


def test_neither_result_is_an_argument(where):
    x, residual = (random(seed, (3, 16), torch.float32, where.device) for seed in (1, 2))
    y, s = rms_norm(x, eps=1e-6, residual=residual, backend=where.backend)
    memory = [tensor.untyped_storage().data_ptr() for tensor in (x, residual, y, s)]
    assert len(set(memory)) == 4


def test_a_view_with_the_negative_bit_is_read_negated(where):
    x, weight = (random(seed, shape, torch.float32, where.device) for seed, shape in ((1, (4, 8)), (2, (8,))))
    y, s = rms_norm(
        x, weight, eps=1e-6, residual=x, backend=where.backend
    )  # from now on there may be a way past the dispatcher
    negated = torch._neg_view(x)  # as is the imaginary part of a conjugate
    assert torch.equal(rms_norm(negated, weight, eps=1e-6, residual=negated, backend=where.backend)[1], -s)
    assert torch.equal(rms_norm(s, torch._neg_view(weight), eps=1e-6, backend=where.backend), -y)


def test_a_kept_graph_gives_the_same_again(where):
    """Backward modifies neither the saved tensors nor the incoming gradients."""
    case = made(33, 72, torch.bfloat16, where.device, residual=True)
    x, residual, weight = (t.clone().requires_grad_() for t in (case.x, case.residual, case.weight))
    outputs = rms_norm(x, weight, eps=1e-6, residual=residual, backend=where.backend)
    before = [fingerprint(t) for t in (*case.tensors, *(output.detach() for output in outputs))]
    first, second = (
        torch.autograd.grad(outputs, (x, residual, weight), (case.dy, case.ds), retain_graph=True) for _ in range(2)
    )
    assert before == [fingerprint(t) for t in (*case.tensors, *(output.detach() for output in outputs))]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- quantised results


def check_quantised(where, case, scale):
    """``scale``: a number for a static one, or "dynamic"."""
    tensors = [t for t in (case.x, case.weight, case.residual) if t is not None]
    before = [fingerprint(tensor) for tensor in tensors]
    static = None if scale == "dynamic" else torch.full((1,), scale, device=where.device)
    found = rms_norm(
        case.x, case.weight, eps=case.eps, residual=case.residual, weight_offset=case.weight_offset,
        casting=case.casting, out_dtype=FLOAT8, scale="dynamic" if static is None else static, backend=where.backend,
    )  # fmt: skip
    assert before == [fingerprint(tensor) for tensor in tensors], "an argument was modified"
    results = list(found) if isinstance(found, tuple) else [found]
    y = results.pop(0)
    assert y.dtype == FLOAT8
    assert y.shape == case.x.shape
    assert y.is_contiguous()
    if case.residual is not None:
        assert torch.equal(results.pop(0), case.x + case.residual)
    if static is None:
        used = results.pop(0)
        assert used.dtype == torch.float32
        reference = expected_row_scales(case.x, case.weight, case.options, residual=case.residual)
        assert used.shape == reference.value.shape
        assert reference.share_of_bound(used) <= 1, "scales"
    else:
        used = static
    assert not results
    reference = expected_quantised(case.x, case.weight, used, case.options, residual=case.residual)
    share = reference.share_of_bound(y)
    assert share <= 1, f"float8 y of {tuple(case.x.shape)} {case.x.dtype}: {share:.3g} times the bound"


@settings(bounded, max_examples=30)
@given(data=st.data())
def test_random_quantised_cases(where, data):
    case = data.draw(cases(where.device, NARROW))
    check_quantised(where, case, data.draw(st.sampled_from(["dynamic", 0.01, 1.0, 30.0])))


@pytest.mark.parametrize("n", [4097, 40000])
def test_quantised_wide_rows(where, n):
    check_quantised(where, made(3, n, torch.bfloat16, where.device, residual=True), "dynamic")


def test_every_float8_and_every_tie(where):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FLOAT8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    around = [direction * number for number in (ties, codes) for direction in (1 - 2**-20, 1.0, 1 + 2**-20)]
    x = torch.cat([*around, torch.tensor([448.0, 463.9, 464.0, 500.0, 1e-8])])
    x = torch.cat([x, -x]).to(where.device)[None]
    # With such an eps rstd is 2⁻²⁰, so that a scale of 2⁻²⁰ leaves x itself to be rounded.
    scale = torch.tensor(2.0**-20, device=where.device)
    y = rms_norm(x, eps=2.0**40, out_dtype=FLOAT8, scale=scale, backend=where.backend)
    assert torch.equal(y.float(), x.clamp(-448, 448).to(FLOAT8).float())


def test_dynamic_scale_of_zeros_is_one_and_the_largest_is_448(where):
    x = torch.stack([torch.zeros(40), random(1, (40,), torch.float32, "cpu"), torch.full((40,), 1e-3)]).to(where.device)
    y, scales = rms_norm(x, eps=1e-6, out_dtype=FLOAT8, scale="dynamic", backend=where.backend)
    assert scales[0] == 1
    assert torch.equal(y[0].float(), torch.zeros_like(x[0]))
    assert torch.equal(y[1:].float().abs().amax(-1), torch.full((2,), 448.0, device=where.device))


infinity_times_zero = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy


def check_rows_with_nan(where, n, dtype):
    """Rows 1 to 3 have a NaN, an infinity (times rstd, which is 0) and a NaN at the end; the others are as without."""
    x, weight = random(1, (5, n), dtype, where.device), random(2, (n,), dtype, where.device)
    quantised = {"eps": 1e-6, "out_dtype": FLOAT8, "scale": "dynamic", "backend": where.backend}
    y, scales = rms_norm(x, weight, **quantised)
    odd = x.clone()
    odd[1, 0], odd[2, n // 2], odd[3, n - 1] = torch.nan, -torch.inf, torch.nan
    odd_y, odd_scales = rms_norm(odd, weight, **quantised)
    assert odd_scales.isnan().flatten().tolist() == [False, True, True, True, False]
    assert odd_y[1:4].float().isnan().all()
    for row in (0, 4):
        assert torch.equal(odd_y[row].float(), y[row].float())
        assert torch.equal(odd_scales[row], scales[row])
    weight[n // 3] = torch.nan
    y, scales = rms_norm(x, weight, **quantised)
    assert scales.isnan().all()
    assert y.float().isnan().all()


@infinity_times_zero
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("n", [1, 40, 3001])
def test_a_nan_shows_in_its_rows_scale_and_in_all_of_its_row(where, n, dtype):
    check_rows_with_nan(where, n, dtype)


@infinity_times_zero
def test_triton_rows_in_blocks_show_a_nan(kernel, monkeypatch):
    if kernel.backend != "triton":
        pytest.skip("about the kernels in Triton")
    from rmsnorm_fused.impl import triton

    narrow = triton.Tiling(1, 64, warps=2, programs=1, stages=3)
    monkeypatch.setattr(triton, "forward_tiling", lambda columns, wide_bytes: narrow)
    check_rows_with_nan(kernel, 150, torch.bfloat16)


@infinity_times_zero
def test_one_wide_row_shows_a_nan(where):
    """So few wide rows that the C++ kernel divides them over threads, and the CUDA kernel over blocks."""
    x = random(1, (1, 70001), torch.bfloat16, where.device)
    x[0, 5] = torch.inf
    y, scales = rms_norm(x, eps=1e-6, out_dtype=FLOAT8, scale="dynamic", backend=where.backend)
    assert scales.isnan().all()
    assert y.float().isnan().all()


@infinity_times_zero
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_nan_of_the_weight_with_every_bit_set_stays_one(where, dtype, bits):
    """Added to its lowest bits, a number for rounding would carry into the sign and leave a zero."""
    x, dy = random(1, (3, 70), dtype, where.device).requires_grad_(), random(2, (3, 70), dtype, where.device)
    weight = random(3, (70,), torch.float32, where.device)
    weight.view(torch.int32)[[1, 66]] = bits
    y = rms_norm(x, weight, eps=1e-6, backend=where.backend)
    assert y.isnan()[0].nonzero().flatten().tolist() == [1, 66]
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.isnan().all()


def test_a_static_scale_of_nan_shows_in_every_number(where):
    x, scale = random(1, (2, 24), torch.float32, where.device), torch.full((), torch.nan, device=where.device)
    assert rms_norm(x, eps=1e-6, out_dtype=FLOAT8, scale=scale, backend=where.backend).float().isnan().all()


def test_a_static_scale_of_any_rank_leaves_the_shape(where):
    x = random(1, (2, 24), torch.float32, where.device)
    y, *others = (
        rms_norm(
            x, eps=1e-6, out_dtype=FLOAT8, scale=torch.full(shape, 0.5, device=where.device), backend=where.backend
        )
        for shape in ((), (1,), (1, 1, 1))
    )
    assert y.shape == x.shape
    assert all(torch.equal(other.float(), y.float()) for other in others)


def test_a_scale_too_small_to_be_a_number_is_one(where):
    x, weight = random(1, (2, 24), torch.float32, where.device), torch.full((24,), 1e-44, device=where.device)
    y, scales = rms_norm(x, weight, eps=1e-6, out_dtype=FLOAT8, scale="dynamic", backend=where.backend)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(y.float(), torch.zeros_like(x))


# ---- sizes and magnitudes at the edge


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 5), (2, 3, 0)])
@pytest.mark.parametrize("residual", [True, False])
def test_empty(where, shape, residual):
    x, dy = (torch.empty(shape, device=where.device) for _ in range(2))
    weight = torch.ones(shape[-1], device=where.device)
    results = run(where.backend, Case(x, dy, weight, *((dy, dy) if residual else ())))
    assert all(results[part].shape == shape for part in results if part != "dweight")
    assert torch.equal(results["dweight"], torch.zeros(shape[-1], device=where.device))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_empty_quantised(where, shape):
    x = torch.empty(shape, device=where.device)
    y, s, scales = rms_norm(
        x, eps=1e-6, residual=x, out_dtype=FLOAT8, scale="dynamic", backend=where.backend
    )  # fmt: skip
    assert y.shape == s.shape == shape
    assert y.dtype == FLOAT8
    assert torch.equal(scales, torch.ones(*shape[:-1], 1, device=where.device))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (torch.float16, (0.0, 1e-4, 1.0, 100.0, 1.5e4)),  # squares beyond float16's range, and sums of them
        (torch.bfloat16, (0.0, 1e-15, 1e-4, 1e4, 1e17)),  # squares near the ends of float32's range
        (torch.float32, (0.0, 1e-15, 1e-4, 1e4, 1e17)),
        (torch.float64, (0.0, 1e-100, 1.0, 1e100, 1e150)),
    ],
    ids=str,
)
def test_rows_of_all_magnitudes(where, dtype, sizes):
    if where.backend == "pytorch":  # whose derivative, autograd's, has the cube of rstd in it
        sizes = [min(size, 1e10) for size in sizes]
    case = made(len(sizes), 64, dtype, where.device)
    check(where, replace(case, x=case.x * torch.tensor(sizes, dtype=dtype, device=where.device)[:, None]))


def test_a_mean_far_from_zero_costs_nothing(where):
    """RMSNorm subtracts no mean: a large offset causes no cancellation forward, and an allowed one backward."""
    for dtype in DTYPES:
        case = made(8, 300, dtype, where.device)
        check(where, replace(case, x=case.x + 300))


# ---- the same bits


@pytest.mark.parametrize("n", [200, 4096])
def test_a_row_does_not_depend_on_the_others(kernel, n):
    x, residual = (random(seed, (37, n), torch.bfloat16, kernel.device) for seed in (1, 2))
    weight = random(3, (n,), torch.bfloat16, kernel.device)

    def results(x, residual):
        plain = rms_norm(x, weight, eps=1e-6, backend=kernel.backend)
        quantised, scales = rms_norm(
            x, weight, eps=1e-6, out_dtype=FLOAT8, scale="dynamic", backend=kernel.backend
        )  # fmt: skip
        return (
            plain,
            *rms_norm(x, weight, eps=1e-6, residual=residual, backend=kernel.backend),
            quantised.float(),
            scales,
        )

    whole = results(x, residual)
    for row in (slice(0, 1), slice(17, 18), slice(30, 37)):
        assert all(torch.equal(a[row], b) for a, b in zip(whole, results(x[row], residual[row]), strict=True))


@pytest.mark.parametrize(
    ("dtype", "n", "residual"),  # every pair of values; rows of 1024 lie on lines of the cache
    [
        (torch.float32, 1024, False),
        (torch.float32, 1000, True),
        (torch.bfloat16, 1024, True),
        (torch.bfloat16, 1000, False),
    ],
)
def test_a_result_past_the_caches_is_that_in_them(kernel, dtype, n, residual):
    """Results of half of the last-level cache or more are written by streaming stores, and s in another pass."""
    if kernel.backend != "cpp":
        pytest.skip("about a CPU's caches")
    if (half := last_level_cache() // 2) > 64 << 20:
        pytest.skip(f"half of the last-level cache, {half >> 20} MiB, is a lot for a test")
    rows = half // (n * dtype.itemsize) + 5
    case = made(rows, n, dtype, "cpu", residual=residual)
    whole = run("cpp", case)
    for part in (slice(0, 37), slice(rows - 41, rows)):
        cut = {name: getattr(case, name)[part] for name in ("x", "dy", *(("residual", "ds") if residual else ()))}
        in_cache = run("cpp", replace(case, **cut))
        assert all(torch.equal(whole[name][part], in_cache[name]) for name in in_cache.keys() - {"dweight"})
    if (dtype, n) == (torch.float32, 1024):  # the same pass adds to dweight, over all rows; float64 takes seconds
        reference = expected(case.x, case.weight, case.dy, case.eps, residual=case.residual, ds=case.ds)["dweight"]
        assert reference.share_of_bound(whole["dweight"]) <= 1


@pytest.mark.parametrize("n", [96, 9000])
def test_deterministic(kernel, n):
    if kernel.backend == "triton":
        pytest.skip("it is deterministic in every mode")
    case = made(300 if n < 1000 else 7, n, torch.float32, kernel.device, residual=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [run(kernel.backend, case) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(first[part], again[part]) for again in others for part in first)


@pytest.mark.parametrize("n", [96, 9000, 20000])
def test_triton_is_always_deterministic(kernel, n):
    if kernel.backend != "triton":
        pytest.skip("the others promise it in torch's deterministic mode")
    case = made(60 if n < 1000 else 7, n, torch.bfloat16, kernel.device)
    first, *others = [run(kernel.backend, case) for _ in range(2)]
    assert all(torch.equal(first[part], again[part]) for again in others for part in first)


def test_cpp_does_not_depend_on_the_number_of_threads(kernel):
    if kernel.backend != "cpp":
        pytest.skip("about threads of the CPU")
    case = made(500, 64, torch.float32, "cpu", residual=True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(run("cpp", case))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0][part], other[part]) for other in found[1:] for part in found[0])


# ---- at size, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pytorch", "triton", "cuda"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n", [1, 7, 64, 100, 511, 1000, 4096, 4097, 8192, 8200, 16384, 16400, 32768, 40000, 65536, 131072, 262144]
)
def test_widths_at_size_on_a_gpu(backend, n, dtype, residual):
    check(Where(backend, "cuda"), made(max((1 << 21) // n + 3, 5), n, dtype, "cuda", residual=residual))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_two_to_the_31_elements(backend):
    m, n = (1 << 19) + 3, 4096
    if torch.cuda.mem_get_info()[0] < 16 * m * n * 2:
        pytest.skip("needs 69 GB of free GPU memory")
    x, dy = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    results = run(backend, Case(x, dy, weight, residual=x, ds=dy))
    last = slice(m - 64, m)
    references = expected(x[last], weight, dy[last], 1e-6, residual=x[last], ds=dy[last])
    for part in ("y", "s", "dx"):
        assert references[part].share_of_bound(results[part][last]) <= 1, part
    del results
    quantised, scales = rms_norm(x, weight, eps=1e-6, out_dtype=FLOAT8, scale="dynamic", backend=backend)
    reference = expected_quantised(x[last], weight, scales[last], Options(1e-6))
    assert reference.share_of_bound(quantised[last]) <= 1

"""Tests the public functions on the prebuilt library; test_rmsnorm_prebuilt.py runs this without a compiler."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest
import torch

from native_build import missing_cxx
from rmsnorm_fused import rms_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT8 = torch.float8_e4m3fn
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16}


def check_value(actual: torch.Tensor, reference: torch.Tensor, name: str, flips: float = 0.0) -> None:
    """One rounding of the result, and float32 arithmetic (float64's for float64) on terms as large as the largest."""
    arithmetic = torch.finfo(torch.float64 if actual.dtype == torch.float64 else torch.float32).eps / 2
    floor = (torch.finfo(actual.dtype).eps / 2) * reference.abs().clamp(min=torch.finfo(actual.dtype).smallest_normal)
    bound = floor + (32 * arithmetic + flips) * reference.abs().max().clamp(min=1)
    worst = ((actual.double() - reference).abs() / bound).max().item()
    assert worst <= 1, f"{name}: {worst} of the bound"


def results(backend: str, tensors: dict[str, torch.Tensor | None], **options: object) -> dict[str, torch.Tensor]:
    leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in tensors.items() if name[0] != "d"}
    found = rms_norm(leaves["x"], leaves["weight"], eps=1e-6, residual=leaves["residual"], backend=backend, **options)
    outputs = found if isinstance(found, tuple) else (found,)
    wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf is not None}
    gradients = torch.autograd.grad(outputs, [*wanted.values()], [tensors["dy"], tensors["ds"]][: len(outputs)])
    return {**dict(zip(("y", "s"), outputs, strict=False)), **dict(zip(wanted, gradients, strict=True))}


def check_against_float64() -> None:
    shapes = ((1, 7), (130, 96), (3, 5000), (2, 70001))
    for dtype, shape, residual, offset in itertools.product(DTYPES, shapes, (False, True), (None, 0.0, 1.0)):
        # Few enough bits for the residual sum to be exact in bfloat16: float64 then sees the same s.
        x, other, dy, ds = ((torch.randn(shape) * 8).round().div(8).to(dtype) for _ in range(4))
        weight = None if offset is None else torch.randn(shape[1]).to(dtype)
        tensors = {"x": x, "residual": other if residual else None, "weight": weight, "dy": dy, "ds": ds}
        wide = {name: None if t is None else t.double() for name, t in tensors.items()}
        reference = results("pytorch", wide, weight_offset=offset or 0.0)
        for name, actual in results("cpp", tensors, weight_offset=offset or 0.0).items():
            check_value(actual.detach(), reference[name].detach(), f"{name} {dtype} {shape} {residual} {offset}")


def check_llama() -> None:
    """The rounded s·rstd is the formula's but where the last bit of rstd tips it over: never by more than one place."""
    for dtype in (torch.bfloat16, torch.float16):
        tensors = {
            "x": torch.randn(40, 3000).to(dtype), "residual": None, "weight": torch.randn(3000).to(dtype),
            "dy": torch.randn(40, 3000).to(dtype), "ds": None,
        }  # fmt: skip
        reference = results("pytorch", tensors, casting="llama")
        for name, actual in results("cpp", tensors, casting="llama").items():
            check_value(actual.detach(), reference[name].detach().double(), name, flips=torch.finfo(dtype).eps)
        same = results("cpp", tensors, casting="llama")["y"] == reference["y"]
        assert same.double().mean() > 0.999


def check_conversions() -> None:
    """Every bit pattern there and back, ties and subnormal numbers, against torch's own conversions."""
    for dtype, integers in BITS.items():
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(integers).view(dtype)
        for other in (torch.zeros_like(every), every.flip(0), every.roll(2**13 + 7), every.roll(1)):
            _, s = rms_norm(every, eps=1e-6, residual=other, backend="cpp")
            expected = every + other
            assert torch.equal(s.isnan(), expected.isnan())
            wrong = (s.view(integers) != expected.view(integers)) & ~expected.isnan()
            assert not wrong.any(), f"{dtype}: {every[wrong][:4]} + {other[wrong][:4]}"
    quantised = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    ties = (quantised[:-1] + quantised[1:]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(to)) for to in (-1e9, 0.0, 1e9)])
    random = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = torch.cat([quantised, ties, near, random, torch.tensor([448.0, 464.0, 480.0, 1e30, float("inf")])])
    values = torch.cat([values, -values])[None]
    # A row of ones with eps = 0 has rstd = 1: y is the weight.
    y = rms_norm(torch.ones_like(values), values[0], eps=0.0, out_dtype=FLOAT8, scale=torch.ones(1), backend="cpp")
    expected = values.clamp(-448, 448).to(FLOAT8)
    known = ~values.isnan()
    assert torch.equal(y.float()[known], expected.float()[known])
    assert y.float()[~known].isnan().all()


def check_quantised() -> None:
    for dtype, columns, residual in itertools.product(DTYPES[:3], (5, 3000, 70001), (False, True)):
        x, other = torch.randn(9, columns).to(dtype), torch.randn(9, columns).to(dtype)
        weight = torch.randn(columns).to(dtype)
        if not residual:
            x[4] = 0
        options = {"eps": 1e-6, "residual": other if residual else None, "out_dtype": FLOAT8, "scale": "dynamic"}
        y, *s, scales = rms_norm(x, weight, backend="cpp", **options)
        expected, *expected_s, expected_scales = rms_norm(x, weight, backend="pytorch", **options)
        assert all(torch.equal(*pair) for pair in zip(s, expected_s, strict=True))
        torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)
        if not residual:
            assert scales[4] == 1
        # float8 has three bits after the point, and 2^-10 is half of its smallest number.
        allowed = scales * (2.0**-10 + 1e-6) + expected.float().abs() * expected_scales * (2.0**-3 + 1e-5)
        assert ((y.float() * scales - expected.float() * expected_scales).abs() <= allowed).all()
        assert (y.float() == expected.float()).double().mean() > 0.99


def check_bits_do_not_depend_on_threads_or_other_rows() -> None:
    for dtype, (rows, columns) in itertools.product(DTYPES, ((3, 70001), (200, 1500))):
        x, residual, dy, ds = (torch.randn(rows, columns).to(dtype) for _ in range(4))
        tensors = {"x": x, "residual": residual, "weight": torch.randn(columns).to(dtype), "dy": dy, "ds": ds}
        torch.set_num_threads(1)
        alone = results("cpp", tensors)
        torch.set_num_threads(5)
        together = results("cpp", tensors)
        for name, result in alone.items():
            assert torch.equal(result, together[name]), name
        first = {name: t if name == "weight" else t[:1] for name, t in tensors.items()}
        for name, result in results("cpp", first).items():
            assert name == "dweight" or torch.equal(result, alone[name][:1]), name
        if dtype != torch.float64:
            dynamic = {"eps": 1e-6, "out_dtype": FLOAT8, "scale": "dynamic", "backend": "cpp"}
            y, scales = rms_norm(x, **dynamic)
            torch.set_num_threads(1)
            for result, again in zip((y, scales), rms_norm(x, **dynamic), strict=True):
                assert torch.equal(result.view(torch.uint8), again.view(torch.uint8))


def check_strides() -> None:
    fused = torch.randn(2, 5, 3 * 4 * 64)
    q = fused[..., :256].view(2, 5, 4, 64)
    assert not q.is_contiguous()
    assert torch.equal(rms_norm(q, eps=1e-6, backend="cpp"), rms_norm(q.contiguous(), eps=1e-6, backend="cpp"))
    misaligned = torch.randn(33 * 7 + 1)[1:].view(33, 7)
    assert torch.equal(
        rms_norm(misaligned, eps=1e-6, backend="cpp"), rms_norm(misaligned.clone(), eps=1e-6, backend="cpp")
    )


def check_compile() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y, s = rms_norm(x, weight, eps=1e-6, residual=residual, backend="cpp")
        return (y * s).sum()

    arguments = [torch.randn(6, 64), torch.randn(64), torch.randn(6, 64)]
    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        found.append(torch.autograd.grad(function(*leaves), leaves))
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)


def check_derivatives() -> None:
    x, weight, residual = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((2, 6), (6,), (2, 6)))

    def function(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x, weight, eps=1e-3, residual=residual, weight_offset=1.0, backend="cpp")

    torch.autograd.gradcheck(function, (x, weight, residual))
    torch.autograd.gradgradcheck(function, (x, weight, residual))


def check_errors() -> None:
    with pytest.raises(ValueError, match="weight: expected shape"):
        rms_norm(torch.ones(2, 8), torch.ones(7), eps=1e-6, backend="cpp")
    assert rms_norm(torch.ones(0, 8), torch.ones(8), eps=1e-6, backend="cpp").shape == (0, 8)


if __name__ == "__main__":
    assert missing_cxx() is not None
    assert shutil.which("nvcc") is None
    assert os.environ["RMSNORM_FUSED_LIBRARY"]
    torch.manual_seed(0)
    for name, check in [*globals().items()]:
        if name.startswith("check_") and name != "check_value":
            check()
    print("all checks passed")

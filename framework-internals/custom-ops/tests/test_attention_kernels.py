"""The attention kernels one by one against float64: on the CPU, on the emulated GPU, and on a GPU."""

import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from custom_ops.builds.loading import load
from custom_ops.operators.flash_attention import reference as formula
from native_build import find_nvcc

from .attention_kernels import CPU_FLAGS, PLAIN, SOURCES, Algorithm, Features, Kernels, build_kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Unit roundoffs. A 16-bit kernel rounds the probabilities and the output (backward also the gradients of the scores).
# fp32 on tensor cores keeps 22 bits of each operand and drops the product of the low parts, which is as large.
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-22, FP64: 2.0**-53}
FORWARD_ROUNDINGS = {BF16: 2, FP16: 2, FP32: 4, FP64: 16}
BACKWARD_ROUNDINGS = {BF16: 3, FP16: 3, FP32: 8, FP64: 32}


@dataclass(frozen=True)
class Case:
    algorithm: Algorithm
    dtype: torch.dtype
    head_size: int
    heads: tuple[int, int] = (2, 1)  # of queries, of keys
    lengths: tuple[int, int] = (70, 130)
    causal: bool = False
    scale: float | None = None
    magnitude: float = 1.0
    batch: int = 1
    deterministic: bool = False
    features: str = ""  # of FEATURES

    @property
    def factor(self) -> float:
        return self.head_size**-0.5 if self.scale is None else self.scale


def make_inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int, magnitude: float, *size: int) -> torch.Tensor:
        x = torch.randn(case.batch, heads, length, *size, generator=generator) * magnitude
        return x.to(case.dtype).to(device)

    (heads_q, heads_kv), (seq_q, seq_kv) = case.heads, case.lengths
    q = draw(heads_q, seq_q, case.magnitude, case.head_size)
    k = draw(heads_kv, seq_kv, 1 / case.magnitude, case.head_size)
    v = draw(heads_kv, seq_kv, case.magnitude, case.head_size)
    grad_out = draw(heads_q, seq_q, case.magnitude, case.head_size)
    grad_lse = torch.randn(case.batch, heads_q, seq_q, generator=generator).to(FP64 if case.dtype == FP64 else FP32)
    return q, k, v, grad_out, grad_lse.to(device)


# What a call may have beside a causal mask, from the case, the dtype of lse and a source of random numbers.
FEATURES: dict[str, Callable[[Case, torch.dtype, torch.Generator], Features]] = {
    "": lambda case, wide, generator: PLAIN,
    "window": lambda case, wide, generator: Features(17, 40),
    "left window": lambda case, wide, generator: Features(30, 0),
    "cap": lambda case, wide, generator: Features(softcap=2.0),
    "sinks": lambda case, wide, generator: Features(sinks=torch.randn(case.heads[0], generator=generator).to(wide)),
    "bias": lambda case, wide, generator: Features(
        softcap=3.0, bias=torch.randn(1, case.heads[0], *case.lengths, generator=generator).to(case.dtype)
    ),
    "added": lambda case, wide, generator: Features(
        bias=torch.randn(case.batch, case.heads[0], *case.lengths, generator=generator).to(case.dtype)
    ),
    "of keys": lambda case, wide, generator: Features(
        window_left=60, bias=torch.randn(case.batch, 1, 1, case.lengths[1], generator=generator).to(case.dtype)
    ),
    "masked rows": lambda case, wide, generator: Features(
        bias=torch.zeros(1, 1, *case.lengths, dtype=case.dtype).index_fill(2, torch.tensor([0, 3]), -math.inf)
    ),
    "alibi": lambda case, wide, generator: Features(
        alibi_slopes=torch.rand(case.heads[0], generator=generator).to(wide)
    ),
    "packed": lambda case, wide, generator: packed(case),
    "all": lambda case, wide, generator: replace(
        packed(case), window_left=9, window_right=5, softcap=2.0,
        sinks=torch.randn(case.heads[0], generator=generator).to(wide),
    ),
}  # fmt: skip


def packed(case: Case) -> Features:
    """Four sequences, one of them without queries and one without keys."""
    starts = [
        torch.tensor([0, length // 3, length // 3 + middle[0], length // 3 + sum(middle), length], dtype=torch.int32)
        for length, middle in zip(case.lengths, ((0, 7), (11, 0)), strict=True)
    ]
    return Features(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])


def make_features(case: Case, device: str) -> Features:
    wide = FP64 if case.dtype == FP64 else FP32
    features = FEATURES[case.features](case, wide, torch.Generator().manual_seed(1))
    return replace(
        features, **{name: x.to(device) for name, x in vars(features).items() if isinstance(x, torch.Tensor)}
    )


def reference(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: Features = PLAIN
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output and log-sum-exp in float64, and the leaves that they are differentiable in; a bias is the last one."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in features.arguments]
    if features.bias is not None:
        leaves.append(features.bias.double().expand(*q.shape[:3], k.shape[2]).clone().requires_grad_())
        exact[4] = leaves[3]
    out, lse = formula(*leaves[:3], case.causal, case.factor, *exact)  # type: ignore[arg-type]
    return out, lse, leaves


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert not got.isnan().any(), "an element was not written, or is NaN"
    difference, size = (got.double() - expected).norm().item(), expected.norm().item()
    return difference / size if size > 0 else difference


def check(kernels: Kernels, case: Case, device: str) -> None:
    """Forward and backward with ``case.algorithm``, each within its roundings of float64."""
    q, k, v, grad_out, grad_lse = make_inputs(case, device)
    features = make_features(case, device)
    choices = {"causal": case.causal, "scale": case.scale, "algorithm": case.algorithm, "features": features}
    out, lse = kernels.forward(q, k, v, **choices)
    expected, expected_lse, leaves = reference(case, q, k, v, features)
    alone = expected_lse == -math.inf  # queries that see no key
    assert lse[alone].eq(-math.inf).all()
    assert out[alone].eq(0).all()
    bound = FORWARD_ROUNDINGS[case.dtype] * ROUNDOFF[case.dtype]
    errors = {"out": relative_error(out, expected), "lse": relative_error(lse[~alone], expected_lse[~alone])}
    assert max(errors.values()) < bound, (errors, bound)
    empty = 0.0 if kernels.machine in CPU_FLAGS else math.nan  # the GPU's kernels write every element
    bias_gradient = None if features.bias is None else torch.full_like(leaves[3], empty, dtype=case.dtype)
    gradients = kernels.backward(
        q, k, v, out, lse, grad_out, grad_lse=grad_lse, deterministic=case.deterministic, bias_gradient=bias_gradient,
        **choices,
    )  # fmt: skip
    exact = torch.autograd.grad(
        [expected, expected_lse], leaves, [grad_out.double(), grad_lse.double().masked_fill(alone, 0.0)]
    )
    found = [*gradients, *([] if bias_gradient is None else [bias_gradient])]
    errors = {name: relative_error(x, y) for name, x, y in zip(("dq", "dk", "dv", "dbias"), found, exact, strict=False)}
    bound = BACKWARD_ROUNDINGS[case.dtype] * ROUNDOFF[case.dtype]
    assert max(errors.values()) < bound, (errors, bound)


needs_cuda_headers = pytest.mark.skipif(find_nvcc() is None, reason="needs CUDA's headers, which come with nvcc")


@pytest.fixture(
    params=[
        pytest.param("emulator", marks=needs_cuda_headers),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available() or find_nvcc() is None, reason="needs a CUDA GPU and nvcc"
                ),
            ],
        ),
    ]
)
def tensor_cores(request: pytest.FixtureRequest) -> tuple[Kernels, str]:
    """The kernels, and the device of their tensors."""
    if request.param == "cuda":
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the kernels are built for sm_90a here")
        return build_kernels("cuda"), "cuda"
    return build_kernels("emulator"), "cpu"


MMA, WGMMA, NAIVE = Algorithm.MMA, Algorithm.WGMMA, Algorithm.NAIVE


def slow(case: Case | Algorithm) -> Any:
    return pytest.param(case, marks=pytest.mark.slow)


CASES = [
    Case(MMA, BF16, 64),
    slow(Case(MMA, FP16, 72, lengths=(70, 90), causal=True)),
    Case(MMA, BF16, 128, heads=(3, 3), lengths=(65, 40), causal=True),
    Case(MMA, BF16, 200, lengths=(40, 50), causal=True),
    slow(Case(MMA, FP32, 64, batch=2)),
    Case(MMA, FP32, 40, lengths=(70, 60), causal=True, magnitude=1e3),
    slow(Case(MMA, FP32, 120, lengths=(70, 40), causal=True)),
    Case(MMA, FP32, 256, heads=(1, 1), lengths=(40, 40)),
    Case(WGMMA, BF16, 64, lengths=(200, 140)),
    # Several blocks of queries for each multiprocessor, of which one warpgroup or more has no query.
    Case(WGMMA, FP16, 64, heads=(3, 1), lengths=(230, 70), batch=2),
    slow(Case(WGMMA, BF16, 32, heads=(4, 2), lengths=(330, 330), causal=True, batch=2)),
    Case(WGMMA, FP16, 72, lengths=(220, 220), causal=True),
    Case(WGMMA, BF16, 200, lengths=(150, 150), causal=True),
    slow(Case(WGMMA, FP16, 256, heads=(4, 2), lengths=(150, 70), batch=2)),
    # Causal: tiles of 96 queries and blocks of 128 keys.
    Case(WGMMA, BF16, 64, heads=(2, 1), lengths=(330, 330), causal=True, deterministic=True),
    Case(WGMMA, FP16, 120, lengths=(70, 290), deterministic=True),
    Case(WGMMA, BF16, 256, heads=(2, 1), lengths=(150, 150), causal=True, deterministic=True),
    slow(Case(WGMMA, FP32, 64, lengths=(130, 260))),
    slow(Case(WGMMA, FP32, 40, heads=(3, 1), lengths=(200, 200), causal=True, magnitude=1e3)),
    slow(Case(WGMMA, FP32, 120, lengths=(140, 140), causal=True)),
    Case(WGMMA, FP32, 128, heads=(1, 1), lengths=(70, 140)),
    Case(NAIVE, FP64, 24, heads=(4, 2), lengths=(20, 33), causal=True),
    Case(NAIVE, FP16, 33, lengths=(20, 33)),
    Case(NAIVE, FP32, 251, heads=(1, 1), lengths=(10, 12), causal=True),
    # Scales that do not suit the fused multiply-add of the softmax use a separate path.
    Case(WGMMA, FP32, 64, heads=(1, 1), lengths=(40, 40), causal=True, scale=-0.3),
    Case(WGMMA, BF16, 64, heads=(1, 1), lengths=(40, 40), causal=True, scale=-1.0),
    Case(MMA, FP32, 64, heads=(1, 1), lengths=(40, 40), causal=True, scale=0.0),
]


WITH_FEATURES = [
    Case(NAIVE, FP64, 24, lengths=(20, 33), causal=True, features="all"),
    slow(Case(NAIVE, FP32, 33, lengths=(20, 33), features="bias")),
    Case(NAIVE, FP64, 24, lengths=(33, 20), causal=True, features="alibi"),
    Case(NAIVE, FP64, 8, lengths=(20, 33), features="masked rows"),
    Case(NAIVE, FP16, 17, lengths=(20, 33), features="sinks"),
    slow(Case(MMA, BF16, 64, lengths=(150, 100), causal=True)),
    slow(Case(MMA, FP16, 64, lengths=(100, 150), features="window")),
    slow(Case(MMA, BF16, 72, features="cap")),
    Case(MMA, FP16, 64, features="bias"),
    slow(Case(MMA, BF16, 64, features="masked rows")),
    slow(Case(MMA, FP16, 64, causal=True, features="alibi", batch=2)),
    Case(MMA, BF16, 64, features="all"),
    slow(Case(MMA, FP32, 64, features="bias")),
    slow(Case(MMA, FP32, 128, lengths=(70, 60), features="all")),
    slow(Case(MMA, FP32, 128, lengths=(70, 60), causal=True, features="sinks")),
    slow(Case(MMA, BF16, 256, lengths=(70, 90), features="packed")),
    slow(Case(MMA, FP32, 256, heads=(1, 1), lengths=(40, 60), features="bias")),
    slow(Case(WGMMA, BF16, 64, lengths=(300, 200), causal=True)),
    Case(WGMMA, FP16, 64, heads=(3, 1), lengths=(230, 300), features="window"),
    slow(Case(WGMMA, BF16, 128, lengths=(150, 290), causal=True, features="left window", batch=2)),
    Case(WGMMA, FP16, 64, lengths=(200, 140), features="cap"),
    slow(Case(WGMMA, BF16, 64, lengths=(200, 140), features="sinks")),
    Case(WGMMA, FP16, 120, lengths=(250, 270), causal=True, features="packed"),
    slow(Case(WGMMA, BF16, 64, lengths=(250, 270), features="packed")),
    slow(Case(WGMMA, FP16, 64, lengths=(250, 370), features="all")),
    slow(Case(WGMMA, BF16, 256, lengths=(140, 270), features="all")),
    # A bias comes by tiles, and so does its gradient; where a window hides keys, the gradient is cleared before.
    Case(WGMMA, FP16, 64, lengths=(250, 328), features="added"),
    slow(Case(WGMMA, BF16, 64, heads=(4, 2), lengths=(250, 328), causal=True, features="added", batch=2)),
    Case(WGMMA, BF16, 120, lengths=(140, 200), features="of keys"),
    slow(Case(WGMMA, FP16, 128, lengths=(140, 136), features="masked rows")),
    slow(Case(WGMMA, FP16, 64, lengths=(140, 200), features="of keys", batch=2)),
    slow(Case(Algorithm.AUTO, BF16, 256, lengths=(140, 136), features="added")),
    slow(Case(Algorithm.AUTO, BF16, 64, lengths=(140, 136), features="bias")),
    # What one kernel does not take goes to another.
    slow(Case(Algorithm.AUTO, BF16, 64, lengths=(90, 70), causal=True, features="all", deterministic=True)),
    slow(Case(Algorithm.AUTO, FP16, 64, lengths=(40, 70), features="bias")),
    # A single query has a kernel of its own, and few of them the keys in parts.
    slow(Case(Algorithm.AUTO, BF16, 64, heads=(6, 2), lengths=(1, 1100), causal=True, batch=2)),
    Case(Algorithm.AUTO, BF16, 64, heads=(6, 2), lengths=(1, 300), causal=True, batch=2),
    Case(Algorithm.AUTO, FP16, 72, heads=(20, 1), lengths=(1, 100), features="left window"),
    slow(Case(Algorithm.AUTO, FP16, 128, heads=(2, 2), lengths=(1, 301), features="cap")),
    Case(Algorithm.AUTO, BF16, 64, heads=(2, 1), lengths=(1, 301), features="sinks", scale=-0.2),
    Case(Algorithm.AUTO, BF16, 64, lengths=(5, 700), causal=True, features="sinks"),
    slow(Case(Algorithm.AUTO, FP32, 40, lengths=(3, 600), causal=True)),
]


@pytest.mark.parametrize("case", CASES + WITH_FEATURES, ids=repr)
def test_kernels_agree_with_float64(tensor_cores: tuple[Kernels, str], case: Case) -> None:
    kernels, device = tensor_cores
    check(kernels, case, device)


@pytest.mark.parametrize("scale", [1e3, 1e7, 1e30])
@pytest.mark.parametrize("case", [Case(MMA, FP16, 64), Case(WGMMA, FP16, 64), Case(WGMMA, FP32, 64)], ids=repr)
def test_steep_scale_finds_the_largest_score(tensor_cores: tuple[Kernels, str], case: Case, scale: float) -> None:
    # Scores up to 10^31: the softmax is one row of V, and a rounded maximum must not make a probability overflow.
    kernels, device = tensor_cores
    case = replace(case, heads=(1, 1), lengths=(40, 60), scale=scale)
    q, k, v, *_ = make_inputs(case, device)
    out, lse = kernels.forward(q, k, v, scale=case.scale, algorithm=case.algorithm)
    expected, expected_lse, _ = reference(case, q, k, v)
    assert relative_error(out, expected) < FORWARD_ROUNDINGS[FP16] * ROUNDOFF[FP16]
    assert relative_error(lse, expected_lse) < 2.0**-20


@pytest.mark.parametrize("algorithm", [slow(MMA), WGMMA])
def test_long_rows_do_not_drift(tensor_cores: tuple[Kernels, str], algorithm: Algorithm) -> None:
    # A correction recomputed from an unrounded maximum is not exactly one where the maximum has not changed, and the
    # weight of the early tiles drifts off by some 2^-23 a tile: 1.3e-6 at this length. See NOTES.md.
    kernels, device = tensor_cores
    case = Case(algorithm, FP32, 64, heads=(1, 1), lengths=(16, 4096))
    q, k, v, *_ = make_inputs(case, device)
    out, _ = kernels.forward(q, k, v, algorithm=algorithm)
    assert relative_error(out, reference(case, q, k, v)[0]) < 6e-7


@pytest.mark.parametrize(
    "case",
    [Case(WGMMA, BF16, 64, lengths=(130, 130), causal=True), Case(WGMMA, FP32, 64), slow(Case(MMA, FP32, 64))],
    ids=repr,
)
def test_strided_tensors(tensor_cores: tuple[Kernels, str], case: Case) -> None:
    kernels, device = tensor_cores
    q, k, v, grad_out, _ = make_inputs(case, device)
    out, lse = kernels.forward(q, k, v, causal=case.causal, algorithm=case.algorithm)
    choices = {"causal": case.causal, "algorithm": case.algorithm, "deterministic": True}
    gradients = kernels.backward(q, k, v, out, lse, grad_out, **choices)

    def strided(x: torch.Tensor) -> torch.Tensor:  # (batch, sequence, heads, head_size) in memory
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    sides = [strided(x) for x in (q, k, v, out, grad_out)]
    again, lse_again = kernels.forward(*sides[:3], causal=case.causal, algorithm=case.algorithm, out=strided(out))
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)
    from_strided = kernels.backward(*sides[:4], lse, sides[4], **choices)
    assert all(torch.equal(x, y) for x, y in zip(from_strided, gradients, strict=True))


FAILED_CALLS = """
#include <cstdio>
#include "cuda/device/primitives.cuh"
using namespace custom_ops::flash_attention;
int main() {
  const char* words = explain(cudaSetDevice(12345));
  const bool told = words != nullptr, left = cudaPeekAtLastError() != cudaSuccess;
  const Device first = device(), again = device();
  const bool same = first.capability == again.capability && first.multiprocessors == again.multiprocessors;
  std::printf("%d %d %d %d", told, left, same, first.capability);
}
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_nvcc() is None, reason="needs a CUDA GPU and nvcc")
def test_a_failed_call_leaves_no_error_behind(tmp_path: Path) -> None:
    (tmp_path / "failed.cu").write_text(FAILED_CALLS)
    command = [str(find_nvcc()), "-std=c++17", "-I", str(SOURCES), str(tmp_path / "failed.cu")]
    subprocess.run([*command, "-o", str(tmp_path / "failed")], check=True)
    answer = subprocess.run([str(tmp_path / "failed")], capture_output=True, text=True, check=True)
    major, minor = torch.cuda.get_device_capability(0)
    assert answer.stdout == f"1 0 1 {10 * major + minor}"


@pytest.mark.parametrize("algorithm", [MMA, WGMMA])
@pytest.mark.parametrize("stride", [0, 3])
def test_a_dimension_of_size_one_has_any_stride(
    tensor_cores: tuple[Kernels, str], algorithm: Algorithm, stride: int
) -> None:
    kernels, device = tensor_cores
    case = Case(algorithm, BF16, 64, heads=(1, 1), lengths=(1, 40))
    q, k, v, grad_out, _ = make_inputs(case, device)
    out, lse = kernels.forward(q, k, v, algorithm=algorithm)
    gradients = kernels.backward(q, k, v, out, lse, grad_out, algorithm=algorithm, deterministic=True)

    def odd(x: torch.Tensor) -> torch.Tensor:
        steps = [stride if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, steps)

    again, lse_again = kernels.forward(odd(q), odd(k), odd(v), algorithm=algorithm, out=odd(torch.empty_like(q)))
    assert torch.equal(again, out)
    assert torch.equal(lse_again, lse)
    sides = [odd(x) for x in (q, k, v, out)]
    others = kernels.backward(*sides, lse, odd(grad_out), algorithm=algorithm, deterministic=True)
    assert all(torch.equal(x, y) for x, y in zip(others, gradients, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("heads", [0, 2])
def test_keys_that_no_query_reads_have_zero_gradients(
    tensor_cores: tuple[Kernels, str], dtype: torch.dtype, heads: int
) -> None:
    kernels, device = tensor_cores
    q, k, v, grad_out, _ = make_inputs(Case(Algorithm.AUTO, dtype, 64, lengths=(5, 70)), device)
    none, no_grad = (x[:, :heads, : 0 if heads else None].contiguous() for x in (q, grad_out))
    out, lse = kernels.forward(none, k, v)
    dq, dk, dv = kernels.backward(none, k, v, out, lse, no_grad)
    assert dq.numel() == 0
    assert dk.eq(0).all()
    assert dv.eq(0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_nvcc() is None, reason="needs a CUDA GPU and nvcc")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "head_size"), [(BF16, 64), (BF16, 128), (FP16, 256), (FP32, 128)], ids=str)
def test_results_are_the_same_every_time(dtype: torch.dtype, head_size: int, causal: bool) -> None:
    kernels = build_kernels("cuda")
    case = Case(WGMMA, dtype, head_size, heads=(8, 2), lengths=(2000, 2000), causal=causal, batch=2)
    q, k, v, grad_out, _ = make_inputs(case, "cuda")
    out, lse = kernels.forward(q, k, v, causal=causal, algorithm=WGMMA)

    def backward(deterministic: bool) -> tuple[torch.Tensor, ...]:
        return kernels.backward(
            q, k, v, out, lse, grad_out, causal=causal, algorithm=WGMMA, deterministic=deterministic
        )

    gradients = backward(deterministic=True)
    for _ in range(5):
        assert torch.equal(kernels.forward(q, k, v, causal=causal, algorithm=WGMMA)[0], out)
        assert all(torch.equal(x, y) for x, y in zip(backward(deterministic=True), gradients, strict=True))
        # In any order, only dq differs.
        assert all(torch.equal(x, y) for x, y in zip(backward(deterministic=False)[1:], gradients[1:], strict=True))


def test_refusals_name_the_reason(tensor_cores: tuple[Kernels, str]) -> None:
    kernels, device = tensor_cores

    def forward(case: Case, offset: int = 0) -> None:
        q, k, v, *_ = make_inputs(case, device)
        q = torch.cat([q.new_zeros(offset), q.flatten()])[offset:].view(q.shape)
        kernels.forward(q, k, v, scale=case.scale, algorithm=case.algorithm)

    with pytest.raises(ValueError, match="multiples of 8 up to 256"):
        forward(Case(MMA, BF16, 33))
    with pytest.raises(ValueError, match="float64 has no tensor-core kernel"):
        forward(Case(WGMMA, FP64, 64))
    with pytest.raises(ValueError, match="not a multiple of the number of key/value heads"):
        forward(Case(NAIVE, FP32, 64, heads=(3, 2)))
    with pytest.raises(ValueError, match="16-byte aligned"):
        forward(Case(MMA, BF16, 64), offset=1)
    with pytest.raises(ValueError, match="head sizes up to 128"):
        forward(Case(WGMMA, FP32, 256))
    with pytest.raises(ValueError, match="scale is not finite"):
        forward(Case(NAIVE, FP32, 64, scale=math.inf))


@pytest.mark.parametrize("algorithm", [Algorithm.AUTO, NAIVE])
def test_auto_serves_what_the_tensor_cores_do_not(tensor_cores: tuple[Kernels, str], algorithm: Algorithm) -> None:
    kernels, device = tensor_cores
    check(kernels, Case(algorithm, FP32, 33, lengths=(20, 30)), device)
    q, k, v, *_ = make_inputs(Case(algorithm, FP32, 16, lengths=(5, 3)), device)
    out, lse = kernels.forward(q, k[:, :, :0], v[:, :, :0], algorithm=algorithm)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()


CPU_CASES = [
    Case(Algorithm.AUTO, dtype, head_size, heads, lengths, causal, batch=2)
    for dtype in (FP64, FP32, BF16, FP16)
    for head_size, heads, lengths, causal in [(24, (4, 2), (70, 133), True), (65, (2, 2), (133, 70), False)]
]


@pytest.mark.slow  # compiles the CPU's kernels by themselves; the operator's tests run them out of the library
@pytest.mark.parametrize("case", CPU_CASES, ids=repr)
def test_cpu_agrees_with_float64(case: Case) -> None:
    check(build_kernels("cpu"), case, "cpu")


TILES = [
    Case(Algorithm.AUTO, BF16, head_size, heads, lengths, causal, scale)
    for head_size, heads, lengths, causal, scale in [
        (64, (2, 1), (64, 128), False, None),
        (24, (4, 2), (70, 133), True, -0.3),
        (65, (1, 1), (133, 70), False, None),
        (128, (1, 1), (2, 5), True, None),
        (256, (2, 1), (17, 49), False, 0.0),
        (80, (1, 1), (3, 1100), False, None),  # the keys in parts
    ]
]


def needs(*features: str) -> pytest.MarkDecorator:
    """Skip on a processor that lacks a feature that Linux tells."""
    flags = Path("/proc/cpuinfo")
    found = flags.read_text().split() if flags.is_file() else []
    return pytest.mark.skipif(not set(features) <= set(found), reason=f"needs a processor with {', '.join(features)}")


@needs("avx512_bf16")
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_tiles_agree_with_float64(case: Case) -> None:
    check(build_kernels("tiles"), case, "cpu")


@needs("amx_bf16", "amx_tile")
@pytest.mark.parametrize("case", TILES, ids=repr)
def test_amx_gives_the_bits_of_its_emulation(case: Case) -> None:
    load()  # asks Linux for the tiles' registers, for the whole process
    q, k, v, grad_out, _ = make_inputs(case, "cpu")
    found = []
    for machine in ("amx", "tiles"):
        kernels = build_kernels(machine)
        out, lse = kernels.forward(q, k, v, causal=case.causal, scale=case.scale)
        gradients = kernels.backward(q, k, v, out, lse, grad_out, causal=case.causal, scale=case.scale)
        found.append((out, lse, *gradients))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_cpu_takes_any_scale(scale: float) -> None:
    check(build_kernels("cpu"), Case(Algorithm.AUTO, FP64, 16, scale=scale, causal=True), "cpu")


def test_cpu_without_keys_and_without_queries() -> None:
    kernels = build_kernels("cpu")
    case = Case(Algorithm.AUTO, FP32, 16, lengths=(5, 3))
    q, k, v, grad_out, _ = make_inputs(case, "cpu")
    out, lse = kernels.forward(q, k[:, :, :0], v[:, :, :0])
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    none = q[:, :, :0]
    _, dk, dv = kernels.backward(none, k, v, none, lse[:, :, :0].contiguous(), grad_out[:, :, :0])
    assert dk.eq(0).all()
    assert dv.eq(0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_matches_scaled_dot_product_attention(causal: bool) -> None:
    case = Case(Algorithm.AUTO, FP64, 32, heads=(2, 2), lengths=(20, 35), causal=causal)
    for lengths in (case.lengths, case.lengths[::-1]):
        q, k, v, *_ = make_inputs(replace(case, lengths=lengths), "cpu")
        out, _ = build_kernels("cpu").forward(q, k, v, causal=causal)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)

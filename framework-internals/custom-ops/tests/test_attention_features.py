"""Windows, packed sequences, soft caps, sinks, biases and bottom-right masks of flash_attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import custom_ops
import lowering
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.flash_attention import reference


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


S, T = 70, 133
# Of 70 queries and 133 keys: one sequence has no query, and one no key.
PACKED = {"cu_seqlens_q": starts(20, 0, 9, 41), "cu_seqlens_k": starts(30, 11, 0, 92)}

FEATURES: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "bottom right": lambda dtype: {"causal": True},
    "window": lambda dtype: {"window_size": (17, 4)},
    "endless window": lambda dtype: {**PACKED, "window_size": (2**63 - 1, 2**63 - 1)},  # sys.maxsize for no limit
    "left window": lambda dtype: {"window_size": (20, -1), "causal": True},
    "cap": lambda dtype: {"softcap": 2.0, "causal": True},
    "sinks": lambda dtype: {"sinks": drawn(4, dtype=wide(dtype)), "window_size": (9, 0)},
    "bias": lambda dtype: {"attn_mask": drawn(4, S, T, dtype=dtype), "softcap": 3.0},
    "broadcast bias": lambda dtype: {"attn_mask": drawn(2, 1, 1, T, dtype=dtype)},
    "mask": lambda dtype: {"attn_mask": drawn(S, T).gt(0.5).index_fill(0, torch.tensor([3]), False)},
    "alibi": lambda dtype: {"alibi_slopes": drawn(2, 4).abs(), "causal": True},
    "packed": lambda dtype: {**PACKED, "causal": True},
    "everything": lambda dtype: {
        **PACKED, "window_size": (16, 4), "softcap": 5.0, "sinks": drawn(4), "alibi_slopes": drawn(4).abs(),
        "attn_mask": drawn(1, 4, S, 1, dtype=dtype),
    },
}  # fmt: skip


def operands(dtype: torch.dtype, features: dict[str, Any], size: int = 24) -> list[Tensor]:
    rows = (S, T, T)
    if "cu_seqlens_q" in features:
        shapes = [(n, heads, size) for n, heads in zip(rows, (4, 2, 2), strict=True)]
    else:
        shapes = [(2, heads, n, size) for n, heads in zip(rows, (4, 2, 2), strict=True)]
    return [drawn(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def exact(q: Tensor, k: Tensor, v: Tensor, features: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The formula in float64 with the public function's arguments."""
    packed = "cu_seqlens_q" in features
    q, k, v = (x.transpose(0, 1).unsqueeze(0) if packed else x for x in (q, k, v))
    mask = features.get("attn_mask")
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
        mask = mask[(None,) * (4 - mask.dim())]
    out, lse = reference(
        q, k, v, features.get("causal", False), None, *features.get("window_size", (-1, -1)),
        features.get("softcap", 0.0), features.get("sinks"), mask, features.get("alibi_slopes"),
        features.get("cu_seqlens_q"), features.get("cu_seqlens_k"),
    )  # fmt: skip
    return (out.squeeze(0).transpose(0, 1), lse.squeeze(0)) if packed else (out, lse)


def learned(features: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: features[name]
        for name in ("sinks", "attn_mask")
        if name in features and features[name].dtype != torch.bool
    }


# A 16-bit dtype rounds the probabilities and the result, and backward the gradients of the scores too; float32 and
# float64 lose a few bits in each sum of up to 133 products.
ROUNDINGS = {torch.bfloat16: 3, torch.float16: 3, torch.float32: 32, torch.float64: 64}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_results_and_gradients_against_float64(name: str, dtype: torch.dtype, device: str) -> None:
    features = FEATURES[name](dtype)
    for x in learned(features).values():
        x.requires_grad_()
    leaves = [*operands(dtype, features), *learned(features).values()]
    on_device = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in features.items()}
    out, lse = custom_ops.flash_attention(*(x.to(device) for x in leaves[:3]), **on_device)
    alone = lse.cpu() == float("-inf")
    grads = [drawn(*out.shape, dtype=dtype), drawn(*lse.shape, dtype=lse.dtype).masked_fill(alone, 0.0)]
    gradients = torch.autograd.grad([out, lse], leaves, [x.to(device) for x in grads])

    twins = {n: x.detach().double().requires_grad_() for n, x in learned(features).items()}
    exact_leaves = [*(x.detach().double().requires_grad_() for x in leaves[:3]), *twins.values()]
    right, right_lse = exact(*exact_leaves[:3], {**features, **twins})
    assert torch.equal(alone, right_lse == float("-inf"))
    assert out.cpu()[alone.mT if "cu_seqlens_q" in features else alone].eq(0).all()
    exact_gradients = torch.autograd.grad([right, right_lse], exact_leaves, [x.double() for x in grads])
    bound = ROUNDINGS[dtype] * torch.finfo(dtype).eps / 2
    for result, expected in zip((out, *gradients), (right, *exact_gradients), strict=True):
        assert (result.cpu().double() - expected).norm() <= bound * expected.norm()
    torch.testing.assert_close(
        lse.cpu().double()[~alone], right_lse[~alone], rtol=0, atol=64 * torch.finfo(wide(dtype)).eps * 16
    )


def test_a_causal_mask_is_aligned_at_the_last_key() -> None:
    q, k, v = operands(torch.float64, {})
    out = custom_ops.flash_attention(q, k[:, :, :], v, True)[0]
    expected = scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), causal_lower_right(S, T)
    )
    torch.testing.assert_close(out, expected)
    last = custom_ops.flash_attention(q[:, :, -1:], k, v, True)[0]  # one query beside a cache of keys
    torch.testing.assert_close(last, out[:, :, -1:])
    torch.testing.assert_close(last, custom_ops.flash_attention(q[:, :, -1:], k, v)[0])


@pytest.mark.parametrize("window", [(-1, -1), (5, 3)])
def test_packed_sequences_are_the_sequences_one_by_one(window: tuple[int, int]) -> None:
    q, k, v = operands(torch.float64, PACKED)
    out, lse = custom_ops.flash_attention(q, k, v, window_size=window, **PACKED)
    ends_q, ends_k = (PACKED[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for i in range(4):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        alone = custom_ops.flash_attention(
            *(x[of].transpose(0, 1).unsqueeze(0) for x, of in ((q, rows), (k, keys), (v, keys))), window_size=window
        )
        torch.testing.assert_close(out[rows], alone[0].squeeze(0).transpose(0, 1))
        torch.testing.assert_close(lse[:, rows], alone[1].squeeze(0))


@pytest.mark.parametrize("window", [(T, S), (-1, -1), (T - 1, S - 1)])
def test_a_window_that_hides_nothing_gives_the_bits_without_one(window: tuple[int, int], device: str) -> None:
    q, k, v = (x.to(device) for x in operands(torch.float32, {}))
    expected = custom_ops.flash_attention(q, k, v)
    results = custom_ops.flash_attention(q, k, v, window_size=window)
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    "name", ["window", "sinks", "bias", "packed", pytest.param("everything", marks=pytest.mark.slow)]
)
def test_opcheck(name: str) -> None:
    features = FEATURES[name](torch.float64)
    q, k, v = operands(torch.float64, features, size=8)
    if "cu_seqlens_q" in features:
        q, k, v = (x.detach().transpose(0, 1).unsqueeze(0).requires_grad_() for x in (q, k, v))
    mask = features.get("attn_mask")
    arguments = (
        q, k, v, features.get("causal", False), None, *features.get("window_size", (-1, -1)),
        features.get("softcap", 0.0), features.get("sinks"),
        None if mask is None else mask[(None,) * (4 - mask.dim())].requires_grad_(),
        features.get("alibi_slopes"), features.get("cu_seqlens_q"), features.get("cu_seqlens_k"),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.custom_ops.flash_attention.default, arguments)


SMALL: dict[str, dict[str, Any]] = {
    "window": {"window_size": (2, 1)},
    "cap and sinks": {"softcap": 1.5, "causal": True, "sinks": drawn(2)},
    "bias": {"attn_mask": drawn(2, 4, 5), "alibi_slopes": drawn(2).abs()},
    "packed": {"cu_seqlens_q": starts(3, 1), "cu_seqlens_k": starts(4, 1), "causal": True, "sinks": drawn(2)},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cap and sinks" else pytest.mark.slow) for name in SMALL]
)
def test_first_and_second_derivatives(name: str) -> None:
    features = SMALL[name]
    packed = "cu_seqlens_q" in features
    shapes = [(n, 2, 4) if packed else (1, 2, n, 4) for n in (4, 5, 5)]
    inputs = [*(drawn(*shape, seed=i) for i, shape in enumerate(shapes)), *learned(features).values()]

    def call(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return custom_ops.flash_attention(q, k, v, **{**features, **dict(zip(learned(features), others, strict=True))})

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("choice", [None, "formula"])
def test_compiled_in_one_graph(choice: lowering.Lowering | None) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        capped = {"window_size": (5, 0), "softcap": 4.0, "sinks": sinks, "lowering": choice}
        return custom_ops.flash_attention(q, k, v, **PACKED, **capped)[0]

    leaves = [*operands(torch.float32, PACKED), drawn(4, dtype=torch.float32).requires_grad_()]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for result, expected in zip(*(run(step_, leaves) for step_ in (compiled, step)), strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


def run(step: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out = step(*leaves)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_a_query_with_low_scores_alone(low: float) -> None:
    q, k, v = (drawn(1, 1, 6, 8, dtype=torch.float32, seed=seed) for seed in range(3))
    mask = torch.zeros(6, 6).index_fill(0, torch.tensor([2]), low)
    with lowering.choose("formula"):
        formula = torch.compile(custom_ops.flash_attention, backend="eager")(q, k, v, attn_mask=mask)[0]
    for out in (custom_ops.flash_attention(q, k, v, attn_mask=mask)[0], formula):
        torch.testing.assert_close(out[0, 0, 2], v[0, 0].mean(0) if low == -1e9 else torch.zeros(8))


def test_jacobians_of_every_operand() -> None:
    q, k, v, bias = (drawn(*shape) for shape in ((1, 2, 3, 4), (1, 1, 5, 4), (1, 1, 5, 4), (2, 3, 5)))
    sinks = drawn(2)

    def outcome(call: Callable[..., Any]) -> Any:
        return torch.func.jacrev(lambda *x: call(*x)[:2], argnums=tuple(range(5)))(q, k, v, sinks, bias)

    def own(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return custom_ops.flash_attention(q, k, v, True, softcap=2.0, sinks=sinks, attn_mask=bias)

    def peer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return reference(q, k, v, True, None, -1, -1, 2.0, sinks, bias[None])

    if custom_ops.build_info().autograd == "Python":
        pytest.skip("torch.func needs the derivative in C++")
    torch.testing.assert_close(outcome(own), outcome(peer))


MAGNITUDES = {torch.float64: (1e6, 1e9, 1e12, 1e100), torch.float16: (1e4, 6e4)}


@pytest.mark.parametrize("size", [64, 80])  # whose scale is a power of two, and is none
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_any_finite_magnitude(dtype: torch.dtype, size: int) -> None:
    v = drawn(1, 1, 2 * size, size, dtype=dtype)
    for magnitude in MAGNITUDES.get(dtype, (1e4, 1e5, 1e9, 1e17)):
        # Orthogonal rows: a query has one large score, of another size in each row, its negative, and zeros.
        rows = torch.eye(size, dtype=torch.float64) * magnitude * torch.linspace(0.5, 1, size, dtype=torch.float64)
        q, k = rows[None, None].to(dtype), torch.cat([-rows, rows])[None, None].to(dtype)
        out, lse = custom_ops.flash_attention(q, k, v)
        # All other weights are 0, and three operations are rounded: p·v, 1 / p and their product.
        torch.testing.assert_close(out, v[:, :, size:], rtol=2 * torch.finfo(dtype).eps, atol=0)
        score = q.double().square().sum(-1) * size**-0.5
        # The score, its factor and their product, ln 2 and the way back, and lse itself.
        torch.testing.assert_close(lse.double(), score, rtol=4 * torch.finfo(wide(dtype)).eps, atol=0)


@pytest.mark.parametrize("keys", [5, 1000])  # of one part and of several
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_of_any_finite_magnitude_chooses_its_key(dtype: torch.dtype, keys: int) -> None:
    eps, largest, absorbs = torch.finfo(dtype).eps, torch.finfo(dtype).max, 2**29 if dtype == torch.float64 else 1
    for high in (*(absorbs * x for x in (2.3e8, 9e8, 3.1e9, 5e10, 1e20)), 0.5 * largest, 0.8 * largest, largest):
        q, k, v = (drawn(1, 1, n, 16, dtype=dtype, seed=n).requires_grad_() for n in (3, keys, keys))
        mask = torch.zeros(keys, dtype=dtype)
        mask[[1, 2]] = torch.tensor([high * 0.9, high], dtype=dtype)
        out, lse = custom_ops.flash_attention(q, k, v, attn_mask=mask)
        # All other weights are 0, and three operations are rounded: p·v, 1 / p and their product.
        torch.testing.assert_close(out, v[:, :, 2:3].expand_as(out), rtol=2 * eps, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, float(mask[2])), rtol=torch.finfo(wide(dtype)).eps, atol=0)
        dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
        assert torch.equal(dv, torch.zeros_like(v).index_fill(2, torch.tensor([2]), 3))
        # That of the score is the difference of two sums of 16 products, of which one is of out, rounded.
        of_score = 34 * eps * v[:, :, 2].abs().sum()
        assert dq.abs().max() <= of_score * k.abs().max()
        assert dk.abs().max() <= 3 * of_score * q.abs().max()


def test_a_sink_of_any_finite_magnitude_takes_all() -> None:
    q, k, v = (drawn(1, 1, 6, 8, dtype=torch.float32, seed=n).requires_grad_() for n in range(3))
    for high in (1e9, torch.finfo(torch.float32).max):
        sinks = torch.tensor([high], requires_grad=True)
        out, lse = custom_ops.flash_attention(q, k, v, sinks=sinks)
        assert not out.any()
        assert (lse == high).all()
        assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), (q, k, v, sinks)))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = (drawn(1, 2, n, 8, seed=n).requires_grad_() for n in (6, 4, 4))
    sinks = torch.tensor([float("-inf"), 0.5], dtype=torch.float64, requires_grad=True)
    own, peer = (function(q, k, v, True, sinks=sinks) for function in (custom_ops.flash_attention, by_formula))
    torch.testing.assert_close(own, peer)  # zeros and -inf of the two queries that see no key, in the first head alone
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v, sinks)) for out, _ in (own, peer))
    torch.testing.assert_close(*gradients)


def by_formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return reference(q, k, v, causal, None, -1, -1, 0.0, sinks)


def test_checkpoints_with_a_graph() -> None:
    q, k, v = (drawn(1, 2, 5, 8, seed=seed).requires_grad_() for seed in range(3))

    def call(*given: Tensor) -> Tensor:
        return custom_ops.flash_attention(*given, softcap=2.0)[0].sin()

    wanted = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    kept = checkpoint(call, q, k, v, use_reentrant=False)  # lets saved tensors be read once
    torch.testing.assert_close(torch.autograd.grad(kept.sum(), (q, k, v), create_graph=True), wanted)


def test_a_call_with_features_takes_the_kernel_where_nothing_was_measured() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    q = drawn(1, 2, 6, 8)
    torch.compile(lambda q: custom_ops.flash_attention(q, q, q, softcap=2.0), backend=backend, fullgraph=True)(q)
    assert "custom_ops.flash_attention.default" in seen


def test_vmap_maps_over_samples_with_features() -> None:
    q = drawn(3, 1, 2, 6, 8)
    mapped = torch.vmap(lambda x: custom_ops.flash_attention(x, x, x, window_size=(2, 0))[0])(q)
    for sample, x in zip(mapped, q, strict=True):
        torch.testing.assert_close(sample, custom_ops.flash_attention(x, x, x, window_size=(2, 0))[0])


def test_autocast_casts_the_bias_with_the_operands() -> None:
    q, bias, sinks = drawn(1, 2, 6, 8, dtype=torch.float32), drawn(6, 6, dtype=torch.float32), torch.zeros(2)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = custom_ops.flash_attention(q, q, q, attn_mask=bias, sinks=sinks)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)

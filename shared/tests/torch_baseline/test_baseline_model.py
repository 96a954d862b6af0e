"""The model against its formulas, written out again in NumPy float64 without a line of torch."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from torch_baseline.config import GPTConfig
from torch_baseline.model import (
    GPT,
    bias_gelu,
    causal_attention,
    causal_attention_by,
    cross_entropy,
    init_numpy,
    linear_cross_entropy,
    rms_norm,
)


def reference_logits(weights, config, tokens):
    """One sequence at a time, one head at a time, complex numbers for the rotation."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    return np.stack([_sequence(w, config, row) for row in tokens])


def _sequence(w, config, row):
    x = w["embedding.weight"][row]
    for i in range(config.n_layer):
        block = f"blocks.{i}."
        h = _norm(x, w[block + "attention_norm.weight"], config.norm_eps)
        qkv = h @ w[block + "attention.qkv.weight"].T
        heads = [_head(qkv, config, number) for number in range(config.n_head)]
        x = x + np.concatenate(heads, axis=1) @ w[block + "attention.out.weight"].T
        h = _norm(x, w[block + "mlp_norm.weight"], config.norm_eps)
        u = h @ w[block + "mlp.up.weight"].T + w[block + "mlp.bias"]
        u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        x = x + u @ w[block + "mlp.down.weight"].T
    x = _norm(x, w["norm.weight"], config.norm_eps)
    return x @ w["embedding.weight" if config.tie_embeddings else "head.weight"].T


def _norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * gain


def _head(qkv, config, number):
    size, half = config.head_size, config.head_size // 2
    part = slice(number * size, (number + 1) * size)
    q, k, v = (which[:, part] for which in np.split(qkv, 3, axis=1))
    position = np.arange(len(q))[:, None]
    turn = np.exp(1j * position * config.rope_base ** (-np.arange(half) / half))
    q, k = ((each[:, :half] + 1j * each[:, half:]) * turn for each in (q, k))
    # Re(q · conj(k)) is the dot product of the rotated pairs.
    score = (q @ k.conj().T).real / np.sqrt(size)
    score[position < position.T] = -np.inf
    p = np.exp(score - score.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ v


def _trained_looking(config, seed=1):
    """Weights with gains, biases and scales away from their initial special values."""
    generator = np.random.default_rng(seed)
    weights = init_numpy(config, seed)
    return {
        name: (value * 4 if value.ndim > 1 else value + generator.normal(0, 0.3, value.shape)).astype(np.float32)
        for name, value in weights.items()
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"n_head": 1}, {"rope_base": 500.0}])
def test_logits_are_those_of_the_formulas(small, changes, dtype):
    config = dataclasses.replace(small, **changes)
    weights = _trained_looking(config)
    model = GPT(config).to(dtype if dtype is torch.float64 else None)
    model.load_numpy(weights)
    tokens = np.random.default_rng(2).integers(0, 256, (3, 29))
    expected = reference_logits(weights, config, tokens)
    error = np.abs(model(torch.from_numpy(tokens)).detach().double().numpy() - expected).max() / np.abs(expected).max()
    # A sum of n products is off by at most n·u of the sum of magnitudes (Higham 2002, section 3.1). Down the longest
    # path lie, per block, sums over C (qkv), D (scores), T (values), C (out), C (up), F (down), C twice (norms), and C
    # twice at the end.
    width, inner = config.n_embd, config.mlp_size
    roundings = config.n_layer * (5 * width + config.head_size + 29 + inner) + 2 * width
    unit = torch.finfo(dtype).eps / 2
    assert error < roundings * unit


def test_the_loss_is_the_mean_negative_log_probability(small):
    weights = _trained_looking(small)
    model = GPT(small).double()
    model.load_numpy(weights)
    x, y = np.random.default_rng(3).integers(0, 256, (2, 2, 32))
    logits = reference_logits(weights, small, x)
    shifted = logits - logits.max(axis=2, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))
    expected = -np.take_along_axis(log_p, y[..., None], axis=2).mean()
    assert model(torch.from_numpy(x), torch.from_numpy(y)).item() == pytest.approx(expected, rel=1e-13)


def test_the_gradient_is_the_slope_of_the_loss(small):
    model = GPT(small).double()
    model.load_numpy(_trained_looking(small))
    x, y = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (2, 2, 32)))
    model(x, y).backward()
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True)).item()

    def loss_at(t):
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=t)
            loss = model(x, y).item()
            for p, d in zip(model.parameters(), direction, strict=True):
                p.sub_(d, alpha=t)
        return loss

    # Central differences at t and t/2 (Richardson): what is left is O(t⁴) plus u/t ≈ 1e-12.
    t = 1e-4
    wide, narrow = ((loss_at(s) - loss_at(-s)) / (2 * s) for s in (t, t / 2))
    assert (4 * narrow - wide) / 3 == pytest.approx(slope, rel=1e-7)


def test_the_future_is_not_seen(small):
    model = GPT(small)
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (1, 32)))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert (before[:, 20:] != after[:, 20:]).any()


def test_a_sequence_beyond_the_block_is_refused(small):
    with pytest.raises(ValueError, match="block_size=32 tokens, got 33"):
        GPT(small)(torch.zeros(1, 33, dtype=torch.int64))


def test_initial_weights_are_a_function_of_the_seed(small):
    def digest(seed):
        state = hashlib.sha256()
        for value in init_numpy(small, seed).values():
            state.update(value.tobytes())
        return state.hexdigest()[:16]

    assert digest(0) == digest(0) != digest(1)
    # Written down because two frameworks, or two versions of NumPy, must start from the same numbers to be compared.
    assert digest(0) == "1d370ceaf6b68ac3"


def test_initial_weights_have_the_scales_of_gpt2():
    config = GPTConfig(n_layer=8, n_embd=128)
    weights = init_numpy(config, 0)
    for name, value in weights.items():
        if value.ndim < 2:
            assert (value == (1 if name.endswith("norm.weight") else 0)).all()
            continue
        expected = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        # The standard deviation of n normal draws is off by σ/√(2n); six of those.
        assert value.std() == pytest.approx(expected, rel=6 / np.sqrt(2 * value.size))


def test_weights_go_in_and_out_unchanged(small):
    weights = _trained_looking(small)
    model = GPT(small)
    model.load_numpy(weights)
    out = model.to_numpy()
    assert out.keys() == weights.keys()
    for name in weights:
        np.testing.assert_array_equal(out[name], weights[name])
    out["norm.weight"][:] = 7  # a copy: the model does not follow
    assert (model.norm.weight != 7).all()


def test_weights_that_do_not_fit_are_refused(small):
    model, weights = GPT(small), init_numpy(small, 0)
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\], unknown \['gain'\]"):
        model.load_numpy({**{k: v for k, v in weights.items() if k != "norm.weight"}, "gain": weights["norm.weight"]})
    with pytest.raises(ValueError, match=r"norm.weight must be \(48,\), got \(1,\)"):
        model.load_numpy({**weights, "norm.weight": np.ones(1)})


def test_replaced_parts_are_what_runs(small):
    calls = {"norm": 0, "activation": 0, "attention": 0, "loss": 0}

    class CountingNorm(nn.Module):
        def __init__(self, width, eps):
            super().__init__()
            self.inner_eps = eps
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            calls["norm"] += 1
            return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.inner_eps)

    def activation(x, bias):
        calls["activation"] += 1
        assert (x.shape, bias.shape) == ((2, 16, 192), (192,))
        return 2 * bias_gelu(x, bias)

    def attention(q, k, v):
        calls["attention"] += 1
        assert q.shape == k.shape == v.shape == (2, 3, 16, 16)
        return causal_attention(q, k, v) - 1

    def loss(x, weight, targets):
        calls["loss"] += 1
        assert (x.shape, weight.shape, targets.shape) == ((2, 16, 48), (256, 48), (2, 16))
        return 2 * linear_cross_entropy(x, weight, targets)

    tokens = torch.from_numpy(np.random.default_rng(6).integers(0, 256, (2, 16)))
    plain = GPT(small)(tokens, tokens)
    for part, changed in (
        ({"norm": CountingNorm}, False),
        ({"activation": activation}, True),
        ({"attention": attention}, True),
        ({"loss": loss}, True),
    ):
        assert bool((GPT(small, **part)(tokens, tokens) != plain).any()) is changed
    assert calls == {"norm": 5, "activation": 2, "attention": 2, "loss": 1}


def test_a_norm_without_its_weight_is_refused(small):
    with pytest.raises(ValueError, match="a replaced norm must have exactly one parameter, `weight`"):
        GPT(small, norm=lambda width, eps: nn.LayerNorm(width, eps))


def test_bias_and_gelu_stay_in_the_dtype_of_the_computation():
    x = torch.randn(4, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    assert bias_gelu(x, torch.zeros(8)).dtype == torch.bfloat16
    assert isinstance(rms_norm(8, 1e-5), nn.RMSNorm)


def compiled_cross_entropy(logits, targets):
    """What a compiled model computes, in the operators that a compiler is given."""
    torch._dynamo.reset()
    return torch.compile(cross_entropy, backend="aot_eager", fullgraph=True)(logits, targets)


LOSSES = [cross_entropy, compiled_cross_entropy]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [97, 384])  # compiled, summed whole, and in three pieces
def test_cross_entropy_and_its_gradient(dtype, vocab_size, loss):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, vocab_size, generator=generator).mul(4).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab_size, (40,), generator=generator)
    found = loss(logits, targets)
    found.backward()
    exact = logits.detach().double().requires_grad_()
    expected = nn.functional.cross_entropy(exact, targets)
    expected.backward()
    # Sums in float32 at least; the gradient is rounded once more, to the dtype of the logits (at most 1/40 of it).
    sums = vocab_size * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert abs(found.item() - expected.item()) <= sums * abs(expected.item())
    assert logits.grad.dtype == dtype
    assert (logits.grad.double() - exact.grad).abs().max() <= (sums + torch.finfo(dtype).eps) / 40


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_are_ruled_out_have_no_share_in_the_loss(loss):
    logits = torch.randn(4, 384, generator=torch.Generator().manual_seed(0))
    logits[:, 100:300] = -torch.inf  # all of a piece, and part of two
    logits.requires_grad_()
    targets = torch.tensor([0, 99, 300, 383])
    found = loss(logits, targets)
    found.backward()
    torch.testing.assert_close(found, nn.functional.cross_entropy(logits.detach(), targets))
    assert (logits.grad[:, 100:300] == 0).all()


def test_the_residual_stream_may_have_the_dtype_of_the_products(small):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 16)))
    streams = {}
    for low in (False, True):
        model = GPT(dataclasses.replace(small, low_precision_residual=low))
        model.blocks[0].register_forward_hook(
            lambda module, inputs, output, low=low: streams.update({low: sum(output)})
        )
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert {low: stream.dtype for low, stream in streams.items()} == {False: torch.float32, True: torch.bfloat16}
    # The stream is rounded once, at 2⁻⁹ of itself, at each of a block's two additions and at the embedding.
    error = (streams[True].float() - streams[False]).norm() / streams[False].norm()
    assert error <= 4 * 2**-9


def test_attention_can_be_held_to_one_kernel(small):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 16)))
    losses = [GPT(small, attention=causal_attention_by(kernel))(tokens, tokens).item() for kernel in ("math", "flash")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ValueError, match="the kernel must be one of cudnn, flash, efficient, math, got 'fast'"):
        causal_attention_by("fast")

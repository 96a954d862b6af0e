"""The step against torch's: forward, gradients, clipping, updates, in float64 and in odd configurations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_baseline.gpt import model as gpt
from jax_baseline.gpt.model import Block, forward, stack_blocks, with_attention
from jax_baseline.gpt.optim import clip_like_torch, decayed, global_norm, make_adamw, make_optimizer
from jax_baseline.gpt.train import initial_state, make_train_step
from jax_baseline.gpt.transfer import from_torch, to_torch
from jax_baseline.parity.gpt import adapters
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import init_numpy
from torch_baseline.optim import learning_rate

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12)
SHAPES = {
    "two blocks": replace(SMALL, n_layer=2),
    "odd heads, untied": GPTConfig(
        vocab_size=300, n_layer=1, n_head=3, n_embd=30, block_size=12, tie_embeddings=False, rope_base=500.0
    ),
    "one head, large eps": replace(SMALL, n_head=1, norm_eps=1e-2),
}
TRAINING = TrainConfig(steps=6, batch_size=4, warmup=2, dtype="float64")
EPS64 = float(np.finfo(np.float64).eps)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def tokens(config, rows=3, length=None):
    generator = np.random.default_rng(0)
    return generator.integers(0, config.vocab_size, (rows, length or config.block_size), np.int64)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two blocks", marks=pytest.mark.slow),
        "odd heads, untied",
        pytest.param("one head, large eps", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_and_weight_equals_torchs_in_float64(name):
    setup = adapters.Setup(SHAPES[name], replace(TRAINING, steps=3))
    with jax.enable_x64(True):
        pair = adapters.TorchAdapter(setup), adapters.JaxAdapter(setup)
        for batch in setup.batches():
            expected, found = (adapter.step(*batch) for adapter in pair)
            for one, other in ((expected.gradients, found.gradients), (expected.weights, found.weights)):
                assert one.keys() == other.keys()
                for key, array in one.items():
                    scale = np.abs(array).max()
                    np.testing.assert_allclose(other[key], array, rtol=0, atol=1e-12 * scale, err_msg=key)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clipping_is_torchs(max_norm):
    generator = np.random.default_rng(0)
    gradients = [generator.standard_normal(shape) for shape in ((3, 4), (5,))]
    parameters = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    clipped, _ = clip_like_torch(max_norm).update([jnp.asarray(g) for g in gradients], optax.EmptyState())
    assert float(global_norm([jnp.asarray(g) for g in gradients])) == pytest.approx(norm.item(), rel=4 * EPS64)
    for found, parameter in zip(clipped, parameters, strict=True):
        np.testing.assert_allclose(found, parameter.grad.numpy(), rtol=4 * EPS64)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_accumulation_is_the_whole_batch():
    states, norms = [], []
    for parts in (1, 4):
        config = replace(TRAINING, accumulation=parts)
        state, metrics = make_train_step(SMALL, config)(initial_state(SMALL, config), *[tokens(SMALL, 4)] * 2)
        states.append(state.params)
        norms.append(float(metrics.gradient_norm))
    assert norms[1] == pytest.approx(norms[0], rel=100 * EPS64)
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-10)


def test_mixed_precision_keeps_float32_masters_and_donates_the_state():
    config = replace(TRAINING, dtype="bfloat16")
    state = initial_state(SMALL, config)
    x = tokens(SMALL, 4).astype(np.int32)
    step = make_train_step(SMALL, config)
    text = step.lower(state, x, x).as_text()
    assert "dot_general" in text
    assert "bf16" in text
    after, metrics = step(state, x, x)
    floating = [leaf for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in (*floating, metrics.loss)} == {jnp.dtype(jnp.float32)}
    assert state.params.embedding.is_deleted()


@pytest.mark.slow
def test_without_donation_the_state_stays():
    state = initial_state(SMALL, replace(TRAINING, dtype="float32"))
    x = tokens(SMALL, 4).astype(np.int32)
    make_train_step(SMALL, replace(TRAINING, dtype="float32"), donate=False)(state, x, x)
    assert not state.params.embedding.is_deleted()


def test_a_sequence_too_long_is_refused():
    params = from_torch(init_numpy(SMALL, 0), SMALL)
    with pytest.raises(ValueError, match="at most block_size=12 tokens, got 13"):
        forward(params, jnp.zeros((1, 13), jnp.int32), SMALL)


@pytest.mark.parametrize("beta2", [0.999, 0.95, 0.0])
def test_first_updates_have_torchs_bias_correction(beta2):
    config = replace(TRAINING, steps=4, warmup=0, beta2=beta2, weight_decay=0.0, clip=0.0, dtype="float32")
    gradients = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    weight = torch.nn.Parameter(torch.zeros(8))
    rates = [learning_rate(step, config) for step in range(config.steps)]
    theirs = torch.optim.AdamW([weight], betas=(config.beta1, beta2), eps=config.adam_eps, weight_decay=0.0)
    ours = make_adamw(config, mask=None)
    found = jnp.zeros(8)
    state = ours.init(found)
    for rate, gradient in zip(rates, gradients, strict=True):
        theirs.param_groups[0]["lr"] = rate
        weight.grad = torch.from_numpy(gradient)
        theirs.step()
        updates, state = ours.update(jnp.asarray(gradient), state, found)
        found = optax.apply_updates(found, updates)
        # A dozen operations, each off by half a unit in the last place at most, of weights no larger than the sum.
        np.testing.assert_allclose(found, weight.detach(), rtol=0, atol=12 * 2**-24 * sum(rates))


def test_optimizer_without_clipping_is_adamw_alone():
    params = from_torch(init_numpy(SMALL, 0), SMALL)
    assert len(make_optimizer(replace(TRAINING, clip=0.0)).init(params)) == 3
    assert len(make_optimizer(TRAINING).init(params)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_scan_remat_and_several_steps_a_dispatch_are_the_same_training():
    config = replace(TRAINING, ema_decay=0.9)
    batches = [tokens(SHAPES["two blocks"], 4).astype(np.int32) + shift for shift in range(3)]
    ways = {}
    for name, options in {"plain": {}, "remat": {"remat": True}, "scan": {"scan": True}, "at once": {}}.items():
        state = initial_state(SHAPES["two blocks"], config, scan=options.pop("scan", False))
        if name == "at once":
            step = make_train_step(SHAPES["two blocks"], config, steps_per_dispatch=3)
            state, metrics = step(state, np.stack(batches), np.stack(batches))
            assert metrics.loss.shape == (3,)
        else:
            step = make_train_step(SHAPES["two blocks"], config, **options)
            for x in batches:
                state, metrics = step(state, x, x)
        ways[name] = {**to_torch(state.params, SHAPES["two blocks"]), "ema": np.asarray(state.ema.norm)}
        assert int(state.step) == 3
    for name, weights in ways.items():
        for key, array in weights.items():
            np.testing.assert_allclose(array, ways["plain"][key], rtol=0, atol=1e-12, err_msg=f"{name}: {key}")


def test_decay_goes_by_name_however_blocks_are_held():
    params = from_torch(init_numpy(SMALL, 0), SMALL)
    for held in (params, stack_blocks(params)):
        mask = decayed(held)
        assert jax.tree.structure(mask) == jax.tree.structure(held)
        block = mask.blocks if isinstance(held.blocks, Block) else mask.blocks[0]
        assert (block.qkv, block.up, mask.embedding) == (True, True, True)
        assert (block.attention_norm, block.bias, mask.norm) == (False, False, False)


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_changes_nothing(steps):
    config = replace(TRAINING, dtype="float32")
    x = tokens(SMALL, 4).astype(np.int32)
    broken = initial_state(SMALL, config)
    broken = broken._replace(params=broken.params._replace(norm=broken.params.norm.at[0].set(np.inf)))
    before = to_torch(broken.params, SMALL)
    batch = x if steps == 1 else np.stack([x, x])
    state, metrics = make_train_step(SMALL, config, donate=False, steps_per_dispatch=steps)(broken, batch, batch)
    assert not np.isfinite(metrics.loss).any()
    assert int(state.step) == 0
    for key, array in to_torch(state.params, SMALL).items():
        np.testing.assert_array_equal(array, before[key])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("width", [257, 256, 12])  # in one stretch, in eight, in four
def test_logsumexp_in_one_pass_is_the_logsumexp(width):
    in_vmap = jax.jit(jax.vmap(gpt.one_pass_logsumexp))
    for shift in (0.0, 1e4, -1e4, float(np.finfo(np.float64).min / 2)):
        x = 3 * np.random.default_rng(0).standard_normal((2, 3, width)) + shift
        x[0, 0, :-1] = x[1, 1, 5] = -np.inf  # no probability at all, beside some
        maximum = x.max(-1)
        expected = maximum + np.log(np.exp(x - maximum[..., None]).sum(-1))
        # A join rounds an exponential, a product and a sum, four units at the most; there are less than the width, and
        # then one addition.
        bound = width * 4 * EPS64 + EPS64 * np.abs(expected)
        assert (np.abs(in_vmap(x[:, None])[:, 0] - expected) <= bound).all(), shift


@pytest.mark.gpu
@pytest.mark.timeout(90, method="thread")
def test_step_on_the_gpu_with_cudnn_attention():
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU that both torch and JAX see")
    model = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128)
    config = TrainConfig(steps=2, batch_size=4, dtype="bfloat16")
    x = tokens(model, 4).astype(np.int32)
    losses = {}
    for name in ("cudnn", "xla"):
        state = initial_state(model, config)
        state, metrics = make_train_step(model, config, parts=with_attention(name))(state, x, x)
        losses[name] = float(metrics.loss)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
    # Logits rounded to bfloat16 (2⁻⁹ relative, |logit| < 1 at the start), averaged over 512 tokens.
    assert losses["cudnn"] == pytest.approx(losses["xla"], abs=2**-9)

"""The step against torch's: forward, gradients, clipping, updates, in float64 and in odd configurations."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_baseline import loop, parity
from jax_baseline.model import cudnn_attention, forward
from jax_baseline.optim import clip_like_torch, global_norm, make_optimizer
from jax_baseline.train import initial_state, make_train_step
from jax_baseline.transfer import from_torch
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT, init_numpy

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


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_torchs_in_float64(name):
    config = SHAPES[name]
    x = tokens(config, length=config.block_size - 3)
    expected = GPT(config, seed=1).double()(torch.from_numpy(x)).detach().numpy()
    found = forward(from_torch(init_numpy(config, 1), config, jnp.float64), x, config)
    assert found.dtype == jnp.float64
    # Sums of at most 4·C products a layer: a few hundred epsilons of the largest logit.
    np.testing.assert_allclose(found, expected, rtol=0, atol=300 * EPS64 * np.abs(expected).max())


@pytest.mark.parametrize("name", SHAPES)
def test_every_gradient_and_weight_equals_torchs_in_float64(name):
    setup = parity.Setup(SHAPES[name], replace(TRAINING, steps=3))
    with jax.enable_x64(True):
        sides = parity.TorchSide(setup), parity.JaxSide(setup)
        for batch in setup.batches():
            expected, found = (side.step(*batch) for side in sides)
            for one, other in ((expected.gradients, found.gradients), (expected.weights, found.weights)):
                assert one.keys() == other.keys()
                for key, array in one.items():
                    scale = np.abs(array).max()
                    np.testing.assert_allclose(other[key], array, rtol=0, atol=1e-12 * scale, err_msg=key)


@pytest.mark.parametrize(("dtype", "ceiling"), [("float64", 1e-13), ("float32", 1e-5)])
def test_parity_holds(dtype, ceiling):
    found = parity.run(parity.Setup(SHAPES["odd heads, untied"], replace(TRAINING, dtype=dtype, steps=8)))
    assert found.divergence() is None
    assert found.largest("loss") < ceiling


def test_parity_in_bfloat16_is_that_of_torch_with_itself():
    found = parity.run(parity.Setup(SMALL, replace(TRAINING, dtype="bfloat16")))
    assert found.largest("loss") <= parity.TIMES_CONTROL["bfloat16"] * found.control_largest("loss")
    assert found.control_largest("loss") < 1e-2


@pytest.mark.parametrize(
    ("mistake", "quantity", "step"),
    [
        ({"beta2": 0.999}, "weights", 1),
        ({"weight_decay": 0.0}, "weights", 0),
        ({"clip": 0.0}, "weights", 0),
        ({"warmup": 1}, "weights", 0),
    ],
)
def test_a_mistake_in_the_optimizer_is_named(mistake, quantity, step):
    setup = parity.Setup(SMALL, replace(TRAINING, clip=0.5))
    wrong = replace(setup, training=replace(setup.training, **mistake))
    with jax.enable_x64(True):
        found = parity.compare(
            setup.batches(),
            reference=parity.TorchSide(setup),
            candidate=parity.JaxSide(wrong),
            control=parity.TorchSide(setup, attention=parity.written_out_attention),
            dtype="float64",
        )
    divergence = found.divergence()
    assert (divergence.quantity, divergence.step) == (quantity, step)
    assert divergence.parameter in divergence_parameters(setup)


def divergence_parameters(setup):
    return init_numpy(setup.model, 0).keys()


def test_a_mistake_in_the_model_is_named():
    setup = parity.Setup(SMALL, TRAINING)
    wrong = replace(setup, model=replace(SMALL, norm_eps=1e-6))
    with jax.enable_x64(True):
        found = parity.compare(
            setup.batches(),
            reference=parity.TorchSide(setup),
            candidate=parity.JaxSide(wrong),
            control=parity.TorchSide(setup, attention=parity.written_out_attention),
            dtype="float64",
        )
    assert found.divergence().step == 0
    assert str(found.divergence()).startswith("step 0: the loss off by")


def test_not_a_number_is_a_divergence():
    good = parity.Deviation(0.0, 0.0, 0.0, 0.0, "a", "a")
    bad = replace(good, gradients=float("nan"))
    found = parity.Comparison("float64", (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (good, bad), (good, good))
    assert (found.divergence().step, found.divergence().quantity) == (1, "gradients")


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
    lowered = make_train_step(SMALL, config).lower(state, x, x)
    assert "dot_general" in lowered.as_text()
    assert "bf16" in lowered.as_text()
    after, metrics = make_train_step(SMALL, config)(state, x, x)
    floating = [leaf for leaf in jax.tree.leaves(after) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in (*floating, metrics.loss)} == {jnp.dtype(jnp.float32)}
    assert state.params.embedding.is_deleted()


def test_without_donation_the_state_stays():
    state = initial_state(SMALL, replace(TRAINING, dtype="float32"))
    x = tokens(SMALL, 4).astype(np.int32)
    make_train_step(SMALL, replace(TRAINING, dtype="float32"), donate=False)(state, x, x)
    assert not state.params.embedding.is_deleted()


def test_the_loop_learns_and_names_a_step_that_is_not_finite():
    config = TrainConfig(steps=20, batch_size=4, warmup=2, eval_batches=2)
    logs = []
    summary = loop.run(SMALL, config, report=logs.append)
    assert [log.step for log in logs] == list(range(1, 21))
    assert logs[-1].loss < logs[0].loss - 0.3
    assert summary.bits < 8
    with pytest.raises(loop.NonFiniteError, match="step 2: the loss is"):
        loop.run(SMALL, replace(config, lr=1e30, min_lr=1e30, warmup=0, clip=0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "float16"}, "no gradient scaler"), ({"ema_decay": 0.9}, "no ema_decay yet")],
)
def test_what_the_loop_does_not_have_it_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        loop.run(SMALL, replace(TRAINING, **change))


def test_a_sequence_too_long_is_refused():
    params = from_torch(init_numpy(SMALL, 0), SMALL)
    with pytest.raises(ValueError, match="at most block_size=12 tokens, got 13"):
        forward(params, jnp.zeros((1, 13), jnp.int32), SMALL)


def test_optimizer_without_clipping_is_adamw_alone():
    assert len(make_optimizer(replace(TRAINING, clip=0.0)).init(jnp.zeros(3))) == 3
    assert len(make_optimizer(TRAINING).init(jnp.zeros(3))) == 2


@pytest.mark.gpu
def test_step_on_the_gpu_with_cudnn_attention():
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU that both torch and JAX see")
    model = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=128)
    config = TrainConfig(steps=2, batch_size=4, dtype="bfloat16")
    x = tokens(model, 4).astype(np.int32)
    losses = {}
    for name, options in {"cudnn": {"attention": cudnn_attention}, "xla": {}}.items():
        state = initial_state(model, config)
        state, metrics = make_train_step(model, config, **options)(state, x, x)
        losses[name] = float(metrics.loss)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))
    # Logits rounded to bfloat16 (2⁻⁹ relative, |logit| < 1 at the start), averaged over 512 tokens.
    assert losses["cudnn"] == pytest.approx(losses["xla"], abs=2**-9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_parity_on_the_gpu(dtype):
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU that both torch and JAX see")
    found = parity.run(parity.Setup.preset("tiny", steps=10, seed=0, dtype=dtype, device="cuda"))
    assert found.divergence() is None

"""The programs of examples/: what they compute, and that they run from a command line."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baseline.gpt import loop
from jax_baseline.gpt.model import forward, loss
from jax_baseline.gpt.transfer import from_torch
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import GPT, init_numpy
from torch_baseline.sample import sample_bytes as torch_sample_bytes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12)
EPS64 = float(np.finfo(np.float64).eps)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def weights(seed):
    return from_torch(init_numpy(MODEL, seed), MODEL, dtype=jnp.float64)


def load(name):
    spec = importlib.util.spec_from_file_location(f"jax_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sampling_from_the_cache_writes_what_torch_writes():
    sample_from_cache = load("sample_from_cache")
    config = GPTConfig(vocab_size=300, n_layer=2, n_head=3, n_embd=30, block_size=10, tie_embeddings=False)
    drawn = {name: array * (4 if array.ndim == 2 else 1) for name, array in init_numpy(config, 3).items()}
    model = GPT(config)
    model.load_numpy(drawn)
    params = from_torch(drawn, config)
    theirs = list(torch_sample_bytes(model, b"hello", 20, temperature=0, seed=0))  # past the end of the window
    assert list(sample_from_cache.sample_bytes(params, config, b"hello", 20, temperature=0, seed=0)) == theirs
    warm = list(sample_from_cache.sample_bytes(params, config, b"hello", 8, temperature=1.0, seed=1))
    assert warm == list(sample_from_cache.sample_bytes(params, config, b"hello", 8, temperature=1.0, seed=1))
    assert warm != list(sample_from_cache.sample_bytes(params, config, b"hello", 8, temperature=1.0, seed=2))
    with pytest.raises(ValueError, match="at least one byte"):
        next(sample_from_cache.sample_bytes(params, config, b"", 1, temperature=0, seed=0))
    with pytest.raises(ValueError, match="must not be negative"):
        next(sample_from_cache.sample_bytes(params, config, b"a", 1, temperature=-1, seed=0))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_every_examples_own_loss_and_gradient():
    per_example_gradients = load("per_example_gradients")
    params = weights(0)
    x, y = (part.astype(np.int32) for part in batch(load_corpus().train, 0, 0, 3, MODEL.block_size))
    each, norms = jax.jit(per_example_gradients.gradient_norms, static_argnums=3)(params, x, y, MODEL)
    assert float(each.mean()) == pytest.approx(float(loss(params, x, y, MODEL)), rel=100 * EPS64)
    for index in range(3):
        gradient = jax.grad(loss)(params, x[index : index + 1], y[index : index + 1], MODEL)
        own = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradient)))
        assert float(norms[index]) == pytest.approx(own, rel=100 * EPS64)


def test_noise_scale_of_gradients_that_are_signal_and_noise():
    generator = np.random.default_rng(0)
    signal, gradients = np.full(400, 0.5), generator.standard_normal((200, 400))
    gradients = signal + 2.0 * gradients
    norms = np.linalg.norm(gradients, axis=1)
    found = load("per_example_gradients").noise_scale(norms, np.linalg.norm(gradients.mean(0)))
    assert float(found) == pytest.approx(4.0 * 400 / (0.25 * 400), rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_nnx_module_is_the_function():
    nnx = pytest.importorskip("flax.nnx")
    nnx_module, params = load("flax_nnx_module"), weights(2)
    drawn = nnx_module.GPT(MODEL, seed=2).params
    jax.tree.map(np.testing.assert_array_equal, drawn, params)
    view = nnx_module.GPT(MODEL, params=params)
    x = np.zeros((1, 5), np.int32)
    logits = jax.jit(lambda params: forward(params, x, MODEL))
    gradient = nnx.jit(nnx.grad(lambda model: model(x).sum()))(view)
    expected = jax.jit(jax.grad(lambda params: logits(params).sum()))(params)
    results = [(nnx.jit(lambda model: model(x))(view), logits(params))]
    results += zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True)
    for found, exact in results:
        np.testing.assert_allclose(found, exact, rtol=0, atol=100 * EPS64 * np.abs(exact).max())


def run_main(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    load(name).main()
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_module_and_the_gradients_of_the_tiny_preset_are_printed(monkeypatch, capsys):
    monkeypatch.setattr("torch_baseline.config.GPTConfig.preset", lambda name: MODEL)
    assert run_main(monkeypatch, capsys, "flax_nnx_module").startswith("logits (1, 12, 256), ")
    printed = run_main(monkeypatch, capsys, "per_example_gradients").splitlines()
    assert [line.partition(":")[0] for line in printed[:4]] == [f"sequence {index}" for index in range(4)]
    assert printed[4].startswith("noise scale ")


@pytest.mark.slow
def test_a_text_is_continued_with_the_best_weights_of_a_run(monkeypatch, capsys, tmp_path):
    loop.train(MODEL, TrainConfig(steps=2, batch_size=2, warmup=1, eval_batches=1, out=tmp_path))
    written = run_main(
        monkeypatch, capsys, "sample_from_cache", str(tmp_path), "--bytes", "5", "--temperature", "0", "--prompt", "abc"
    )
    assert written.startswith("abc")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["no_such_run"], "there is no checkpoint no_such_run")],
)
def test_a_run_that_is_not_there_ends_with_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["sample_from_cache.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        load("sample_from_cache").main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err

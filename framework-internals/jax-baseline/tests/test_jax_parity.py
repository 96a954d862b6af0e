"""The comparison itself: bounds, permuted references, what is named, and which planted mistakes it detects."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from jax_baseline.parity import comparison as parity
from jax_baseline.parity.comparer import margin
from jax_baseline.parity.gpt import adapters, planted_mistakes
from jax_baseline.parity.gpt.permuted import Permutation
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
TRAINING = TrainConfig(steps=6, batch_size=4, warmup=2, lr=1e-3, min_lr=1e-4, dtype="float64")
EPS64 = float(np.finfo(np.float64).eps)


@pytest.mark.parametrize("name", SHAPES)
def test_a_permuted_reference_computes_the_same_in_another_order(name):
    config = SHAPES[name]
    permutation = Permutation.draw(config, 4, seed=1)
    weights = {key: array.astype(np.float64) for key, array in init_numpy(config, 0).items()}
    tokens = np.random.default_rng(0).integers(0, 256, (4, config.block_size))
    logits = {}
    for name, changed in (("own", weights), ("other", permutation.weights(weights))):
        model = GPT(config).double()
        model.load_numpy(changed)
        batch = tokens if name == "own" else permutation.batch(tokens)
        logits[name] = model(torch.from_numpy(batch)).detach().numpy()
    found = permutation.original_activations({"logits": logits["other"]})["logits"]
    assert not np.array_equal(found, logits["own"])  # the order of the sums did change
    np.testing.assert_allclose(found, logits["own"], rtol=0, atol=300 * EPS64 * np.abs(logits["own"]).max())
    for key, array in permutation.original_weights(permutation.weights(weights)).items():
        np.testing.assert_array_equal(array, weights[key])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ceiling"), [("float64", 1e-13), ("float32", 1e-5)])
@pytest.mark.parametrize("low_precision_residual", [False, True])
def test_parity_holds(dtype, ceiling, low_precision_residual):
    model = replace(SHAPES["odd heads, untied"], low_precision_residual=low_precision_residual)
    found = adapters.run(adapters.Setup(model, replace(TRAINING, dtype=dtype, steps=8)))
    assert found.divergence() is None
    assert found.largest("loss") < ceiling


@pytest.mark.slow
def test_parity_in_bfloat16_is_that_of_torch_with_itself():
    found = adapters.run(adapters.Setup(SMALL, replace(TRAINING, dtype="bfloat16")))
    assert found.divergence() is None
    assert found.control_largest("loss") < 1e-2


@pytest.mark.parametrize(
    ("shape", "training"),
    [
        ({"block_size": 1}, {"steps": 1}),
        pytest.param({}, {"steps": 2, "batch_size": 6, "accumulation": 3, "seed": 1}, marks=pytest.mark.slow),
    ],
    ids=["four positions: bfloat16 rounds alike in all permuted references", "thirds: dividing by three rounds"],
)
def test_parity_in_bfloat16_where_the_controls_hardly_deviate(shape, training):
    # A rounding that one framework makes at another place than the other shows here, many times over the bound.
    found = adapters.run(adapters.Setup(replace(SMALL, **shape), replace(TRAINING, dtype="bfloat16", **training)))
    assert found.divergence() is None
    assert found.worst_ratio("gradients") < 1


@pytest.mark.slow
def test_a_bfloat16_residual_stream_has_the_same_losses():
    # XLA may leave out a rounding between two operations that it fuses: the norm of a model of width 16 has been 3.5
    # times as far as the controls. The losses must keep their bound.
    model = replace(SMALL, low_precision_residual=True)
    found = adapters.run(adapters.Setup(model, replace(TRAINING, dtype="bfloat16")))
    assert found.largest("loss") <= found.bounds("loss")[-1]


@pytest.mark.parametrize(
    ("wrong", "quantity", "layer"),
    [
        ({"model": {"norm_eps": 1e-3}}, "loss", "blocks.0.attention"),
        pytest.param({"training": {"beta2": 0.999}}, "optimizer state", "", marks=pytest.mark.slow),
        pytest.param({"training": {"weight_decay": 0.0}}, "weights", "", marks=pytest.mark.slow),
    ],
)
def test_what_parts_first_is_named(wrong, quantity, layer):
    setup = adapters.Setup(SHAPES["two blocks"], TRAINING)
    port = replace(
        setup,
        model=replace(setup.model, **wrong.get("model", {})),
        training=replace(setup.training, **wrong.get("training", {})),
    )
    with jax.enable_x64(True):
        found = parity.compare(
            setup.batches(),
            reference=adapters.TorchAdapter(setup),
            candidate=adapters.JaxAdapter(port),
            controls=adapters.control_adapters(setup),
            dtype="float64",
        )
    divergence = found.divergence()
    assert (divergence.step, divergence.quantity, divergence.layer) == (0, quantity, layer)
    assert divergence.deviation > divergence.bound
    if quantity != "loss":
        assert divergence.parameter.removeprefix("exp_avg_sq of ") in init_numpy(setup.model, 0)
    assert str(divergence).startswith(f"step 0: the {quantity} off by")


class Line:
    """Gradient descent on (w·x − 1)² with w a number: the smallest pair of steps of one's own."""

    def __init__(self, rate, dtype=np.float64):
        self.rate, self.weight = rate, dtype(0.5)

    def step(self, tokens_BT, targets_BT):
        error = self.weight * 2 - 1
        gradient = 4 * error + 1
        self.weight = self.weight - self.rate * gradient
        return parity.Observation(
            float(error**2), abs(float(gradient)), {"w": np.array(gradient)}, {"w": np.array(self.weight)}
        )


def test_any_pair_of_steps_can_be_compared():
    batches = [(np.zeros((1, 1), np.int64),) * 2] * 5
    same = parity.compare(batches, reference=Line(0.1), candidate=Line(0.1), controls=[Line(0.1)], dtype="float64")
    assert same.divergence() is None
    other = parity.compare(batches, reference=Line(0.1), candidate=Line(0.11), controls=[Line(0.1)], dtype="float64")
    assert (other.divergence().step, other.divergence().quantity, other.divergence().parameter) == (0, "weights", "w")
    with pytest.raises(ValueError, match="needs at least one control"):
        parity.compare(batches, reference=Line(0.1), candidate=Line(0.1), controls=[], dtype="float64")
    with pytest.raises(ValueError, match="dtype must be one of float64, float32, bfloat16, got 'int8'"):
        parity.compare(batches, reference=Line(0.1), candidate=Line(0.1), controls=[Line(0.1)], dtype="int8")


def test_not_a_number_is_a_divergence():
    good = parity.Observation(1.0, 1.0, {"w": np.ones(2)}, {"w": np.ones(2)})
    bad = replace(good, gradients={"w": np.array([1.0, np.nan])})
    found = parity.compare_observations([good, good], [good, bad], controls=[[good, good]], dtype="float64")
    assert (found.divergence().step, found.divergence().quantity) == (1, "gradients")


def test_implementations_must_have_the_same_parameters():
    one = parity.Observation(1.0, 1.0, {"w": np.ones(2)}, {"w": np.ones(2)})
    other = replace(one, weights={"v": np.ones(2)})
    with pytest.raises(ValueError, match=r"the implementations differ in \['v', 'w'\]"):
        parity.deviation(one, other)


def test_bounds_follow_what_the_controls_have_reached_and_never_fall():
    reference = [parity.Observation(1.0, 1.0, {"w": np.ones(2)}, {"w": np.ones(2)})] * 10
    control = [replace(seen, loss=1.0 + (1e-3 if step == 8 else 0.0)) for step, seen in enumerate(reference)]
    found = parity.compare_observations(reference, reference, controls=[control], dtype="float32")
    bounds = found.bounds("loss")
    floor = 8 * float(np.finfo(np.float32).eps)
    assert bounds[:8] == [floor] * 8
    assert bounds[8:] == pytest.approx([found.margin * 1e-3] * 2)


def test_the_margin_is_that_of_a_maximum_of_few_normal_numbers():
    numbers = np.abs(np.random.default_rng(0).standard_normal((200_000, 7)))
    for draws, rate in ((3, 1e-2), (6, 1e-3)):
        over = (numbers[:, 0] > margin(draws, rate) * numbers[:, 1 : draws + 1].max(1)).mean()
        assert over == pytest.approx(rate, abs=4 * (rate / 200_000) ** 0.5)
    assert margin(24, 3e-9) < 6 < margin(3, 1e-3)  # few draws need many times their largest


ODD = {
    "one token, bfloat16": ({"n_layer": 2, "n_head": 3, "n_embd": 30, "block_size": 1}, {"dtype": "bfloat16"}),
    "one token, float32": ({"n_layer": 2, "n_head": 3, "n_embd": 30, "block_size": 1}, {}),
    "two channels": ({"n_layer": 2, "n_head": 1, "n_embd": 2, "block_size": 5}, {"batch_size": 1, "dtype": "float64"}),
    "thirds": (
        {"n_head": 7, "n_embd": 14, "block_size": 3, "tie_embeddings": False},
        {"batch_size": 3, "accumulation": 3, "clip": 0.1},
    ),
    "thirds, bfloat16": (
        {"n_head": 7, "n_embd": 14, "block_size": 3, "tie_embeddings": False},
        {"batch_size": 3, "accumulation": 3, "clip": 0.1, "dtype": "bfloat16"},
    ),
    "deep": ({"n_layer": 5, "n_head": 1, "n_embd": 6, "block_size": 7}, {"weight_decay": 10.0, "dtype": "float64"}),
    "epsilons of 1": (
        {"n_head": 1, "norm_eps": 1.0, "block_size": 11},
        {"beta1": 0.0, "adam_eps": 1.0, "warmup": 0},
    ),
    "epsilon of 1e-12": (
        {"n_head": 3, "n_embd": 18, "norm_eps": 1e-12, "block_size": 9},
        {"beta2": 0.999, "clip": 0.0},
    ),
    "one row, bfloat16": (
        {"n_head": 5, "n_embd": 50, "block_size": 6, "vocab_size": 300},
        {"batch_size": 1, "dtype": "bfloat16"},
    ),
    "40 steps": ({"n_layer": 4, "n_embd": 12, "block_size": 8}, {"steps": 40, "batch_size": 2, "dtype": "float64"}),
}


def odd(name):
    shape, training = ODD[name]
    settings = {"steps": 8, "dtype": "float32", **training}
    return adapters.Setup(replace(SMALL, **shape), replace(TRAINING, **settings))


@pytest.mark.slow
def test_one_token_a_row_in_bfloat16_is_no_false_alarm():
    # The permuted references add hardly anything in another order; with them alone the loss was 8 times over its bound.
    setup = odd("one token, bfloat16")
    setup = replace(setup, model=replace(setup.model, n_layer=1))
    assert [found.divergence() for found in adapters.run_seeds(setup, [3, 15])] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [*enumerate(ODD)])
def test_two_hundred_seeds_twenty_of_each_odd_shape_have_no_false_alarm(number, name):
    seeds = range(20 * number, 20 * (number + 1))
    for seed, found in zip(seeds, adapters.run_seeds(odd(name), seeds), strict=True):
        assert found.divergence() is None, seed


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["GELU by the error function, not tanh", "weight decay on gains and biases"])
def test_the_probe_sees_at_once_what_rounding_hides(wrong):
    training = replace(TRAINING, steps=1, dtype="float32", warmup=20)
    setup = adapters.Setup(replace(SMALL, tie_embeddings=False), training)
    planted = [mistake for mistake in planted_mistakes.MISTAKES if mistake.name == wrong]
    correct, verdict = planted_mistakes.plant_mistakes(setup.probe(), planted)
    assert (correct.step, verdict.step) == (None, 0)
    assert verdict.times.value > 1e6  # in float32, from the initial weights, rounding hides both


MODEL = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, tie_embeddings=False)
CAUGHT = ("q and k exchanged", "schedule a step late")  # one in the model, one in the optimizer


def test_planted_mistakes_are_caught_and_the_faithful_step_is_not():
    training = TrainConfig(steps=4, batch_size=8, warmup=2, lr=1e-3, min_lr=1e-4, clip=0.5)
    chosen = [mistake for mistake in planted_mistakes.MISTAKES if mistake.name in CAUGHT]
    assert len(chosen) == len(CAUGHT)
    correct, *others = planted_mistakes.plant_mistakes(adapters.Setup(MODEL, training), chosen)
    assert (correct.mistake, correct.step) == ("", None)
    assert [verdict.step is not None and verdict.times.value > 1 for verdict in others] == [True] * len(CAUGHT)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_nearly_all_planted_mistakes_are_caught_within_four_steps(seed):
    training = TrainConfig(steps=4, batch_size=8, warmup=2, lr=1e-3, min_lr=1e-4, clip=0.5, seed=seed)
    correct, *others = planted_mistakes.plant_mistakes(adapters.Setup(MODEL, training))
    assert correct.step is None
    missed = [verdict.mistake for verdict in others if verdict.step is None]
    assert len(others) >= 25
    assert len(others) - len(missed) >= 0.92 * len(others), missed  # 23 of 25


def test_names_of_mistakes_are_unique():
    assert len({mistake.name for mistake in planted_mistakes.MISTAKES}) == len(planted_mistakes.MISTAKES) >= 25


@pytest.mark.gpu
@pytest.mark.timeout(90, method="thread")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_parity_on_the_gpu(dtype):
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU that both torch and JAX see")
    setup = adapters.Setup.preset("tiny", steps=8, seed=0, dtype=dtype, device="cuda")
    found = adapters.run(replace(setup, model=replace(setup.model, n_layer=2)))  # compiled in half the time
    assert found.divergence() is None

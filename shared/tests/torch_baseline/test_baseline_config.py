import pytest

from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT, flops_per_token, parameter_count, parameter_shapes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 100, "n_head": 3}, "n_embd=102 would do"),
        ({"n_embd": 12, "n_head": 4}, "even head size.*12 / 4 = 3"),
        ({"n_layer": 0}, "n_layer must be positive and finite, got 0"),
        ({"norm_eps": -1.0}, "norm_eps must be positive"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 10, "accumulation": 4}, "multiple of accumulation, got batch_size=10 and accumulation=4"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\)"),
        ({"lr": 1e-4, "min_lr": 1e-3}, "min_lr must not exceed lr"),
        ({"dtype": "int8"}, "dtype must be one of float64"),
        ({"parallel": "fsdp", "dtype": "float16"}, "use bfloat16"),
        ({"clip": -1.0}, "clip must not be negative"),
    ],
)
def test_training_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


@pytest.mark.parametrize("config_type", [GPTConfig, TrainConfig])
def test_an_unknown_preset_names_the_known_ones(config_type):
    with pytest.raises(ValueError, match=r"unknown preset 'big'; there are tiny, gpt2-124m"):
        config_type.preset("big")


def test_the_large_preset_is_gpt2_small():
    config = GPTConfig.preset("gpt2-124m")
    # 50304·768 for the table; a block has 4·768² in attention, 8·768² and 3072 biases in its MLP, 2·768 in its norms.
    by_hand = 50_304 * 768 + 12 * (12 * 768**2 + 3072 + 2 * 768) + 768
    assert parameter_count(config) == by_hand
    # Chowdhery et al. 2022: 6 N + 12 L H Q T.
    assert flops_per_token(config) == 6 * by_hand + 12 * 12 * 12 * 64 * 1024


def test_a_looked_up_table_costs_no_products(small):
    untied = GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32, tie_embeddings=False)
    assert parameter_count(untied) == parameter_count(small) + 256 * 48
    assert flops_per_token(untied) == flops_per_token(small)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shapes_are_those_of_the_model(tied):
    config = GPTConfig(n_layer=2, n_head=3, n_embd=48, block_size=32, tie_embeddings=tied)
    model = GPT(config)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameter_shapes(config)
    assert list(dict(model.named_parameters())) == list(parameter_shapes(config))

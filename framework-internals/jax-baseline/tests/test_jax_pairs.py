"""``parity mine.py:torch_side mine.py:jax_side``: the verdict, where the models part, and why."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchkit import UserError
from jax_baseline.cli import app

MODELS = Path(__file__).with_name("pair_models.py")


def parity(side, file=MODELS):
    return CliRunner().invoke(app, ["parity", f"{file}:torch_side", f"{file}:{side}"])


def test_an_equal_pair_has_parity_in_both_dtypes():
    result = parity("jax_side")
    assert result.exit_code == 0, result.output
    assert "3 steps, float64: within bounds" in result.output
    assert "3 steps, float32: within bounds" in result.output


@pytest.mark.parametrize(
    ("side", "says"),
    [
        (
            "tanh_side",
            [
                "torch computes gelu at model.blocks.0 pair_models.py:",
                "approximate='tanh' instead of 'none' in torch they agree",
            ],
        ),
        ("eps_side", ["torch computes native_layer_norm at model.blocks.0.norm", "eps=1e-06 instead of 1e-05"]),
        ("decay_side", ["the optimizer's update of", "weight decay, JAX adds -1e-05 times the weight"]),
        ("rate_side", ["the optimizer's update of", "the learning rate, JAX's update is 1.1 times torch's"]),
    ],
)
def test_the_first_difference_is_located_with_its_cause(side, says):
    result = parity(side)
    assert result.exit_code == 1, result.output
    for words in says:
        assert words in result.output


def test_parameters_without_a_partner_are_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MODELS.read_text().replace("kernel.T", "kernels.T"))
    result = parity("jax_side", file)
    assert isinstance(result.exception, UserError)
    assert "blocks.0.up.weight has no partner 'blocks/0/up/kernels' in JAX; map it to one of blocks/0/" in str(
        result.exception
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sides", "status", "says"),
    [
        (("gpt2_torch", "gpt2_jax"), 0, "2 steps, float32: within bounds"),
        (("llama_torch", "llama_jax"), 0, "2 steps, float32: within bounds"),
        (("gpt2_torch", "gpt2_exact_gelu_jax"), 1, "transformer.h.0.mlp.act"),
        (("llama_torch", "llama_eps_jax"), 1, "model.layers.0.input_layernorm"),
        (("llama_torch", "llama_eps_jax"), 1, "likely cause: with eps=1e-05 instead of 1e-06 in torch they agree"),
    ],
)
def test_hugging_face_models_and_their_ports(sides, status, says):
    pytest.importorskip("transformers", reason="needs transformers")
    file = Path(__file__).with_name("pair_hugging_face.py")
    result = CliRunner().invoke(app, ["parity", *(f"{file}:{side}" for side in sides)])
    assert result.exit_code == status, result.output
    assert says in result.output

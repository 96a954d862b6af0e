"""``parity mine.py:torch_side mine.py:jax_side``: the verdict, where the models part, and why."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchkit import UserError
from jax_baseline.cli import app
from jax_baseline.parity.pairs import Pair, run

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


def convolution_pair(target):
    def loss(params, x):
        y = jax.lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "VALID", dimension_numbers=("NCHW", "HWIO", "NCHW")
        )
        return ((y + params["bias"][:, None, None]) ** 2).mean()

    torch.manual_seed(0)
    return Pair(
        torch.nn.Conv2d(3, 4, (2, 5)),
        lambda model, x: model(x).square().mean(),
        {"kernel": jnp.zeros((2, 5, 3, 4)), "bias": jnp.zeros(4)},
        loss,
        [(np.random.default_rng(0).standard_normal((2, 3, 6, 7)),)] * 2,
        {"weight": target},
    )


def test_a_map_orders_the_axes_of_a_convolutions_kernel():
    found, where = run(convolution_pair("kernel.transpose(2, 3, 1, 0)"), "float64")
    assert (found.divergence(), where) == (None, "")
    with pytest.raises(UserError, match=r"kernel must be \(5, 2, 3, 4\) for weight, got \(2, 5, 3, 4\); '\.T'"):
        convolution_pair("kernel.T").paths()
    with pytest.raises(UserError, match=r"weight has 4 axes, got the order \(2, 3, 1\); name each axis once"):
        convolution_pair("kernel.transpose(2, 3, 1)").paths()


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

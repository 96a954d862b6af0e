"""``parity mine.py:torch_side mine.py:jax_side``: the verdict, where the models part, and why."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
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
        pytest.param(
            "eps_side",
            ["torch computes native_layer_norm at model.blocks.0.norm", "eps=1e-06 instead of 1e-05"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "decay_side",
            ["the optimizer's update of", "weight decay, none in torch and 0.01 of the weight times the learning rate"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "rate_side",
            ["the optimizer's update of", "the learning rate, JAX's update is 1.1 times torch's"],
            marks=pytest.mark.slow,
        ),
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


def test_dots_of_a_group_in_a_map_are_slashes_too():
    pair = Pair(
        torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3))),
        lambda model, x: model(x).sum(),
        {"0": {"0": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}}},
        lambda params, x: x.sum(),
        [],
        {r"([\d.]+)\.weight": r"\1/kernel.T"},
    )
    assert pair.paths() == {"0.0.weight": ("0/0/kernel", (1, 0)), "0.0.bias": ("0/0/bias", (0,))}
    np.testing.assert_array_equal(pair.converted()["0"]["0"]["kernel"], pair.model[0][0].weight.detach().numpy().T)


def test_a_variable_of_nnx_is_named_without_its_value():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for params in (nnx.state(model, nnx.Param), nnx.to_pure_dict(nnx.state(model, nnx.Param))):
        pair = Pair(torch.nn.Linear(2, 3), torch.nn.Module.__call__, params, model, [], {"weight": "kernel.T"})
        assert {path.partition("/")[0] for path, _ in pair.paths().values()} == {"kernel", "bias"}
        assert jax.tree.structure(pair.converted()) == jax.tree.structure(params)


def test_a_map_orders_the_axes_of_a_convolutions_kernel():
    outcome = run(convolution_pair("kernel.transpose(2, 3, 1, 0)"), "float64")
    assert (outcome.verdict, outcome.where) == ("PARITY", "")
    with pytest.raises(UserError, match=r"kernel must be \(5, 2, 3, 4\) for weight, got \(2, 5, 3, 4\); '\.T'"):
        convolution_pair("kernel.T").paths()
    with pytest.raises(UserError, match=r"weight has 4 axes, got the order \(2, 3, 1\); name each axis once"):
        convolution_pair("kernel.transpose(2, 3, 1)").paths()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "status", "says"),
    [
        ("llama_jax", 0, "2 steps, float32: within bounds"),
        ("llama_eps_jax", 1, "likely cause: with eps=1e-05 instead of 1e-06 in torch they agree"),
    ],
)
def test_llama_of_transformers_and_its_port(side, status, says):
    pytest.importorskip("transformers", reason="needs transformers")
    file = Path(__file__).with_name("pair_llama.py")
    result = CliRunner().invoke(app, ["parity", f"{file}:llama_torch", f"{file}:{side}"])
    assert result.exit_code == status, result.output
    assert says in result.output


GRU, T5 = "gru", "t5_block"
PLANTED = [
    (GRU, "bias", "gru gru.py:{line}", "", "self.head(self.gru"),
    (GRU, "reset", "gru gru.py:{line}", "", "self.head(self.gru"),
    (T5, "scale", "t5_block.py:{line}", "0.5 multiplied with the operand", "scores = q @"),
    (T5, "distance", "t5_block.py:{line}", "other transposed", "scores = q @"),
    (T5, "matrix", ".o t5_block.py:{line}", "with mat2 transposed", "self.o((scores"),
]


def new_pair(name):
    return Path(__file__).with_name("pairs") / f"{name}.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", [GRU, T5])
def test_architectures_and_their_ports_have_parity(name):
    result = parity("jax_side", new_pair(name))
    assert result.exit_code == 0, result.output
    assert result.output.count("within bounds") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "planted", "place", "cause", "code"), PLANTED)
def test_differences_that_are_planted_in_them_are_located(name, planted, place, cause, code):
    result = parity(f"wrong_{planted}", new_pair(name))
    assert result.exit_code == 1, result.output
    lines = new_pair(name).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if code in text)
    assert place.format(line=line) in result.output
    assert cause in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "says"),
    [("jax_fn", "THE SAME FUNCTION: in float64"), ("bias_fn", "NOT THE SAME FUNCTION: in float64")],
)
def test_diff_of_functions_with_weights_from_outside(function, says):
    file = new_pair(GRU)
    options = ["--inputs", f"{file}:arrays", "--device", "cpu", "--repeats", "0", "--show", "0"]
    result = CliRunner().invoke(app, ["diff", f"{file}:torch_fn", f"{file}:{function}", *options])
    assert result.exit_code == int(says.startswith("NOT")), result.output
    assert f"\n{says}" in result.output
    assert ("\nfirst difference: torch computes" in result.output) == says.startswith("NOT")

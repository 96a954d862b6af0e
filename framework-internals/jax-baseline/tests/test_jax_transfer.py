from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jaxtyping import Float

from jax_baseline.gpt.transfer import from_torch, open_torch_checkpoint, to_torch, weight_map
from torch_baseline import checkpoint as checkpoints
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT, init_numpy, parameter_shapes
from torch_baseline.optim import make_optimizer
from torch_baseline.train import Learner

SHAPES = [
    GPTConfig(vocab_size=256, n_layer=2, n_head=2, n_embd=16, block_size=8),
    GPTConfig(vocab_size=300, n_layer=1, n_head=3, n_embd=30, block_size=8, tie_embeddings=False),
]


@pytest.mark.parametrize("config", SHAPES)
def test_weights_come_back_bit_for_bit(config):
    weights = init_numpy(config, seed=3)
    returned = to_torch(from_torch(weights, config), config)
    assert returned.keys() == parameter_shapes(config).keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(returned[name], weight, err_msg=name)


def test_kernels_are_in_out():
    config = SHAPES[1]
    weights = init_numpy(config, seed=0)
    params = from_torch(weights, config)
    assert isinstance(params.blocks[0].qkv, Float[jax.Array, "30 90"])
    np.testing.assert_array_equal(params.blocks[0].qkv, weights["blocks.0.attention.qkv.weight"].T)
    assert isinstance(params.head, Float[jax.Array, "30 300"])
    transposed = {source.torch_name for source in jax.tree.leaves(weight_map(config)) if source.transposed}
    assert transposed == {
        name for name, shape in parameter_shapes(config).items() if len(shape) == 2 and name != "embedding.weight"
    }


def test_transferred_weights_are_copies():
    config = SHAPES[0]
    model = GPT(config)
    live = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    params = from_torch(live, config)
    before = np.array(params.norm)
    with torch.no_grad():
        model.norm.weight.add_(1)
    np.testing.assert_array_equal(params.norm, before)


def test_refusals_say_what_is_wrong():
    config = SHAPES[0]
    weights = dict(init_numpy(config, seed=0))
    with pytest.raises(ValueError, match="64-bit mode"):
        from_torch(weights, config, jnp.float64)
    weights["norm.weight"] = np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"norm\.weight must be \(16,\), got \(3,\)"):
        from_torch(weights, config)
    del weights["norm.weight"]
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\]"):
        from_torch(weights, config)
    with pytest.raises(ValueError, match="expected parameters of 1 blocks"):
        to_torch(from_torch(init_numpy(config, 0), config), SHAPES[1])


def test_a_torch_checkpoint_opens_in_jax(tmp_path):
    config, training = SHAPES[1], TrainConfig(steps=1)
    model = GPT(config, seed=5)
    optimizer = make_optimizer(model, training)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()
    saved = Learner(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, step=1)
    checkpoints.save(tmp_path / "last.pt", saved.checkpoint(training, "0" * 64))

    opened, params = open_torch_checkpoint(tmp_path / "last.pt")

    assert asdict(opened) == asdict(config)
    for name, weight in to_torch(params, opened).items():
        np.testing.assert_array_equal(weight, model.to_numpy()[name], err_msg=name)

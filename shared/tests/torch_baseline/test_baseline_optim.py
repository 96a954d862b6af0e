import dataclasses
import math

import pytest
import torch

from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT
from torch_baseline.optim import EMA, learning_rate, make_optimizer, set_learning_rate

SCHEDULE = TrainConfig(steps=14, warmup=3, lr=1.0, min_lr=0.2)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),  # (0 + 1) / (3 + 1)
        (2, 0.75),
        (3, 1.0),  # the cosine starts at its top
        (8, 0.6),  # halfway from step 3 to step 13: (1 + 0.2) / 2
        (13, 0.2),  # the last step
        (99, 0.2),
    ],
)
def test_schedule_at_hand_computed_steps(step, expected):
    assert learning_rate(step, SCHEDULE) == pytest.approx(expected, rel=1e-12)


def test_schedule_of_a_quarter_of_the_cosine():
    config = dataclasses.replace(SCHEDULE, steps=8)  # steps 3 to 7: step 4 is a quarter of the way
    assert learning_rate(4, config) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)


def test_a_run_shorter_than_its_warm_up_still_has_a_rate():
    config = dataclasses.replace(SCHEDULE, steps=1, warmup=0)
    assert learning_rate(0, config) == 1.0


def test_only_matrices_decay(small):
    model = GPT(small)
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.3 if parameter.ndim >= 2 else 0.0), name
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_an_update_is_that_of_adamw_by_hand():
    model = torch.nn.Linear(1, 1).double()
    config = TrainConfig(lr=0.1, min_lr=0.0, beta1=0.5, beta2=0.75, adam_eps=1e-3, weight_decay=0.2)
    optimizer = make_optimizer(model, config)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    m = v = 0.0
    weight = bias = 2.0
    for step, gradient in enumerate((4.0, -1.0), start=1):
        model.weight.grad = torch.full_like(model.weight, gradient)
        model.bias.grad = torch.full_like(model.bias, gradient)
        optimizer.step()
        m, v = 0.5 * m + 0.5 * gradient, 0.75 * v + 0.25 * gradient**2
        change = 0.1 * (m / (1 - 0.5**step)) / (math.sqrt(v / (1 - 0.75**step)) + 1e-3)
        weight = weight * (1 - 0.1 * 0.2) - change
        bias -= change
    assert model.weight.item() == pytest.approx(weight, rel=1e-14)
    assert model.bias.item() == pytest.approx(bias, rel=1e-14)


def test_ema_is_its_formula():
    model = torch.nn.Linear(1, 1, bias=False).double()
    values = [8.0, 4.0, -2.0]
    with torch.no_grad():
        model.weight.fill_(values[0])
    ema = EMA(model, 0.75)
    expected = values[0]
    for value in values[1:]:
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update(model)
        expected = 0.75 * expected + 0.25 * value
    assert ema.average["weight"].item() == expected
    with ema.applied(model):
        assert model.weight.item() == expected
    assert model.weight.item() == values[-1]


def test_the_own_weights_come_back_after_an_error():
    model = torch.nn.Linear(1, 1, bias=False)
    ema = EMA(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(RuntimeError, match="inside"), ema.applied(model):
        raise RuntimeError("inside")
    assert model.weight.item() == 3.0


def test_the_weights_of_linear_layers_are_a_group_with_a_dtype():
    class Recorded(torch.optim.SGD):
        def __init__(self, groups, lr, betas, eps):
            self.given = groups
            super().__init__([{"params": group["params"]} for group in groups], lr=lr)

    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4))
    config = TrainConfig(weight_decay=0.3)
    found = make_optimizer(model, config, kind=Recorded, linear_dtype=torch.bfloat16).given
    assert [(group["weight_decay"], group.get("dtype")) for group in found] == [
        (0.3, None),
        (0.0, None),
        (0.3, torch.bfloat16),
    ]
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in found[0]["params"]] == ["embedding.weight"]  # it also makes the logits
    assert {names[id(p)].rsplit(".", 2)[-2] for p in found[2]["params"]} == {"qkv", "out", "up", "down"}
    assert sum(len(group["params"]) for group in found) == len(names)
    with pytest.raises(ValueError, match=r"torch\.optim\.AdamW keeps no float32 masters; pass a kind that does"):
        make_optimizer(model, config, linear_dtype=torch.bfloat16)

"""Pairs with casts, state, parameter groups and random numbers: right ones pass, wrong ones do not."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

from benchkit import UserError
from jax_baseline.parity.pairs import Pair, run

from .random_pairs import CASTS, GROUPS, ON_ONE_SIDE, STATES, Description


@pytest.mark.slow
@pytest.mark.parametrize(
    "description",
    [
        *(Description(cast=cast) for cast in CASTS[1:]),
        *(Description(cast=cast, side=side) for cast in ON_ONE_SIDE for side in ("torch", "JAX")),
        *(Description(state=state) for state in STATES[1:]),
        *(Description(groups=groups) for groups in GROUPS[1:]),
    ],
    ids=lambda one: f"{one.cast} {one.side}" if one.cast else one.state or one.groups,
)
def test_right_pairs_of_each_kind_have_parity(description):
    pair = description.pair()
    wide, narrow = (run(pair, dtype) for dtype in ("float64", "float32"))
    for outcome in (wide, narrow):
        assert outcome.verdict == "PARITY", str(outcome)
        assert "casts to narrower types stay" not in outcome.widened
    assert ("computed in float64 here: " in wide.widened) == bool(description.cast)


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (Description(state="running statistics", wrong="variance over n"), "variance over n = 5, torch's"),
        (Description(groups="rates", wrong="one rate"), "bias differs"),
        *(
            pytest.param(description, says, marks=pytest.mark.slow)
            for description, says in (
                (Description(cast="float32 softmax", wrong="epsilon"), "eps=1e-06 instead of 1e-05"),
                (Description(cast="float32 table", wrong="epsilon"), "eps=1e-06 instead of 1e-05"),
                (Description(state="mean", wrong="momentum"), ""),
                (Description(state="running statistics", wrong="momentum"), "JAX's changes 2 times as far"),
                (Description(state="teacher", wrong="momentum"), ""),
                (Description(groups="mask", wrong="no mask"), "bias differs"),
                (Description(groups="frozen", wrong="trained"), "bias differs"),
            )
        ),
    ],
    ids=lambda one: getattr(one, "wrong", ""),
)
def test_wrong_pairs_of_each_kind_have_none(description, says):
    outcome = run(description.pair(), "float64")
    assert outcome.verdict == "NO PARITY", str(outcome)
    assert says in outcome.where


def small_pair(torch_loss, jax_loss, model=None, **rest):
    torch.manual_seed(0)
    batches = [(np.random.default_rng(seed).standard_normal((8, 4)),) for seed in range(4)]
    params = {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}
    return Pair(
        model or nn.Linear(4, 3),
        torch_loss,
        params,
        jax_loss,
        batches,
        {"(.*)weight": "kernel.T", ".*bias": "bias"},
        **rest,
    )


def jax_linear(params, x):
    return x @ params["kernel"] + params["bias"]


def jax_square(params, x):
    return jnp.square(jax_linear(params, x)).mean()


def test_a_learning_rate_in_a_tensor_is_one_of_float64_too():
    def loss(model, x):
        return model(x).square().mean()

    pair = small_pair(
        loss,
        jax_square,
        torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.01)),
        jax_optimizer=optax.sgd(0.01),
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "PARITY", str(outcome)
    outcome = run(dataclasses.replace(pair, jax_optimizer=optax.sgd(0.01 * (1 + 1e-9))), "float64")
    assert outcome.verdict == "NO PARITY", str(outcome)


def test_a_setting_that_is_zero_in_jax_is_said_to_be_zero():
    """From these gradients two starts of the search end near 2e-11, at different numbers, which were two causes."""
    pair = small_pair(
        lambda model, x: model(x).square().mean(),
        jax_square,
        torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.9),
        jax_optimizer=optax.sgd(0.1, momentum=0.9),
    )
    assert run(pair, "float64").where.endswith("likely cause: dampening of the momentum, 0.9 in torch and 0 in JAX")


class Drawing(nn.Module):
    """A linear layer, and something that draws."""

    def __init__(self, drawing):
        super().__init__()
        self.inner, self.drawing = nn.Linear(4, 3), drawing

    def forward(self, x):
        return self.drawing(self.inner(x))


GENERATOR = torch.Generator()
HOST = np.random.default_rng(0)


def skipped(x):
    return x if random.random() < 0.5 else 2 * x


@pytest.mark.parametrize(
    ("drawing", "says"),
    [
        (nn.Dropout(0.3), "drawing, Dropout(p=0.3, inplace=False) in training mode"),
        (nn.RReLU(), "drawing, RReLU("),
        (nn.AlphaDropout(0.2), "drawing, AlphaDropout("),
        (nn.functional.dropout, "model, Drawing in training mode"),
        (lambda x: x + torch.rand(x.shape, generator=GENERATOR), "(rand)"),
        (lambda x: x[:, torch.randperm(3)] * torch.arange(3), "is random"),
        (lambda x: x * torch.from_numpy(HOST.standard_normal(3)), "test_jax_pair_kinds.py"),
        (skipped, "test_jax_pair_kinds.py"),
    ],
    ids=["dropout", "rrelu", "alpha dropout", "function", "generator", "permutation", "NumPy", "stochastic depth"],
)
def test_a_torch_side_that_draws_is_refused_by_name(drawing, says):
    random.seed(0)
    if not isinstance(drawing, nn.Module):
        module = Drawing(None)
        module.drawing = drawing
    else:
        module = Drawing(drawing)
    pair = small_pair(lambda model, x: model(x).square().mean(), jax_square, module)
    with pytest.raises(UserError, match=r"torch is random: on the same batch two runs of step [0-3]") as refused:
        run(pair, "float64")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("factor", "rate", "says"),
    [
        (lambda h: h.sign().sqrt(), 0.1, r"torch's loss is nan in step 0, in float64"),
        (lambda h: torch.where(h > 0, h.sqrt(), 0), 0.1, r"torch's gradient of weight is nan in step 0"),
        (torch.cosh, 1e5, r"torch's loss is inf in step 1"),
        (lambda h: h.square() * 0, 0.1, r"torch's gradients are zero in every step"),
    ],
    ids=["loss", "gradient", "a later loss", "zeros"],
)
def test_a_step_of_torch_that_nothing_can_be_compared_with_is_refused(factor, rate, says):
    pair = small_pair(
        lambda model, x: factor(model(x)).mean(),
        jax_square,
        torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
    )
    with pytest.raises(UserError, match=says):
        run(pair, "float64")


def test_a_gradient_that_is_nan_in_jax_alone_is_a_difference():
    def loss(params, x):
        h = jax_linear(params, x)
        return jnp.square(h).mean() + jnp.sqrt(jnp.square(h - jax.lax.stop_gradient(h)).sum())

    outcome = run(small_pair(lambda model, x: model(x).square().mean(), loss), "float64")
    assert outcome.verdict == "NO PARITY"
    assert outcome.where == "all operations of the forward pass agree: the backward pass differs"


def test_switched_off_draws_are_no_reason_to_refuse():
    pair = small_pair(lambda model, x: model(x).square().mean(), jax_square, Drawing(nn.Dropout(0.5)).eval())
    assert run(pair, "float64").verdict == "PARITY"


@pytest.mark.parametrize("how", ["while it is traced", "in a callback"])
def test_a_jax_side_that_draws_on_the_host_is_refused(how):
    def loss(params, x):
        shape = jax.ShapeDtypeStruct((3,), np.float64)
        traced = how == "while it is traced"
        noise = HOST.standard_normal(3) if traced else jax.pure_callback(lambda: HOST.standard_normal(3), shape)
        return jnp.square(jax_linear(params, x) * jax.lax.stop_gradient(noise)).mean()

    pair = small_pair(lambda model, x: model(x).square().mean(), loss)
    with pytest.raises(UserError, match=r"JAX is random: .*at test_jax_pair_kinds\.py:"):
        run(pair, "float64")


def test_a_cast_to_bfloat16_on_one_side_is_found_in_float32():
    def loss(params, x):
        return jnp.square(jax_linear(params, x.astype(jnp.bfloat16).astype(x.dtype))).mean()

    pair = small_pair(lambda model, x: model(x).square().mean(), loss)
    wide = run(pair, "float64")
    assert (wide.verdict, wide.narrowest) == ("PARITY", "bfloat16")
    assert "bfloat16 of JAX (test_jax_pair_kinds.py:" in wide.widened
    assert run(pair, "float32", narrowest="bfloat16").verdict == "NO PARITY"


def test_a_table_that_each_side_rounds_on_its_own_limits_the_bound():
    table = np.cos(np.arange(3) / 7)
    of_jax = np.float32(table) * np.float32(1 + 2**-23)  # the next float32
    model = Drawing(nn.Identity())
    model.register_buffer("table", torch.from_numpy(table).float())
    outcomes = [
        run(
            small_pair(
                lambda model, x: (model(x) * model.table).square().mean(),
                lambda params, x, by=by: jnp.square(jax_linear(params, x) * (of_jax * np.float32(by))).mean(),
                model,
            ),
            "float64",
        )
        for by in (1, 1.0001)
    ]
    assert [outcome.verdict for outcome in outcomes] == ["PARITY", "NO PARITY"]
    assert "limit the bounds" in outcomes[0].widened


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False)

    def forward(self, x):
        return self.norm(self.inner(x))


def discarding(momentum, over=1):
    kept = jnp.zeros(3), jnp.ones(3)

    def loss(params, x):
        h = jax_linear(params, x)
        new = [
            (1 - momentum) * kept[0] + momentum * h.mean(0),
            (1 - momentum) * kept[1] + momentum * h.var(0, ddof=over),
        ]
        del new  # computed and dropped
        return jnp.square((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) - 1).mean()

    return loss


@pytest.mark.parametrize(
    ("loss", "verdict", "says"),
    [
        (
            discarding(0.1),
            "PARITY",
            "compared at step 0 only, because JAX's loss does not return them: norm.running",
        ),
        (
            discarding(0.9),
            "NO PARITY",
            "norm.running_mean differs after step 0: JAX computes it at test_jax_pair",
        ),
        (discarding(0.1, over=0), "NO PARITY", "JAX's has the variance over n = 8, torch's that over n − 1"),
        (
            lambda params, x: jnp.square(jax.nn.standardize(jax_linear(params, x), 0, epsilon=1e-5) - 1).mean(),
            "PARITY",
            "not compared: norm.running_mean, norm.running_var, which torch's steps change",
        ),
    ],
    ids=["right", "momentum", "variance", "none"],
)
def test_state_that_the_loss_drops_is_compared_by_value_or_said_to_be_not(loss, verdict, says):
    pair = small_pair(lambda model, x: (model(x) - 1).square().mean(), loss, Statistics())
    outcome = run(pair, "float64")
    assert outcome.verdict == verdict, str(outcome)
    assert says in str(outcome)
    assert pair.model.norm.running_mean.abs().sum() == 0  # the user's module stays as it is


def test_a_loss_that_returns_no_state_though_it_has_one_is_one_line():
    pair = small_pair(
        lambda model, x: model(x).sum(), lambda p, state, x: jax_square(p, x), jax_state={"mean": jnp.zeros(3)}
    )
    with pytest.raises(UserError, match=r"takes \(parameters, state, \*batch\) and returns \(loss, new state\), got"):
        run(pair, "float64")


def test_a_state_of_flax_nnx_may_be_written_into():
    rngs = nnx.Rngs(0)  # a dropout that is off keeps its keys in the state
    off = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
    module = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, momentum=0.9, rngs=rngs), off)
    graph, params, stats = nnx.split(module, nnx.Param, ...)

    def loss(params, state, x):
        module = nnx.merge(graph, params, state)
        return jnp.square(module(x) - 1).mean(), nnx.split(module, nnx.Param, ...)[2]

    torch.manual_seed(0)
    pair = Pair(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        lambda model, x: (model(x) - 1).square().mean(),
        params,
        loss,
        [(np.random.default_rng(0).standard_normal((8, 4)),)],
        {
            r"0\.weight": "layers/0/kernel.T",
            r"1\.weight": "layers/1/scale",
            r"(\d)\.bias": r"layers/\1/bias",
            r"1\.running_(.*)": r"layers/1/\1",
        },
        jax_state=stats,
    )
    assert run(pair, "float64").where.endswith("JAX's has the variance over n = 8, torch's that over n − 1")


def test_groups_may_be_chosen_by_name():
    def optimizer(model):
        groups = [{"params": [p], "lr": 0.1 if name.endswith("bias") else 0.01} for name, p in model.named_parameters()]
        return torch.optim.SGD(groups)

    rates = optax.multi_transform({"a": optax.sgd(0.01), "b": optax.sgd(0.1)}, {"kernel": "a", "bias": "b"})
    pair = small_pair(
        lambda model, x: model(x).square().mean(), jax_square, torch_optimizer=optimizer, jax_optimizer=rates
    )
    assert run(pair, "float64").verdict == "PARITY"


def test_what_torch_does_not_train_is_not_trained_by_the_default_optimizer():
    model = nn.Linear(4, 3)
    model.bias.register_hook(torch.neg)
    model.bias.requires_grad_(False)  # its hook stays, and runs no more
    pair = small_pair(lambda model, x: model(x).square().mean(), jax_square, model)
    assert run(pair, "float64").verdict == "PARITY"


def test_a_cause_is_known_beside_parameters_that_torch_does_not_train():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    rates = optax.multi_transform({"a": optax.sgd(0.2), "b": optax.set_to_zero()}, {"kernel": "a", "bias": "b"})
    pair = small_pair(
        lambda model, x: model(x).square().mean(),
        jax_square,
        model,
        torch_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        jax_optimizer=rates,
    )
    where = run(pair, "float64").where
    assert "the optimizer's update of weight differs; likely cause: the learning rate" in where
    assert "0.2" in where


def test_moments_in_a_narrower_type_do_not_hide_the_cause():
    pair = small_pair(
        lambda model, x: model(x).square().mean(),
        jax_square,
        torch_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=1e-6),
        jax_optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    )
    where = run(pair, "float64").where
    assert "likely cause: epsilon" in where
    narrow = run(pair, "float32")
    assert narrow.verdict == "NO PARITY"
    assert narrow.where.endswith("JAX's optimizer keeps its first moments in bfloat16")


@pytest.mark.parametrize(
    ("in_torch", "in_jax", "says"),
    [
        (
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            optax.chain(optax.clip(50.0), optax.sgd(0.1)),
            "likely cause: clipping",
        ),
        (
            lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
            optax.sgd(0.1),
            "likely cause: momentum, 0.9 in torch",
        ),
        (
            lambda parameters: torch.optim.Adam(parameters, 1e-3),
            optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-3)),
            "likely cause: clipping: torch does not clip, JAX clips the norm of all gradients at 5",
        ),
    ],
)
def test_optimizers_that_differ_beyond_the_steps_have_no_parity(in_torch, in_jax, says):
    """A limit that no gradient reaches, and a momentum after one step."""
    pair = small_pair(
        lambda model, x: model(x).square().mean(), jax_square, torch_optimizer=in_torch, jax_optimizer=in_jax
    )
    outcome = run(dataclasses.replace(pair, batches=pair.batches[:1]), "float64")
    assert outcome.verdict == "NO PARITY"
    assert outcome.comparison.verdict == "PARITY"
    assert says in outcome.where


def test_a_parameter_that_torchs_optimizer_lacks_is_named():
    pair = small_pair(
        lambda model, x: model(x).square().mean(),
        jax_square,
        torch_optimizer=lambda model: torch.optim.SGD([model.weight], 0.1),
        jax_optimizer=optax.sgd(0.1),
    )
    assert run(pair, "float64").where.endswith("of bias differs, which torch's optimizer does not train")


class Highest(nn.Module):
    """The largest of equal numbers, of which torch takes one and JAX all."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (x.sign() @ self.weight.T + self.bias).max(-1).values


def test_ties_of_whole_numbers_are_a_difference():
    def loss(params, x):
        return jnp.square(jnp.max(jnp.sign(x) @ params["kernel"] + params["bias"], -1) - 1).mean()

    pair = small_pair(lambda model, x: (model(x) - 1).square().mean(), loss, Highest())
    outcome = run(dataclasses.replace(pair, batches=pair.batches[:1]), "float64")
    assert outcome.verdict == "NO PARITY"
    assert outcome.where == "all operations of the forward pass agree: the backward pass differs"


def test_marks_and_hooks_of_parameters_are_kept():
    """``copy.deepcopy`` of a parameter drops both."""
    model = nn.Linear(4, 3)
    model.weight._no_weight_decay = True
    model.bias.register_hook(lambda gradient: 2 * gradient)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))

    def optimizer(parameters):
        return torch.optim.AdamW(
            [{"params": [p], "weight_decay": 0.0 if hasattr(p, "_no_weight_decay") else 0.1} for p in parameters]
        )

    def loss(params, x):
        bias = 4 * params["bias"] - 3 * jax.lax.stop_gradient(params["bias"])
        return jax_square(params | {"bias": bias}, x)

    pair = small_pair(
        lambda model, x: model(x).square().mean(),
        loss,
        model,
        torch_optimizer=optimizer,
        jax_optimizer=optax.adamw(1e-3, weight_decay=0.1, mask={"kernel": False, "bias": True}),
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "PARITY", str(outcome)


class Lowest(nn.Module):
    """A linear layer behind a mask, with the lowest of its results so far: of the last none is ever given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf, 0.0]), requires_grad=False)
        self.register_buffer("lowest", torch.full((4,), torch.inf))
        self.register_buffer("unused", torch.full((4,), torch.nan))

    def forward(self, x):
        h = self.inner(x)
        self.lowest[:3] = torch.minimum(self.lowest[:3], h.detach().amin(0))
        return (h + self.mask).softmax(-1)


@pytest.mark.parametrize(
    ("of", "dtype", "verdict"), [(0, "float64", "PARITY"), (0, "float32", "PARITY"), (2, "float32", "NO PARITY")]
)
def test_the_same_infinity_on_both_sides_is_no_difference(of, dtype, verdict):
    def loss(params, state, x):
        h = jax_linear(params, x)
        lowest = state["lowest"].at[:3].min(jax.lax.stop_gradient(h).min(0))
        rounded = lowest.astype(jnp.bfloat16).astype(h.dtype) if of else lowest
        return jnp.square(jax.nn.softmax(h + params["mask"])).mean(), {"lowest": rounded}

    pair = small_pair(lambda model, x: model(x).square().mean(), loss, Lowest(), jax_state={"lowest": jnp.zeros(4)})
    pair = dataclasses.replace(pair, params=pair.params | {"mask": jnp.zeros(3)})
    outcome = run(pair, dtype, narrowest="bfloat16" if of else "float32")
    assert outcome.verdict == verdict, str(outcome)
    assert "not compared" not in str(outcome)
    assert ("the new value of lowest differs" in outcome.where) == bool(of)


def test_autocast_is_a_cast():
    def loss(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    assert run(small_pair(loss, jax_square), "float64").narrowest == "bfloat16"


@pytest.mark.parametrize("asks", ["loss", "optimizer"])
def test_a_side_that_asks_for_its_dtype_is_compared_with_its_casts(asks):
    def require_float32(where, tensor):
        if where == asks and tensor.float().dtype != torch.float32:
            raise TypeError("the kernel takes float32")

    def torch_loss(model, x):
        require_float32("loss", x)
        return model(x).square().mean()

    def torch_optimizer(parameters):
        require_float32("optimizer", torch.ones(()))
        return torch.optim.SGD(parameters, lr=0.1)

    params = {"weight": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}
    pair = Pair(
        nn.Linear(3, 4),
        torch_loss,
        params,
        lambda p, x: jnp.square(x @ p["weight"] + p["bias"]).mean(),
        [(np.random.default_rng(0).standard_normal((2, 3)),)],
        {"weight": "weight.T"},
        torch_optimizer,
        optax.sgd(0.1),
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "PARITY"
    assert outcome.widened.endswith("without them a side raised TypeError: the kernel takes float32")

"""Pairs and functions as people write them: whole numbers, in-place writes, losses that differentiate, keys, ties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from jax_baseline.parity.location.functions import locate
from jax_baseline.parity.location.operations import Call
from jax_baseline.parity.location.updates import rule_of
from jax_baseline.parity.location.variants import variants
from jax_baseline.parity.pairs import Pair, run
from jax_baseline.parity.rounding import torch_noise, with_noise

LINEAR = {"weight": jnp.zeros((4, 4)), "bias": jnp.zeros(4)}
DRAWN = np.random.default_rng(0).standard_normal((2, 6, 4))


def seeded(module, *arguments, **keywords):
    torch.manual_seed(0)
    return module(*arguments, **keywords)


def jax_linear(params, x):
    return x @ params["weight"].T + params["bias"]


def test_whole_numbers_and_writes_into_the_batch_are_no_difference():
    """Pixels and a table that torch makes in its default dtype, labels that its loss changes, and a flipped view."""

    def in_torch(model, pixels, labels):
        labels[labels == 0] = -100
        logits = model(pixels / 255) * torch.linspace(0, 1, 4) + torch.arange(4) / 7
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100, label_smoothing=0.1)

    def in_jax(params, pixels, labels):
        logits = jax_linear(params, pixels / 255) * jnp.linspace(0, 1, 4) + jnp.arange(4) / 7
        wanted = jax.nn.one_hot(labels, 4) * 0.9 + 0.1 / 4
        return -((wanted * jax.nn.log_softmax(logits)).sum(-1) * (labels != 0)).sum() / (labels != 0).sum()

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (9, 4)).astype(np.uint8)[:, ::-1]
    labels = generator.integers(0, 4, 9).astype(">i8")
    outcome = run(Pair(seeded(nn.Linear, 4, 4), in_torch, LINEAR, in_jax, [(pixels, labels)] * 2), "float64")
    assert outcome.verdict == "PARITY", str(outcome)
    assert labels.min() == 0
    assert torch.get_default_dtype() == torch.float32


def slope_in_torch(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    return (slope.square().sum(-1) - 1).square().mean()


def test_a_loss_that_differentiates_is_located_too():
    def in_jax(params, x):
        slope = jax.grad(lambda x: jnp.sin(jax_linear(params, x)).sum())(x)
        return jnp.square(jnp.square(slope).sum(-1) - 1).mean()

    outcome = run(Pair(seeded(nn.Linear, 4, 4), slope_in_torch, LINEAR, in_jax, [(DRAWN[0],)]), "float64")
    assert outcome.verdict == "NO PARITY"
    assert outcome.where.startswith("first difference: torch computes tanh at ")
    assert "JAX computes cos at " in outcome.where or "JAX computes sin at " in outcome.where


def masked_by_a_key(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0.0)


def turned(x):
    return (jax.lax.complex(x, x[::-1]) * 1j).real


@pytest.mark.parametrize("changed", [masked_by_a_key, turned])
def test_keys_and_complex_numbers_in_jax_do_not_hinder(changed):
    x = DRAWN[0]
    with jax.enable_x64(True):
        found = locate(lambda: torch.from_numpy(x).tanh(), lambda x: jnp.tanh(changed(x)), (jnp.asarray(x),))
    assert found.torch.startswith("tanh")
    assert found.jax


def test_noise_keeps_the_sign_of_a_conjugates_imaginary_part():
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    with torch_noise(0):
        imaginary = z.conj().imag * 2
    assert torch.allclose(imaginary, torch.tensor([-4.0, 8.0], dtype=torch.float64))


def indices(x):
    return torch.arange(4).expand(x.shape)


@pytest.mark.parametrize(
    "chosen",
    [
        torch.max,
        torch.median,
        lambda x: x.clamp(min=0).amax(0),
        lambda x: torch.linalg.vector_norm(x, ord=float("inf")),
        lambda x: torch.zeros_like(x).scatter_reduce(0, indices(x) % 2, x, "amax", include_self=False),
    ],
)
def test_noise_leaves_the_gradient_of_a_chosen_element_in_torch(chosen):
    """The backward pass looks for the element that equals the result."""
    x = torch.from_numpy(DRAWN[0]).requires_grad_()
    (plain,) = torch.autograd.grad(chosen(x).sum(), x)
    with torch_noise(0):
        (noisy,) = torch.autograd.grad(chosen(x).sum(), x)
    assert plain.abs().sum() > 0
    assert torch.equal(noisy, plain)


@pytest.mark.parametrize(
    "chosen",
    [
        lambda x: jnp.maximum(x, 0.0),
        lambda x: jnp.clip(x, -0.5, 0.5),
        lambda x: jnp.abs(x).max(0),
        lambda x: jax.ops.segment_max(x, jnp.arange(6) % 2, 2),
    ],
)
def test_noise_leaves_the_gradient_of_a_chosen_element_in_jax(chosen):
    with jax.enable_x64(True):
        gradient = jax.grad(lambda x: chosen(x).sum())
        x = jnp.asarray(DRAWN[0])
        assert np.array_equal(with_noise(gradient, 0)(x), gradient(x))


def test_a_formula_of_jax_that_cancels_is_the_cause():
    x = DRAWN[0] / 10 + 300

    def in_jax(x):
        variance = (x**2).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2
        return (((x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance + 1e-6)) ** 3).mean()

    with jax.enable_x64(True):
        in_torch = lambda: nn.functional.layer_norm(torch.from_numpy(x), (4,), eps=1e-6).pow(3).mean()  # noqa: E731
        cause = locate(in_torch, in_jax, (jnp.asarray(x),)).cause
    assert cause.startswith("rounding, which one unit in the last place of each operand moves by")
    assert "JAX's formula loses digits" in cause


def test_no_argument_is_changed_of_an_operator_that_does_not_check_it():
    """A norm of weights over another dimension than that of its g reads and writes beyond them."""
    v, g = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(6, 1)
    call = Call(torch.ops.aten._weight_norm_interface.default, *tree_flatten(((v, g, 0), {})), {})
    assert [words for words, _ in variants(call, (2.0,)) if words.startswith("dim")] == []


@pytest.mark.parametrize("hidden", [-1e30, -1e20, -np.inf])
def test_a_masks_number_meets_nothing(hidden):
    q, k, v = np.random.default_rng(1).standard_normal((3, 2, 5, 4))

    def in_jax(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), q @ k.swapaxes(-1, -2), hidden)
        return ((jax.nn.softmax(scores) @ v) ** 3).mean()

    def in_torch():
        tensors = (torch.from_numpy(array)[None] for array in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).pow(3).mean()

    with jax.enable_x64(True):
        found = locate(in_torch, in_jax, [jnp.asarray(array) for array in (q, k, v)])
    assert found.torch.startswith("_scaled_dot_product")
    assert "scale=1.0" in found.cause


def test_stacked_layers_are_not_what_differs():
    w = np.random.default_rng(2).standard_normal((3, 4, 4))

    def in_torch():
        x = torch.from_numpy(DRAWN[0])
        for index in range(3):
            x = x + nn.functional.gelu(x @ torch.from_numpy(w[index]))
        return x.square().mean()

    def in_jax(x, *weights):
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w, approximate=True), None), x, jnp.stack(weights))
        return jnp.square(x).mean()

    with jax.enable_x64(True):
        found = locate(in_torch, in_jax, [jnp.asarray(array) for array in (DRAWN[0], *w)])
    assert (found.torch.split()[0], found.jax.split()[0]) == ("gelu", "integer_pow")
    assert found.cause == "with approximate='tanh' instead of 'none' in torch they agree"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)


def test_decay_of_what_has_no_gradient_is_named():
    pair = Pair(
        seeded(Two),
        lambda model, x: model.used(x).square().mean(),
        {"used": LINEAR, "unused": LINEAR},
        lambda params, x: jnp.square(jax_linear(params["used"], x)).mean(),
        [(x,) for x in DRAWN],
        torch_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
        jax_optimizer=optax.adamw(1e-2, weight_decay=0.1),
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "NO PARITY"
    assert "torch leaves out a parameter that has no gradient (None); with zeros they agree" in outcome.where


def test_a_bias_of_zero_that_jax_lacks_is_named():
    model = seeded(nn.Linear, 4, 4)
    nn.init.zeros_(model.bias)
    pair = Pair(
        model,
        lambda model, x: model(x).pow(3).mean(),
        LINEAR,
        lambda params, x: ((x @ params["weight"].T) ** 3).mean(),
        [(DRAWN[0],)],
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "NO PARITY"
    assert "JAX's gradient of bias is zero: its loss does not depend on it, or stops the gradient" in outcome.where


def test_other_settings_of_the_same_names_have_no_rule():
    (group,) = torch.optim.Adafactor([nn.Parameter(torch.ones(2))]).param_groups
    assert isinstance(group["eps"], tuple)
    assert rule_of(group) is None


def squared(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("traced", [lambda function: function, jax.jit], ids=["as it is", "traced once"])
def test_a_table_that_jax_alone_has_in_float32_limits_the_bound(traced):
    table = np.linspace(0, 1, 4, dtype=np.float32)
    pair = Pair(
        seeded(nn.Linear, 4, 4),
        lambda model, x: (model(x) * torch.linspace(0, 1, 4)).square().mean(),
        LINEAR,
        traced(lambda params, x: jnp.square(jax_linear(params, x) * table).mean()),
        [(DRAWN[0],)],
    )
    outcome = run(pair, "float64")
    assert outcome.verdict == "PARITY", str(outcome)
    assert "limit the bounds" in outcome.widened


def test_a_constant_of_numpy_is_traced_anew_in_float32():
    """JAX kept the constant of the first pass: "op requires the same element type"."""
    table = np.linspace(0, 1, 24).reshape(6, 4)
    pair = Pair(
        seeded(nn.Linear, 4, 4),
        lambda model, x: (model(x) + torch.linspace(0, 1, 24).reshape(6, 4)).square().mean(),
        LINEAR,
        lambda params, x: jnp.square(jax_linear(params, x) + table).mean(),
        [(DRAWN[0],)],
    )
    assert [run(pair, dtype).verdict for dtype in ("float64", "float32")] == ["PARITY"] * 2


@pytest.mark.parametrize(
    ("in_torch", "in_jax", "first", "cause"),
    [
        (
            lambda x: x.masked_fill(torch.ones(6, 4).triu(1).bool(), torch.finfo(x.dtype).min).softmax(-1),
            lambda x: jax.nn.softmax(jnp.where(jnp.triu(jnp.ones((6, 4), bool), 2), jnp.finfo(x.dtype).min, x)),
            "masked_fill",
            "",
        ),
        (
            lambda x: (x @ x.T / 0.1).fill_diagonal_(-torch.inf).softmax(-1),
            lambda x: jax.nn.softmax(jnp.where(jnp.eye(6, dtype=bool), -jnp.inf, x @ x.T / 0.07)),
            "div",
            "other=0.07 instead of 0.1",
        ),
        (lambda x: x.sigmoid() * x + (1 - x.sigmoid()) * x.tanh(), None, "mul", ""),
        (lambda x: (x - x.mean(0)) / x.std(0), lambda x: (x - x.mean(0)) / x.std(0), "std", "correction=0"),
    ],
    ids=["the least number", "in place", "gates exchanged", "the deviation over n"],
)
def test_what_is_written_in_other_ways_is_located_without_a_false_cause(in_torch, in_jax, first, cause):
    def exchanged(x):
        gate = jax.nn.sigmoid(x)
        return (1 - gate) * x + gate * jnp.tanh(x)

    x = DRAWN[0]
    with jax.enable_x64(True):
        of_torch = lambda: in_torch(torch.from_numpy(x)).pow(3).mean()  # noqa: E731
        found = locate(of_torch, lambda x: ((in_jax or exchanged)(x) ** 3).mean(), (jnp.asarray(x),))
    assert found.torch.startswith(first)
    assert cause in found.cause
    assert bool(cause) == bool(found.cause)


def test_a_moment_that_differs_before_the_weights_has_a_cause():
    pair = Pair(
        seeded(nn.Linear, 4, 4),
        squared,
        LINEAR,
        lambda params, x: jnp.square(jax_linear(params, x)).mean(),
        [(DRAWN[0],)],
        torch_optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3, betas=(0.9, 0.95)),
        jax_optimizer=optax.adam(1e-3, b2=0.98),
    )
    where = run(pair, "float64").where
    assert "likely cause: the decay of the second moment, 0.95 in torch and 0.98 in JAX" in where

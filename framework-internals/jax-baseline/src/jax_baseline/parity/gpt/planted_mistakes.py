"""Common porting mistakes, planted one at a time, to test whether the comparison detects them and at which step.

A passed comparison is evidence only if it would have failed for a wrong port. Each :class:`Mistake` is a mistake
of real ports of training loops. :func:`plant_mistakes` puts each into the correct step of this package and compares it
with :mod:`jax_baseline.parity.comparison` under the bounds of the same run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchkit import Quantity
from jax_baseline.gpt import model as gpt
from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
from jax_baseline.gpt.model import Attention, Parts
from jax_baseline.gpt.optim import (
    clip_like_torch,
    decayed,
    global_norm,
    make_adamw,
    make_optimizer,
    master_dtype,
    scale_by_adam,
)
from jax_baseline.gpt.train import make_gradient
from jax_baseline.gpt.transfer import from_torch, to_torch
from jax_baseline.parity.comparison import Observation, compare_observations
from jax_baseline.parity.gpt.adapters import Setup, TorchAdapter, control_adapters, moments_by_torch_names
from jax_baseline.parity.records import MistakeRecord
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import Tokens
from torch_baseline.optim import learning_rate

# The gradient of a mistake runs a few times only, so most of LLVM's optimisations cost more than they save. Level 0 is
# too low: its sums add one number after another, and a correct loss can then deviate further than every control.
_COMPILE_QUICKLY = {"xla_backend_optimization_level": 1}

Optimizer = Callable[[TrainConfig], optax.GradientTransformation]


@dataclass(frozen=True)
class Mistake:
    """One mistake. The defaults of all fields are correct."""

    name: str
    model: Mapping[str, Any] = field(default_factory=dict)  # wrong fields of the model's shape
    training: Mapping[str, Any] = field(default_factory=dict)  # wrong settings
    parts: Parts = gpt.PARTS
    optimizer: Optimizer = make_optimizer
    # Function that changes the initial weights, which have torch's names.
    weights: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda weights: weights
    # Function (batches, step) → batch of the step.
    batch: Callable[[Sequence[tuple[Tokens, Tokens]], int], tuple[Tokens, Tokens]] = lambda batches, step: batches[step]


def plant_mistakes(setup: Setup, mistakes: Sequence[Mistake] | None = None) -> list[MistakeRecord]:
    """Compare the correct step, which must pass, and then the step with each mistake.

    Args:
        setup: Settings of the comparison: a small model with a square matrix, a low ``clip`` so that clipping takes
            effect, and some warm-up.
        mistakes: Mistakes to plant. The default is :data:`MISTAKES`.
    """
    device = jax.devices(setup.device)[0]  # JAX's default may be a GPU, where each mistake takes long to compile
    with jax.default_device(device), jax.enable_x64(setup.training.dtype == "float64"):
        batches = setup.batches()
        reference, *controls = (
            [adapter.step(*batch) for batch in batches] for adapter in (TorchAdapter(setup), *control_adapters(setup))
        )
        gradients: dict[Any, Any] = {}
        records = []
        for mistake in (Mistake(""), *(MISTAKES if mistakes is None else mistakes)):
            observed = _run(setup, mistake, batches, gradients)
            compared = compare_observations(reference, observed, controls=controls, dtype=setup.training.dtype)
            divergence = compared.divergence()
            if divergence is None:
                records.append(MistakeRecord(mistake.name, Quantity(0.0, ""), None, ""))
                continue
            where = divergence.quantity + (f" of {divergence.parameter}" if divergence.parameter else "")
            times = Quantity(divergence.deviation / divergence.bound, "")
            records.append(MistakeRecord(mistake.name, times, divergence.step, where))
        return records


def _run(
    setup: Setup, mistake: Mistake, batches: Sequence[tuple[Tokens, Tokens]], gradients: dict[Any, Any]
) -> list[Observation]:
    """Train with the mistake; those with the same gradient share its compilation."""
    model, training = replace(setup.model, **mistake.model), replace(setup.training, **mistake.training)
    key = (model, training.accumulation, mistake.parts)
    if key not in gradients:
        gradients[key] = jax.jit(
            make_gradient(model, training, parts=mistake.parts),
            compiler_options=ROUND_AS_WRITTEN | (_COMPILE_QUICKLY if setup.device == "cpu" else {}),
        )
    weights = mistake.weights({name: array.copy() for name, array in setup.weights().items()})
    if model.tie_embeddings and not setup.model.tie_embeddings:
        weights.pop("head.weight")
    params = from_torch(weights, model, master_dtype(training))
    optimizer = mistake.optimizer(training)
    state = optimizer.init(params)
    observed = []
    for step in range(len(batches)):
        tokens_BT, targets_BT = mistake.batch(batches, step)
        loss, gradient = gradients[key](params, tokens_BT.astype(np.int32), targets_BT.astype(np.int32))
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        observed.append(
            Observation(
                float(loss),
                float(global_norm(gradient)),
                _whole(to_torch(gradient, model), setup.model),
                _whole(to_torch(params, model), setup.model),
                moments_by_torch_names(state, model) if model == setup.model else {},
            )
        )
    return observed


def _whole(weights: dict[str, np.ndarray], config: GPTConfig) -> dict[str, np.ndarray]:
    """Add the missing head to the weights of a port that ties it to the embedding by mistake."""
    return weights if config.tie_embeddings else {"head.weight": weights["embedding.weight"], **weights}


def _parts(**changed: Any) -> Parts:
    return gpt.PARTS._replace(**changed)


def _mask(diagonal: int = 0, *, scale: Callable[[int], float] = lambda size: 1 / math.sqrt(size)) -> Attention:
    def attention(q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
        length, size = q_BTHD.shape[1], q_BTHD.shape[-1]
        scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) * scale(size)
        seen_TS = np.tril(np.ones((length, length), bool), diagonal)
        weights_BHTS = jax.nn.softmax(jnp.where(seen_TS, scores_BHTS, -jnp.inf), axis=-1)
        return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)

    return attention


def _rotation(
    turn: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], keys: bool = True, shift: int = 0
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    def heads(qkv_BT3HD: jax.Array, cos_TD: jax.Array, sin_TD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = (qkv_BT3HD[:, :, index] for index in range(3))
        cos, sin = (jnp.roll(table, shift, 0) for table in (cos_TD, sin_TD))
        return turn(q, cos_TD, sin_TD), turn(k, cos, sin) if keys else k, v

    return heads


def _turn_neighbours(x_BTHD: jax.Array, cos_TD: jax.Array, sin_TD: jax.Array) -> jax.Array:
    """Rotate the pairs (x_2i, x_2i+1), which is the layout of other models."""
    first, second, cos, sin = x_BTHD[..., ::2], x_BTHD[..., 1::2], cos_TD[:, None], sin_TD[:, None]
    return jnp.stack((first * cos - second * sin, second * cos + first * sin), -1).reshape(x_BTHD.shape)


def _order(*order: int) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    def heads(qkv_BT3HD: jax.Array, cos_TD: jax.Array, sin_TD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return gpt.rotated_heads(qkv_BT3HD[:, :, list(order)], cos_TD, sin_TD)

    return heads


def _heads_before_parts(
    qkv_BT3HD: jax.Array, cos_TD: jax.Array, sin_TD: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Read the rows of qkv as (head, part, size) instead of (part, head, size)."""
    batch, length, three, heads, size = qkv_BT3HD.shape
    swapped = qkv_BT3HD.reshape(batch, length, heads, three, size).swapaxes(2, 3)
    return gpt.rotated_heads(swapped, cos_TD, sin_TD)


def _smoothed(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    uniform = (jax.nn.logsumexp(logits_BTV, -1) - logits_BTV.mean(-1)).mean()
    return 0.999 * gpt.cross_entropy(logits_BTV, targets_BT) + 0.001 * uniform


def _adamw(change: Callable[[TrainConfig], Mapping[str, Any]], clip: Any = None) -> Optimizer:
    """Clipping (torch's, or ``clip``), then AdamW with changed arguments."""

    def make(config: TrainConfig) -> optax.GradientTransformation:
        first = clip_like_torch(config.clip) if clip is None else clip(config.clip)
        return optax.chain(first, make_adamw(config, **change(config)))

    return make


def _rates(change: Callable[[int], int]) -> Optimizer:
    """Use the learning rate of another step."""

    def rates(config: TrainConfig) -> Mapping[str, Any]:
        table = np.array([learning_rate(change(step), config) for step in range(config.steps)])
        return {"schedule": lambda count: jnp.asarray(table)[count]}

    return _adamw(rates)


def _clip_each(max_norm: float) -> optax.GradientTransformation:
    """Clip every gradient by its own norm."""

    def clip(g: jax.Array) -> jax.Array:
        return g * jnp.minimum(1.0, max_norm / (jnp.linalg.norm(g.ravel()) + 1e-6))

    return optax.stateless(lambda updates, params: jax.tree.map(clip, updates))


def _eps_in_root(config: TrainConfig, power: int) -> optax.GradientTransformation:
    return scale_by_adam(config.beta1, config.beta2, 0.0, config.adam_eps**power)


def _without_bias_correction(config: TrainConfig) -> optax.GradientTransformation:
    """Use the moments without the division by 1 − βᵗ."""
    adam = scale_by_adam(config.beta1, config.beta2, config.adam_eps)

    def update(updates: optax.Updates, state: Any, params: optax.Params = None) -> tuple[optax.Updates, optax.OptState]:
        _, after = adam.update(updates, state, params)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.adam_eps), after.mu, after.nu), after

    return optax.GradientTransformation(adam.init, update)


def _transposed(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda weights: {**weights, name: np.ascontiguousarray(weights[name].T)}


MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "GELU by the error function, not tanh",
        parts=_parts(activation=lambda h, bias: jax.nn.gelu(h + bias, approximate=False)),
    ),
    Mistake(
        "bias added after the GELU", parts=_parts(activation=lambda h, bias: jax.nn.gelu(h, approximate=True) + bias)
    ),
    Mistake("norm eps 1e-6 (Flax's default)", model={"norm_eps": 1e-6}),
    Mistake(
        "norm eps outside the root",
        parts=_parts(norm=lambda x, weight, eps: x / (jnp.sqrt(jnp.square(x).mean(-1, keepdims=True)) + eps) * weight),
    ),
    Mistake(
        "LayerNorm for RMSNorm",
        parts=_parts(norm=lambda x, weight, eps: gpt.rms_norm(x - x.mean(-1, keepdims=True), weight, eps)),
    ),
    Mistake("norm gain read as 1 + weight", parts=_parts(norm=lambda x, weight, eps: gpt.rms_norm(x, 1 + weight, eps))),
    Mistake("causal mask off by one", parts=_parts(attention=_mask(1))),
    Mistake("attention scaled by 1/√C", parts=_parts(attention=_mask(scale=lambda size: 1 / math.sqrt(2 * size)))),
    Mistake("attention not scaled", parts=_parts(attention=_mask(scale=lambda size: 1.0))),
    Mistake("rotation backwards", parts=_parts(heads=_rotation(lambda x, cos, sin: gpt.rotate(x, cos, -sin)))),
    Mistake("rotation of neighbours, not halves", parts=_parts(heads=_rotation(_turn_neighbours))),
    Mistake("keys not rotated", parts=_parts(heads=_rotation(gpt.rotate, keys=False))),
    Mistake("keys' positions off by one", parts=_parts(heads=_rotation(gpt.rotate, shift=1))),
    Mistake("rotary base 500 000", model={"rope_base": 500_000.0}),
    Mistake("q and k exchanged", parts=_parts(heads=_order(1, 0, 2))),
    Mistake("k and v exchanged", parts=_parts(heads=_order(0, 2, 1))),
    Mistake("qkv read as head, part, size", parts=_parts(heads=_heads_before_parts)),
    Mistake("a square kernel not transposed", weights=_transposed("blocks.0.attention.out.weight")),
    Mistake("head tied to the embedding", model={"tie_embeddings": True}),
    Mistake(
        "loss over one position less",
        parts=_parts(cross_entropy=lambda logits, at: gpt.cross_entropy(logits, at) * (at.size / (at.size - 1))),
    ),
    Mistake(
        "last position left out of the loss",
        parts=_parts(cross_entropy=lambda logits, targets: gpt.cross_entropy(logits[:, :-1], targets[:, :-1])),
    ),
    Mistake("label smoothing 0.001", parts=_parts(cross_entropy=_smoothed)),
    Mistake("targets not shifted", batch=lambda batches, step: (batches[step][0], batches[step][0])),
    Mistake("two batches exchanged", batch=lambda batches, step: batches[{2: 3, 3: 2}.get(step, step)]),
    Mistake("the first batch again and again", batch=lambda batches, step: batches[0]),
    Mistake("beta2 0.999 (optax's default)", training={"beta2": 0.999}),
    Mistake("Adam eps 1e-6", training={"adam_eps": 1e-6}),
    Mistake("Adam eps inside the root", optimizer=_adamw(lambda config: {"adam": _eps_in_root(config, 1)})),
    Mistake("Adam eps squared inside the root", optimizer=_adamw(lambda config: {"adam": _eps_in_root(config, 2)})),
    Mistake("no bias correction", optimizer=_adamw(lambda config: {"adam": _without_bias_correction(config)})),
    Mistake("weight decay 1e-4 (optax's default)", training={"weight_decay": 1e-4}),
    Mistake("weight decay on gains and biases", optimizer=_adamw(lambda config: {"mask": None})),
    Mistake(
        "no weight decay on the embedding",
        optimizer=_adamw(lambda config: {"mask": lambda params: decayed(params)._replace(embedding=False)}),
    ),
    Mistake(
        "L2 in the gradient for decoupled decay",
        optimizer=lambda config: optax.chain(
            clip_like_torch(config.clip),
            optax.add_decayed_weights(config.weight_decay, decayed),
            make_adamw(config, weight_decay=0.0),
        ),
    ),
    Mistake("no clipping", training={"clip": 1e9}),
    Mistake("clipping without torch's 1e-6", optimizer=_adamw(lambda config: {}, clip=optax.clip_by_global_norm)),
    Mistake("clipping each gradient by itself", optimizer=_adamw(lambda config: {}, clip=_clip_each)),
    Mistake(
        "clipping after Adam",
        optimizer=lambda config: optax.chain(make_adamw(config), clip_like_torch(config.clip)),
    ),
    Mistake("schedule a step late", optimizer=_rates(lambda step: max(step - 1, 0))),
    Mistake("schedule a step early", optimizer=_rates(lambda step: step + 1)),
)

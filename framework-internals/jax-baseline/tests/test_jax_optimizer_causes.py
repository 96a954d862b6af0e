"""Differences of two optimizers that are planted one at a time: the right cause, or an honest "not identified"."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_baseline.parity.location.updates import UNKNOWN, why_updates_differ

DRAWN = np.random.default_rng(0)
WEIGHTS = {
    "a.weight": DRAWN.standard_normal((6, 5)),
    "norm.weight": np.ones(6),
    "a.bias": np.zeros(6),
    "scale": np.array(0.7),
}
GRADIENTS = [
    {name: np.asarray(0.3 * DRAWN.standard_normal(array.shape)) for name, array in WEIGHTS.items()} for _ in range(4)
]
TORCH = torch.optim


def clipping(base, clip):
    """A torch optimizer that clips first, as a training loop does."""

    class Clipping(base):
        def step(self, closure=None):
            clip([parameter for group in self.param_groups for parameter in group["params"]])
            return super().step(closure)

    return Clipping


def by_norm(limit):
    return lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, limit)


class Warmup(torch.optim.SGD):
    """SGD whose rate grows by a tenth of ``lr`` with each step."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        group["lr"] = 0.01 * group["step"]
        return super().step(closure)


class Cautious(torch.optim.AdamW):
    """An optimizer that no formula here describes."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad.sign() * parameter.grad.abs() ** 0.7
        return super().step(closure)


def two_groups(parameters, *, first, rest, base=TORCH.AdamW, **settings):
    return base([{"params": parameters[:1], **first}, {"params": parameters[1:], **rest}], **settings)


def each_by_its_norm(limit):
    def clip(gradients, state, params=None):
        return jax.tree.map(lambda g: g * jnp.minimum(1, limit / jnp.linalg.norm(g.ravel())), gradients), state

    return optax.GradientTransformation(lambda params: (), clip)


def uncorrected_adam(rate, eps=1e-8):
    def update(gradients, state, params=None):
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], gradients)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state[1], gradients)
        return jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + eps), m, v), (m, v)

    return optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p),) * 2, update)


chain = optax.chain
SGD = functools.partial(TORCH.SGD, lr=0.1)
MOMENTUM = functools.partial(TORCH.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(TORCH.Adam, lr=1e-2)
PLAIN = functools.partial(TORCH.AdamW, lr=1e-2, weight_decay=0.0)
CLIPPED = functools.partial(clipping(TORCH.SGD, by_norm(0.3)), lr=0.1)
MATRICES = {name: array.ndim > 1 for name, array in WEIGHTS.items()}
L2, DECOUPLED = (
    "0.1 times the weight added to the gradient (L2)",
    "0.1 of the weight times the learning rate (decoupled)",
)

BY_NORM = "torch clips the norm of all gradients at 0.3, to which it adds 1e-06 before dividing"

PLANTED = {
    "L2 and decoupled decay": (
        functools.partial(ADAM, weight_decay=0.1),
        optax.adamw(1e-2, weight_decay=0.1),
        f"weight decay, {L2} in torch and {DECOUPLED} in JAX",
    ),
    "the defaults of AdamW": (
        functools.partial(TORCH.AdamW, lr=1e-2),
        optax.adamw(1e-2),
        "weight decay, 0.01 of the weight times the learning rate (decoupled) in torch and 0.0001 of the weight",
    ),
    "decay of matrices alone": (
        functools.partial(TORCH.AdamW, lr=1e-2, weight_decay=0.1),
        optax.adamw(1e-2, weight_decay=0.1, mask=MATRICES),
        f"weight decay, {DECOUPLED} in torch and none in JAX for norm.weight, a.bias, scale",
    ),
    "decay that a group of torch leaves out": (
        functools.partial(two_groups, first={"weight_decay": 0.1}, rest={"weight_decay": 0.0}, lr=1e-2),
        optax.adamw(1e-2, weight_decay=0.1),
        f"weight decay, none in torch and {DECOUPLED} in JAX",
    ),
    "decay that the schedule does not scale": (
        functools.partial(Warmup, lr=0.01, weight_decay=0.1),
        chain(optax.sgd(lambda n: 0.01 * (n + 1)), optax.add_decayed_weights(-0.001)),
        "weight decay, 0.1 of the weight times the learning rate in torch and 0.001 of the weight, whatever the",
    ),
    "decay before clipping": (
        functools.partial(clipping(TORCH.SGD, by_norm(0.3)), lr=0.1, momentum=0.9, weight_decay=0.1),
        chain(optax.add_decayed_weights(0.1), optax.clip_by_global_norm(0.3), optax.sgd(0.1, 0.9)),
        "at 0.3 and weight decay, added after clipping in torch and before it in JAX",
    ),
    "clipping by norm and by element": (
        CLIPPED,
        chain(optax.clip(0.3), optax.sgd(0.1)),
        f"{BY_NORM}, JAX clips each element at 0.3",
    ),
    "what torch adds to the norm": (
        CLIPPED,
        chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1)),
        "at 0.3, to which it adds 1e-06 before dividing, JAX clips the norm of all gradients at 0.3",
    ),
    "clipping of each parameter": (
        CLIPPED,
        chain(each_by_its_norm(0.3), optax.sgd(0.1)),
        "JAX clips each parameter's norm at 0.3",
    ),
    "no clipping": (
        CLIPPED,
        optax.sgd(0.1),
        f"clipping: {BY_NORM}, JAX does not clip",
    ),
    "epsilon inside the root": (
        functools.partial(PLAIN, eps=1e-6),
        optax.adam(1e-2, eps=0.0, eps_root=1e-6),
        "epsilon, 1e-06 outside the root in torch and 1e-06 inside the root in JAX",
    ),
    "no bias correction": (
        PLAIN,
        uncorrected_adam(1e-2),
        "bias correction of the moments, used in torch and not used in JAX",
    ),
    "the decay of the second moment": (
        PLAIN,
        optax.adam(1e-2, b2=0.99),
        "the decay of the second moment, 0.999 in torch and 0.99 in JAX",
    ),
    "AMSGrad": (
        functools.partial(PLAIN, amsgrad=True),
        optax.adam(1e-2),
        "AMSGrad, of the second moment as it is in torch and not used in JAX",
    ),
    "Nesterov in Adam": (PLAIN, optax.nadam(1e-2), "Nesterov's momentum, not used in torch and used in JAX"),
    "Nesterov": (
        functools.partial(MOMENTUM, nesterov=True),
        optax.sgd(0.1, 0.9),
        "Nesterov's momentum, used in torch and not used in JAX",
    ),
    "momentum in torch alone": (MOMENTUM, optax.sgd(0.1), "momentum, 0.9 in torch and 0 in JAX"),
    "dampening": (
        functools.partial(MOMENTUM, dampening=0.1),
        optax.sgd(0.1, 0.9),
        "dampening of the momentum, 0.1 in torch and 0 in JAX",
    ),
    "dampening as large as the momentum": (
        functools.partial(MOMENTUM, dampening=0.9),
        optax.sgd(0.1, 0.9),
        "dampening of the momentum, 0.9 in torch and 0 in JAX",
    ),
    "averaged gradients": (
        MOMENTUM,
        chain(optax.ema(0.9, debias=False), optax.scale(-0.1)),
        "0.1 is 1 − momentum, as if JAX averaged gradients",
    ),
    "the learning rate": (
        PLAIN,
        optax.adam(1.1e-2),
        "the learning rate, JAX's update is 1.1 times torch's (0.01 in torch, 0.011 in JAX)",
    ),
    "the learning rate in float32": (
        SGD,
        chain(optax.scale(-float(np.float32(0.1)))),
        "0.1 in torch and rounded to float32 in JAX",
    ),
    "the learning rate of a group": (
        functools.partial(two_groups, base=TORCH.SGD, first={"lr": 0.1}, rest={"lr": 0.01}, lr=0.1),
        optax.sgd(0.1),
        "the learning rate, JAX's update is 10 times torch's",
    ),
    "the sign": (SGD, chain(optax.scale(0.1)), "the sign: JAX's update is the opposite of torch's"),
    "a schedule one step late": (
        functools.partial(Warmup, lr=0.01),
        optax.sgd(lambda n: 0.01 * n),
        "the schedule, off by one step: JAX takes torch's rate of the step before",
    ),
    "another schedule": (
        functools.partial(Warmup, lr=0.01),
        optax.sgd(optax.cosine_decay_schedule(0.1, 9)),
        "the learning rates of the steps, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, … in torch and 0.1, 0.0",
    ),
    "another optimizer": (PLAIN, optax.sgd(1e-2), "the optimizer, Adam in torch and SGD in JAX"),
    "the defaults of RMSprop": (
        functools.partial(TORCH.RMSprop, lr=1e-2),
        optax.rmsprop(1e-2),
        "inside the root in JAX and the decay of the second moment, 0.99 in torch and 0.9 in JAX",
    ),
    "the defaults of Adagrad": (
        functools.partial(TORCH.Adagrad, lr=1e-2),
        optax.adagrad(1e-2),
        "what is added to the sum of squares (its first value, an epsilon inside the root), 0 in torch and 0.1 in JAX",
    ),
    "two settings": (
        PLAIN,
        optax.adam(1e-2, b2=0.99, eps=1e-6),
        "1e-06 outside the root in JAX; a gradient scaled before would act alike and the decay of the second moment",
    ),
    "an unknown optimizer in JAX": (PLAIN, optax.lion(1e-2), UNKNOWN),
    "moments in bfloat16": (PLAIN, optax.adam(1e-2, mu_dtype=jnp.bfloat16), UNKNOWN),
    "accumulated gradients": (PLAIN, optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), UNKNOWN),
    "an unknown optimizer in torch": (functools.partial(Cautious, lr=1e-2), optax.adamw(1e-2), UNKNOWN),
    "torch's NAdam": (functools.partial(TORCH.NAdam, lr=1e-2), optax.nadam(1e-2), UNKNOWN),
    "three settings": (PLAIN, optax.adam(1e-2, b1=0.8, b2=0.99, eps=1e-6), UNKNOWN),
}


def cause(torch_factory, jax_optimizer):
    def make_torch(weights):
        parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in weights.items()}
        return parameters, torch_factory(list(parameters.values()))

    def converted(arrays):
        return {name: jnp.asarray(array.T) for name, array in arrays.items()}

    with jax.enable_x64(True):
        return why_updates_differ(make_torch, jax_optimizer, converted, WEIGHTS, GRADIENTS)


FAST = (
    "L2 and decoupled decay", "the defaults of AdamW", "decay before clipping", "clipping by norm and by element",
    "epsilon inside the root", "no bias correction", "AMSGrad", "Nesterov", "averaged gradients",
    "dampening as large as the momentum", "no clipping",
    "the learning rate in float32", "a schedule one step late", "another optimizer", "the defaults of Adagrad",
    "two settings", "an unknown optimizer in torch",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PLANTED]
)
def test_a_planted_difference_has_its_cause_or_none(name):
    torch_factory, jax_optimizer, says = PLANTED[name]
    found = cause(torch_factory, jax_optimizer)
    assert found.startswith(UNKNOWN if says == UNKNOWN else "likely cause: "), found
    assert says == UNKNOWN or UNKNOWN not in found, found
    assert says in found

"""Two optimizers, one of torch and one of JAX, run on gradients that are given to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from jax_baseline.parity.location.updates import Group, Weights, cause_of_update

MakeTorch = Callable[[Weights], tuple[Mapping[str, torch.nn.Parameter], torch.optim.Optimizer]]


def why_updates_differ(
    make_torch: MakeTorch,
    jax_optimizer: optax.GradientTransformation,
    converted: Callable[[Weights], Any],
    weights: Weights,
    gradients: Sequence[Weights],
    steps: int = 0,
) -> str:
    """Say why the updates of two optimizers differ, see :func:`jax_baseline.parity.location.updates.cause_of_update`.

    ``make_torch`` makes torch's parameters from weights, and their optimizer; ``converted`` makes JAX's tree from
    arrays by torch's names, with zeros for what torch does not train. Everything is in float64.
    """
    sizes = [array.size for array in weights.values()]
    ends = 1 + np.cumsum(sizes)  # 0 is the place of what torch does not train
    numbered = {
        name: np.arange(end - size, end, dtype=np.float64).reshape(array.shape)
        for (name, array), size, end in zip(weights.items(), sizes, ends, strict=True)
    }
    places = [np.asarray(leaf).astype(np.int64) for leaf in jax.tree.leaves(converted(numbered))]
    update = jax.jit(jax_optimizer.update)

    def named(params: Any) -> dict[str, NDArray]:
        flat = np.empty(int(ends[-1]))
        for place, leaf in zip(places, jax.tree.leaves(params), strict=True):
            flat[place] = np.asarray(leaf)
        _, *parts = np.split(flat, [1, *ends[:-1]])
        return {name: part.reshape(array.shape) for (name, array), part in zip(weights.items(), parts, strict=True)}

    def in_jax(start: Weights, given: Sequence[Weights]) -> list[Weights]:
        params = converted(start)
        state = jax_optimizer.init(params)
        after: list[Weights] = []
        for gradient in given:
            updates, state = update(converted(gradient), state, params)
            params = optax.apply_updates(params, updates)
            after.append(named(params))
        return after

    def in_torch(start: Weights, given: Sequence[Weights]) -> list[Weights]:
        parameters, optimizer = make_torch(start)
        after: list[Weights] = []
        for gradient in given:
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(gradient[name].copy())
            optimizer.step()
            after.append({name: parameter.detach().numpy().copy() for name, parameter in parameters.items()})
        return after

    parameters, optimizer = make_torch(weights)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        Group(trained, group)
        for group in optimizer.param_groups
        if (trained := [names[id(one)] for one in group["params"] if id(one) in names])
    ]
    return cause_of_update(in_torch, in_jax, groups, weights, gradients, steps)

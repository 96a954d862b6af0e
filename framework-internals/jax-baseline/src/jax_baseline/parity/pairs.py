"""A user's pair of models, one in torch and one in JAX: loss, gradients and updates step by step.

Weights and batches come from one place: torch's initial weights go through a map of names into JAX's parameters. The
controls are torch with rounding noise. A divergence is located in the forward pass, or attributed to the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from benchkit import UserError
from jax_baseline.gpt.compilation import in_torchs_precision
from jax_baseline.parity.adapters import CONTROL_STEPS
from jax_baseline.parity.comparison import Arrays, Comparison, Divergence, Observation, compare
from jax_baseline.parity.location import locate
from jax_baseline.parity.location.optimizers import why_updates_differ
from jax_baseline.parity.rounding import Noise

_RATE = 1e-3  # of the optimizers that a pair has by default
Batch = tuple[NDArray, ...]


@dataclass(frozen=True)
class Pair:
    """Two models, their losses and their optimizers.

    Attributes:
        model: The torch model, on the CPU.
        torch_loss: Function (model, *batch) → scalar.
        params: JAX's parameters; their values are replaced by torch's.
        jax_loss: Function (params, *batch) → scalar.
        batches: One tuple of NumPy arrays per step.
        names: Patterns of torch's names → paths of JAX's parameters, with groups for numbers. ``.T`` at the end
            reverses the axes; ``.transpose(2, 3, 1, 0)`` orders torch's axes as NumPy does, here for a kernel of a
            convolution. A name that no pattern matches has the same path, with ``/`` for dots.
        torch_optimizer: Function (parameters) → optimizer. The default is AdamW without decay.
        jax_optimizer: The same for JAX.
    """

    model: torch.nn.Module
    torch_loss: Callable[..., torch.Tensor]
    params: Any
    jax_loss: Callable[..., jax.Array]
    batches: Sequence[Batch]
    names: Mapping[str, str] = field(default_factory=dict)
    torch_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=_RATE, weight_decay=0.0
    )
    jax_optimizer: optax.GradientTransformation = optax.adamw(_RATE, weight_decay=0.0)  # noqa: RUF009 - plain functions

    def paths(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return, for each parameter of torch, the path in JAX and torch's axes in JAX's order.

        Raises:
            UserError: If a path does not exist, an order or a shape does not fit, or a parameter of JAX has no partner.
        """
        shapes = {_path(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(self.params)}
        found = {}
        for name, parameter in self.model.named_parameters():
            hits = (match.expand(to) for pattern, to in self.names.items() if (match := re.fullmatch(pattern, name)))
            path, axes = _ordered(next(hits, name), parameter.ndim)
            if path not in shapes:  # a group of a pattern may hold dots
                path = path.replace(".", "/")
            if path not in shapes:
                raise UserError(f"{name} has no partner {path!r} in JAX; map it to one of {', '.join(sorted(shapes))}")
            if sorted(axes) != list(range(parameter.ndim)):
                raise UserError(f"{name} has {parameter.ndim} axes, got the order {axes}; name each axis once")
            expected = tuple(parameter.shape[axis] for axis in axes)
            if shapes[path] != expected:
                raise UserError(
                    f"{path} must be {expected} for {name}, got {shapes[path]}; '.T' reverses the axes and "
                    "'.transpose(…)' orders them"
                )
            found[name] = path, axes
        if left := sorted(shapes.keys() - {path for path, _ in found.values()}):
            raise UserError(f"parameters of JAX without a partner in torch: {', '.join(left)}")
        return found

    def converted(self, weights: Mapping[str, torch.Tensor] | None = None, dtype: Any = jnp.float32) -> Any:
        """Return JAX's parameters with torch's values.

        Args:
            weights: Values by torch's names; the default is those of the model.
            dtype: Dtype of the parameters.

        Raises:
            UserError: If the parameters do not fit, see :meth:`paths`.
        """
        given = dict(self.model.named_parameters()) if weights is None else weights
        values = {path: _array(given[name]).transpose(axes) for name, (path, axes) in self.paths().items()}
        return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.array(values[_path(path)], dtype), self.params)


def _ordered(target: str, dimensions: int) -> tuple[str, tuple[int, ...]]:
    """Split the order of the axes off a path."""
    if given := re.fullmatch(r"(.*)\.transpose\(([\d, ]+)\)", target):
        return given[1], tuple(int(axis) for axis in given[2].replace(",", " ").split())
    turned = target.endswith(".T")
    return target.removesuffix(".T"), tuple(range(dimensions)[:: -1 if turned else 1])


class _TorchSide:
    def __init__(self, pair: Pair, dtype: torch.dtype, initial: Mapping[str, torch.Tensor], noise: int | None) -> None:
        self._pair, self._dtype, self._initial = pair, dtype, initial
        self._noise = nullcontext() if noise is None else Noise(noise)
        self.model = pair.model
        self._buffers = {name: tensor.clone() for name, tensor in pair.model.named_buffers()}

    def restart(self) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.data.copy_(self._buffers[name])
        self.weights = {name: tensor.to(self._dtype, copy=True) for name, tensor in self._initial.items()}
        self.optimizer = self._pair.torch_optimizer([torch.nn.Parameter(tensor) for tensor in self.weights.values()])
        self.weights = dict(zip(self.weights, self.optimizer.param_groups[0]["params"], strict=True))

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss with this side's weights; the sides share the module."""
        tensors = [_as(torch.from_numpy(array), self._dtype) for array in batch]
        call = _Call(self._pair.torch_loss, self.model)
        named = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        found: torch.Tensor = torch.func.functional_call(call, named, tuple(tensors))
        return found

    def step(self, *batch: NDArray) -> Observation:
        with self._noise:
            loss = self.loss(batch)
            gradients = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            weight.grad = torch.zeros_like(weight) if gradient is None else gradient
        kept = {name: _array(weight.grad) for name, weight in self.weights.items()}
        self.optimizer.step()
        weights = {name: _array(one) for name, one in self.weights.items()}
        return _observation(float(loss.detach()), kept, weights, self._dtype)


class _Call(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], model: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.model = function, model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.function(self.model, *batch)


class _JaxSide:
    def __init__(self, pair: Pair, dtype: Any, initial: Mapping[str, torch.Tensor]) -> None:
        self._pair, self._dtype, self._initial, self._paths = pair, dtype, initial, pair.paths()
        self._gradient = jax.jit(jax.value_and_grad(pair.jax_loss))
        self._update = jax.jit(self._updated)

    def restart(self) -> None:
        self.params = self._pair.converted(self._initial, self._dtype)
        self.state = self._pair.jax_optimizer.init(self.params)

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        floating = (np.issubdtype(array.dtype, np.floating) for array in batch)
        return self.params, *(jnp.asarray(a, self._dtype if f else None) for a, f in zip(batch, floating, strict=True))

    def step(self, *batch: NDArray) -> Observation:
        loss, gradient = self._gradient(*self.arguments(batch))
        self.params, self.state = self._update(gradient, self.state, self.params)
        return _observation(float(loss), self._named(gradient), self._named(self.params), self._dtype)

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._pair.jax_optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def _named(self, tree: Any) -> dict[str, NDArray]:
        leaves = {_path(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: leaves[path].transpose(np.argsort(axes)) for name, (path, axes) in self._paths.items()}


def run(pair: Pair, dtype: str) -> tuple[Comparison, str]:
    """Compare a pair over its batches.

    Args:
        pair: The models.
        dtype: ``float32`` or ``float64``, of weights and batches.

    Returns:
        The comparison, and where and probably why the models part; empty if they do not.

    Raises:
        UserError: If the parameters do not fit.
    """
    initial = {name: tensor.detach().clone() for name, tensor in pair.model.named_parameters()}
    of_torch = torch.float64 if dtype == "float64" else torch.float32
    before = {name: tensor.dtype for name, tensor in pair.model.named_buffers()}
    pair.model.to(of_torch)  # buffers; parameters are replaced
    controls = max(3, -(-CONTROL_STEPS // len(pair.batches)))
    try:
        with jax.enable_x64(dtype == "float64"), in_torchs_precision():
            reference = _TorchSide(pair, of_torch, initial, None)
            candidate = _JaxSide(pair, jnp.dtype(dtype), initial)
            noisy = [_TorchSide(pair, of_torch, initial, seed) for seed in range(controls)]
            candidate.restart()
            for side in (reference, *noisy):
                side.restart()
            batches: Any = pair.batches
            found = compare(batches, reference=reference, candidate=candidate, controls=noisy, dtype=dtype)
            divergence = found.divergence()
            where = "" if divergence is None else _where(pair, divergence, reference, candidate)
            return found, where
    finally:
        pair.model.to(torch.float32)
        for name, buffer in pair.model.named_buffers():
            buffer.data = buffer.data.to(before[name])


def _where(pair: Pair, divergence: Divergence, reference: _TorchSide, candidate: _JaxSide) -> str:
    reference.restart()
    candidate.restart()
    for batch in pair.batches[: divergence.step]:
        reference.step(*batch)
        candidate.step(*batch)
    batch = pair.batches[divergence.step]
    if divergence.quantity != "weights":
        with torch.no_grad():
            return str(locate(lambda: reference.loss(batch), pair.jax_loss, candidate.arguments(batch)))
    reference.restart()
    cause = why_updates_differ(
        lambda weights: _torch_optimizer(pair, weights),
        pair.jax_optimizer,
        lambda arrays: pair.converted({name: torch.from_numpy(one) for name, one in arrays.items()}, jnp.float64),
        {name: _array(tensor).astype(np.float64) for name, tensor in reference.weights.items()},
        [reference.step(*batch).gradients for batch in pair.batches],
        divergence.step,
    )
    return f"gradients agree, the optimizer's update of {divergence.parameter} differs; {cause}"


def _torch_optimizer(pair: Pair, weights: Arrays) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in weights.items()}
    return parameters, pair.torch_optimizer(list(parameters.values()))


def _observation(loss: float, gradients: Arrays, weights: Arrays, dtype: Any) -> Observation:
    # In float32 optax computes 1 − βᵗ with four digits for β = 0.999. So float64 alone judges the optimizers.
    weights = weights if dtype in (torch.float64, np.float64) else {}
    norm = float(np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in gradients.values())))
    return Observation(loss, norm, gradients, weights)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _array(tensor: torch.Tensor | None) -> NDArray:
    assert tensor is not None
    return tensor.detach().cpu().numpy().copy()


def _path(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)

"""The two sides of a pair as adapters of the comparison: each takes a step and returns what it observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from benchkit import UserError
from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
from jax_baseline.gpt.transfer import MOMENTS
from jax_baseline.parity.comparison import Arrays, Observation
from jax_baseline.parity.location.operations import array
from jax_baseline.parity.pairs.pair import Batch, Pair, in_jax, in_torch, named, path_of, state_of
from jax_baseline.parity.rounding import Widening, jax_in_float64, torch_in_float64, torch_noise
from jax_baseline.user_code import errors_of


class TorchSide:
    """torch's model, loss and optimizer.

    Without ``widening`` it computes as written. If the widening is not exact, buffers stay in their own type, so that
    the noise moves them by their own ε. Each step starts from the weights of the ``leader``, if there is one: in
    float32 frameworks' optimizers round differently (optax computes 1 − βᵗ with four digits for β = 0.999), and Adam
    makes whole steps of a gradient that is nothing but rounding. Both would move every later loss.
    """

    def __init__(
        self,
        pair: Pair,
        dtype: torch.dtype,
        *,
        noise: int | None = None,
        widening: Widening | None = None,
        leader: TorchSide | None = None,
    ) -> None:
        self.pair, self._dtype, self._seed, self.widening = pair, dtype, noise, widening
        self._leader = leader
        self.trained = pair.trained()
        self._paths, self._of_state = pair.paths(), pair.state_paths()
        self.restart()

    def restart(self) -> None:
        """Return to the state before the first step."""
        exact = self.widening is None or self.widening.exact
        self.model = self.pair.copied_model(self._dtype, buffers=exact)
        self._noise = torch_noise(self._seed)
        with self.computing():  # a learning rate may be a tensor
            self._optimizer = self.pair.optimizer_of_torch(self.model)
        self._initial = self.state()
        self.changed: set[str] = set()
        self.without_gradient: set[str] = set()  # in a step: torch's optimizers leave such a parameter out
        self._steps = 0
        self.before: Mapping[str, torch.Tensor] = {}  # weights at the start of the last step

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, torch computes in float64 if this side is to."""
        with nullcontext() if self.widening is None else torch_in_float64(self.widening):
            yield

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss with this side's weights."""
        loss: torch.Tensor = _Call(self.pair.torch_loss, self.model)(*in_torch(batch, self._dtype))
        return loss

    def step(self, *batch: NDArray) -> Observation:
        """Take the next step."""
        parameters = dict(self.model.named_parameters())
        if self._leader is not None:
            for name, weight in self._leader.before.items():
                parameters[name].data.copy_(weight)
        self.before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        trained = [parameters[name] for name in self.trained]
        with self._noise, self.computing(), errors_of(f"torch's loss or its gradient in step {self._steps}"):
            loss = self.loss(batch)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise UserError(
                "torch's loss depends on no parameter of the module that it is given; use its first argument"
            )
        for weight, gradient in zip(trained, gradients, strict=True):
            weight.grad = gradient
            for hook in (weight._post_accumulate_grad_hooks or {}).values() if gradient is not None else ():
                hook(weight)
        self.without_gradient |= {name for name in self.trained if parameters[name].grad is None}
        # torch leaves out what has no gradient; JAX's is zeros.
        kept = {
            name: np.zeros(weight.shape) if weight.grad is None else array(weight.grad)
            for name, weight in zip(self.trained, trained, strict=True)
        }
        state = self.state()
        self.changed |= {
            name for name, value in state.items() if not np.array_equal(value, self._initial[name], equal_nan=True)
        }
        with self.computing(), errors_of(f"torch's optimizer in step {self._steps}"):
            self._optimizer.step()
        weights = {name: array(parameters[name]) for name in self._paths}
        compared = {name: state[name] for name in self._of_state}
        made = _observation(float(loss.detach()), kept, weights, self._moments(parameters), compared, self._dtype)
        if self._seed is None:
            self._require_finite(made)
        self._steps += 1
        return made

    def _require_finite(self, observation: Observation) -> None:
        """Refuse a step that has nothing to compare with: what is not finite is at no distance from anything."""
        arrays = {"loss": np.asarray(observation.loss)}
        for what, by_name in (("gradient", observation.gradients), ("new value", observation.weights)):
            arrays |= {f"{what} of {name}": value for name, value in by_name.items() if name in self.trained}
        if (name := next((name for name, value in arrays.items() if not np.isfinite(value).all()), None)) is not None:
            value = arrays[name][~np.isfinite(arrays[name])].flat[0]
            raise UserError(
                f"torch's {name} is {value} in step {self._steps}, in {str(self._dtype).removeprefix('torch.')}, and "
                "nothing can be compared with it; use weights, inputs and a learning rate that keep it finite"
            )

    def state(self) -> dict[str, NDArray]:
        """The buffers, and the parameters without a gradient, as they are now."""
        held = state_of(self.model)
        return {
            name: array(tensor if self.widening is None else self.widening.held(tensor))
            for name, tensor in held.items()
        }

    def weights(self) -> dict[str, NDArray]:
        """The parameters with a gradient, as they are now."""
        parameters = dict(self.model.named_parameters())
        return {name: array(parameters[name]) for name in self.trained}

    def optimized(self) -> list[str]:
        """Names of the parameters with a gradient that the optimizer has."""
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return [name for name, of in self.model.named_parameters() if name in self.trained and id(of) in held]

    def optimizer_of(self, weights: Arrays) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        """Return parameters with other values, by name, and a new optimizer of them."""
        model = self.pair.copied_model(self._dtype)
        parameters = {name: tensor for name, tensor in model.named_parameters() if name in weights}
        for name, parameter in parameters.items():
            parameter.data.copy_(torch.from_numpy(weights[name]))
        return parameters, self.pair.optimizer_of_torch(model)

    def _moments(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, NDArray]:
        moments: dict[str, NDArray] = {}
        for name in self.trained:
            kept = self._optimizer.state.get(parameters[name], {})
            moments |= {
                f"{key} of {name}": array(kept[key]) for key in MOMENTS if isinstance(kept.get(key), torch.Tensor)
            }
        return moments


class _Call(torch.nn.Module):
    """Gives the module of the user a name, so that operations in it are placed at ``model.blocks.0``."""

    def __init__(self, function: Any, model: torch.nn.Module) -> None:
        super().__init__()
        self.function, self.model = function, model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.function(self.model, *batch)
        return loss


class JaxSide:
    """JAX's parameters, loss, optimizer and state.

    ``widening`` and ``leader`` are those of :class:`TorchSide`.
    """

    def __init__(
        self, pair: Pair, dtype: Any, widening: Widening | None = None, leader: TorchSide | None = None
    ) -> None:
        self._pair, self._dtype, self.widening, self._leader = pair, dtype, widening, leader
        self._paths, self._of_state = pair.paths(), pair.state_paths()
        self._optimizer = pair.optimizer_of_jax()
        gradient = jax.value_and_grad(pair.jax_loss_and_state, has_aux=True)
        self._gradient = jax.jit(gradient, compiler_options=ROUND_AS_WRITTEN)
        self._update = jax.jit(self._updated, compiler_options=ROUND_AS_WRITTEN)
        self.restart()

    def restart(self) -> None:
        """Return to the state before the first step."""
        self.params = self._pair.converted(dtype=self._dtype)
        self.state = None if self._pair.jax_state is None else self._pair.converted_state(self._dtype)
        with self.computing():
            self.optimizer_state = self._optimizer.init(self.params)
        self._steps = 0

    def with_zeros(self, arrays: Arrays) -> Any:
        """JAX's tree with arrays by torch's names, and zeros for parameters that torch does not train."""
        shapes = dict(self._pair.model.named_parameters())
        values = {
            name: torch.from_numpy(arrays[name] if name in arrays else np.zeros(shapes[name].shape))
            for name in self._paths
        }
        return self._pair.converted(values, self._dtype)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, JAX traces in float64 if this side is to."""
        with nullcontext() if self.widening is None else jax_in_float64(self.widening):
            yield

    def loss(self, params: Any, *batch: Any) -> Any:
        """The loss with this side's state."""
        return self._pair.jax_loss_and_state(params, self.state, *batch)[0]

    def arguments(self, batch: Batch) -> tuple[Any, ...]:
        """The parameters and the batch."""
        return self.params, *in_jax(batch, self._dtype)

    def evaluated(self, batch: Batch) -> tuple[Any, Any]:
        """The loss and the gradient now."""
        params, *arrays = self.arguments(batch)
        with self.computing(), errors_of("JAX's loss or its gradient"):
            (loss, _), gradient = self._gradient(params, self.state, *arrays)
        return loss, gradient

    def step(self, *batch: NDArray) -> Observation:
        """Take the next step."""
        if self._leader is not None:
            self.params = self._pair.converted(self._leader.before, self._dtype)
        params, *arrays = self.arguments(batch)
        with self.computing():
            with errors_of(f"JAX's loss or its gradient in step {self._steps}"):
                (loss, state), gradient = self._gradient(params, self.state, *arrays)
            with errors_of(f"JAX's optimizer in step {self._steps}"):
                self.params, self.optimizer_state = self._update(gradient, self.optimizer_state, params)
        self.state = state
        self._steps += 1
        trained = {name: self._paths[name] for name in self._pair.trained()}
        compared = named(state, self._of_state) if self._of_state else {}
        return _observation(
            float(loss),
            named(gradient, trained),
            named(self.params, self._paths),
            self._moments(),
            compared,
            self._dtype,
        )

    def _updated(self, gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = self._optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def _moments(self) -> dict[str, NDArray]:
        """Adam's moments by torch's names, those of all groups of a mask or of several transformations together."""
        names = {path: name for name, (path, _) in self._paths.items()}
        moments: dict[str, NDArray] = {}
        for torch_name, optax_name in MOMENTS.items():
            for _, tree in optax.tree_utils.tree_get_all_with_path(self.optimizer_state, optax_name):
                paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
                inside = {names[path]: self._paths[names[path]] for path in paths if path in names}
                moments |= {f"{torch_name} of {name}": value for name, value in named(tree, inside).items()}
        return moments


def _observation(
    loss: float, gradients: Arrays, weights: Arrays, moments: Arrays, state: Arrays, dtype: Any
) -> Observation:
    # Float64 alone judges the optimizers, see the leader of a side. But the first moment follows the gradients: a dtype
    # of its own is seen in it.
    updated = dtype in (torch.float64, np.float64)
    if not updated:
        moments = {name: moment for name, moment in moments.items() if name.startswith("exp_avg of ")}
    norm = float(np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in gradients.values())))
    return Observation(loss, norm, gradients, weights if updated else {}, moments, state)

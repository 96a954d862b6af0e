"""A user's pair of models, one in torch and one in JAX, and the map between their parameters and their state."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from benchkit import UserError
from jax_baseline.parity.location.operations import array

_RATE = 1e-3  # of the optimizers that a pair has by default
Batch = tuple[NDArray, ...]
Paths = Mapping[str, tuple[str, tuple[int, ...]]]


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.0)


@dataclass(frozen=True)
class Pair:
    """Two models, their losses, their optimizers and their state."""

    model: torch.nn.Module  # the torch model, on the CPU. It is copied and stays as it is
    torch_loss: Callable[..., torch.Tensor]  # function (model, *batch) → scalar
    params: Any  # JAX's parameters; their values are replaced by torch's
    # Function (params, *batch) → scalar. With a state: (params, state, *batch) → (scalar, new state).
    jax_loss: Callable[..., Any]
    batches: Sequence[Batch]  # one tuple of NumPy arrays per step
    # Patterns of torch's names → paths of JAX's parameters and state, with groups for numbers. ``.T`` at the end
    # reverses the axes; ``.transpose(2, 3, 1, 0)`` orders torch's axes as NumPy does, here for a kernel of a
    # convolution. A name that no pattern matches has the same path, with ``/`` for dots.
    names: Mapping[str, str] = field(default_factory=dict)
    # Function (parameters) → optimizer; if its argument is named ``model`` or ``module``, it is given the module, whose
    # names may then choose the groups. The default is AdamW without decay.
    torch_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    # The same for JAX. The default leaves alone what torch does not train.
    jax_optimizer: optax.GradientTransformation | None = None
    # What JAX's loss takes and returns beside the parameters, such as ``batch_stats``; None if it has none. Where a
    # buffer of torch is mapped to a part of it, it starts from torch's values.
    jax_state: Any = None

    def trained(self) -> list[str]:
        """Names of the parameters of torch that have a gradient."""
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def paths(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return, for each parameter of torch, the path in JAX and torch's axes in JAX's order.

        A parameter without a gradient may be a part of JAX's state instead, see :meth:`state_paths`.

        Raises:
            UserError: If a path does not exist, an order or a shape does not fit, or a parameter of JAX has no partner.
        """
        shapes = _shapes(self.params)
        targets = {}
        for name, parameter in self.model.named_parameters():
            path, axes = self._target(name, parameter.ndim, shapes)
            if path not in shapes:
                if not parameter.requires_grad and name in self.state_paths():
                    continue
                raise UserError(f"{name} has no partner {path!r} in JAX; map it to one of {', '.join(sorted(shapes))}")
            _require_fit(name, parameter, path, axes, shapes)
            targets[name] = path, axes
        if left := sorted(shapes.keys() - {path for path, _ in targets.values()}):
            ties = [f"{name} is {first}" for name, first in tied_names(self.model).items()]
            shared = f"; torch's are tied, {', '.join(ties)}: read one array in both places in JAX" if ties else ""
            raise UserError(f"parameters of JAX without a partner in torch: {', '.join(left)}{shared}")
        return targets

    def state_paths(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the same for torch's buffers, and its parameters without a gradient, that JAX's state has a part for.

        Raises:
            UserError: If an order or a shape does not fit.
        """
        shapes = {} if self.jax_state is None else _shapes(self.jax_state)
        targets = {}
        for name, tensor in state_of(self.model).items():
            path, axes = self._target(name, tensor.ndim, shapes)
            if path in shapes:
                _require_fit(name, tensor, path, axes, shapes)
                targets[name] = path, axes
        return targets

    def _target(self, name: str, dimensions: int, shapes: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        hits = (match.expand(to) for pattern, to in self.names.items() if (match := re.fullmatch(pattern, name)))
        path, axes = _ordered(next(hits, name), dimensions)
        spellings = path, path.replace(".", "/")  # a group of a pattern may hold dots
        of_nnx = (f"{spelling}/value" for spelling in spellings)  # a variable of flax.nnx holds its array there
        return next((spelling for spelling in (*spellings, *of_nnx) if spelling in shapes), spellings[1]), axes

    def converted(self, weights: Mapping[str, torch.Tensor] | None = None, dtype: Any = jnp.float32) -> Any:
        """Return JAX's parameters with torch's values.

        Raises:
            UserError: If the parameters do not fit, see :meth:`paths`.
        """
        given = dict(self.model.named_parameters()) if weights is None else weights
        return filled(self.params, {name: array(tensor) for name, tensor in given.items()}, self.paths(), dtype)

    def converted_state(self, dtype: Any) -> Any:
        """Return JAX's state with torch's values where it has a partner; floating arrays in ``dtype``."""
        values = {name: array(tensor) for name, tensor in state_of(self.model).items()}
        return filled(self.jax_state, values, self.state_paths(), dtype)

    def jax_loss_and_state(self, params: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        """Return JAX's loss and its new state, which is None if it has none.

        Raises:
            UserError: If the loss returns something else, or a state that is not like the one it is given.
        """
        if self.jax_state is None:
            return self.jax_loss(params, *batch), None
        copied = jax.tree.map(lambda leaf: leaf, state)  # flax.nnx writes only into what the same trace has made
        made = self.jax_loss(params, copied, *batch)
        if not isinstance(made, tuple) or len(made) != 2:
            raise UserError(
                f"JAX's loss takes (parameters, state, *batch) and returns (loss, new state), got {type(made).__name__}"
            )
        expected, received = (jax.tree.structure(tree) for tree in (state, made[1]))
        if expected != received:
            raise UserError(f"JAX's loss must return a state like the one it is given, {expected}; got {received}")
        return made

    def copied_model(self, dtype: torch.dtype, *, buffers: bool = True) -> torch.nn.Module:
        """Return a copy of the torch model with floating parameters in ``dtype``, and buffers too if they are to be.

        Raises:
            UserError: If the module can't be copied.
        """
        computed = {
            id(value): value.detach().clone()
            for module in self.model.modules()
            for value in vars(module).values()
            if isinstance(value, torch.Tensor) and value.grad_fn is not None  # torch copies leaves only
        }
        try:
            made = copy.deepcopy(self.model, computed)
        except Exception as error:
            raise UserError(
                f"the torch module can't be copied: {error}; each run of the comparison needs its own"
            ) from error
        for original, parameter in zip(self.model.parameters(), made.parameters(), strict=True):
            vars(parameter).update(vars(original))  # torch copies neither marks, such as _no_weight_decay, nor hooks
            if original.requires_grad:  # one that is frozen takes no hooks, and runs none
                for hook in (original._backward_hooks or {}).values():
                    parameter.register_hook(hook)
                for hook in (original._post_accumulate_grad_hooks or {}).values():
                    parameter.register_post_accumulate_grad_hook(hook)
        for tensor in (*made.parameters(), *(made.buffers() if buffers else ())):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
            elif tensor.is_complex() and dtype == torch.float64:
                tensor.data = tensor.data.to(torch.complex128)
        return made

    def optimizer_of_torch(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return torch's optimizer of the parameters of a copy of the model."""
        make = _adamw if self.torch_optimizer is None else self.torch_optimizer
        try:
            first = next(iter(inspect.signature(make).parameters), "")
        except ValueError:  # of a builtin
            first = ""
        if first in ("model", "module"):
            return make(model)
        return make(
            [
                parameter
                for parameter in model.parameters()
                if parameter.requires_grad or self.torch_optimizer is not None
            ]
        )

    def optimizer_of_jax(self) -> optax.GradientTransformation:
        """Return JAX's optimizer."""
        if self.jax_optimizer is not None:
            return self.jax_optimizer
        default = optax.adamw(_RATE, weight_decay=0.0)
        paths, trained = self.paths(), set(self.trained())
        if trained >= paths.keys():
            return default
        labels = {path: "trained" if name in trained else "frozen" for name, (path, _) in paths.items()}
        tree = jax.tree_util.tree_map_with_path(lambda path, leaf: labels[path_of(path)], self.params)
        return optax.multi_transform({"trained": default, "frozen": optax.set_to_zero()}, tree)


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters that a module has in several places, by the name that torch lists."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(of), name)) for name, of in model.named_parameters(remove_duplicate=False)]
    return {name: listed for name, listed in names if name != listed}


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a forward pass may write: the buffers, and the parameters without a gradient."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return dict(model.named_buffers()) | frozen


def named(tree: Any, paths: Paths) -> dict[str, NDArray]:
    """Return the arrays of a tree of JAX by torch's names, in torch's order of the axes."""
    leaves = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    return {name: np.asarray(leaves[path]).transpose(np.argsort(axes)) for name, (path, axes) in paths.items()}


def filled(tree: Any, values: Mapping[str, NDArray], paths: Paths, dtype: Any) -> Any:
    """Return a tree of JAX with torch's values where there are any, and its own elsewhere; floats in ``dtype``."""
    new = {path: values[name].transpose(axes) for name, (path, axes) in paths.items()}

    def leaf_of(path: Any, leaf: Any) -> Any:
        value = new.get(path_of(path), leaf)
        floating = jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        return jnp.array(value, dtype if floating else jnp.result_type(leaf))

    return jax.tree_util.tree_map_with_path(leaf_of, tree)


def in_torch(arrays: Sequence[NDArray], dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of NumPy arrays as tensors, floating ones in ``dtype``: a loss may write into its batch."""
    tensors = (torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C")) for array in arrays)
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


def in_jax(arrays: Sequence[NDArray], dtype: Any) -> list[jax.Array]:
    """NumPy arrays as arrays of JAX, floating ones in ``dtype``."""
    native = [np.asarray(array, array.dtype.newbyteorder("=")) for array in arrays]
    return [jnp.asarray(array, dtype if np.issubdtype(array.dtype, np.floating) else None) for array in native]


def path_of(path: Any) -> str:
    """The path of a leaf, as :attr:`Pair.names` has it: ``blocks/0/kernel``."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {path_of(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _ordered(target: str, dimensions: int) -> tuple[str, tuple[int, ...]]:
    """Split the order of the axes off a path."""
    if given := re.fullmatch(r"(.*)\.transpose\(([\d, ]+)\)", target):
        return given[1], tuple(int(axis) for axis in given[2].replace(",", " ").split())
    turned = target.endswith(".T")
    return target.removesuffix(".T"), tuple(range(dimensions)[:: -1 if turned else 1])


def _require_fit(name: str, tensor: torch.Tensor, path: str, axes: tuple[int, ...], shapes: Mapping[str, Any]) -> None:
    if sorted(axes) != list(range(tensor.ndim)):
        raise UserError(f"{name} has {tensor.ndim} axes, got the order {axes}; name each axis once")
    expected = tuple(tensor.shape[axis] for axis in axes)
    if shapes[path] != expected:
        raise UserError(
            f"{path} must be {expected} for {name}, got {shapes[path]}; '.T' reverses the axes and "
            "'.transpose(…)' orders them"
        )

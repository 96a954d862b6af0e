"""Loads a user's pair of models from files, and checks what their functions return before anything is compared."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.parameter import is_lazy

from benchkit import UserError
from jax_baseline.parity.pairs import Pair
from jax_baseline.parity.pairs.pair import in_jax, in_torch, tied_names
from jax_baseline.user_code import errors_of, load_function, require_32_bits

_KINDS = "fiub"  # of NumPy's dtypes: floating, integers, bool


def load_pair(torch_side: str, jax_side: str) -> Pair:
    """Call the four functions of a pair: both sides, and ``inputs`` and ``names`` of the first file.

    Each side is ``file.py:function``.

    Raises:
        UserError: If a function does not exist, raises, or returns something else than it should.
    """
    inputs, names = (f"{torch_side.rpartition(':')[0]}:{name}" for name in ("inputs", "names"))
    of_torch = _side(torch_side, "torch's side", ("module", "loss", "optimizer"))
    of_jax = _side(jax_side, "JAX's side", ("parameters", "loss", "optimizer", "state"))
    _require_torch(torch_side, of_torch)
    _require_jax(jax_side, of_jax)
    batches, mapping = _called(inputs, "the inputs"), _called(names, "the map of parameters")
    _require_batches(inputs, batches)
    _require_names(names, mapping, of_torch[0])
    optional: dict[str, Any] = dict(zip(("jax_optimizer", "jax_state"), of_jax[2:], strict=False))
    optional |= dict(zip(("torch_optimizer",), of_torch[2:], strict=False))
    pair = Pair(of_torch[0], of_torch[1], of_jax[0], of_jax[1], list(batches), mapping, **optional)
    _require_partners(names, pair)
    _require_torch_loss(torch_side, pair)
    _require_jax_loss(jax_side, pair)
    _require_optimizers(torch_side, jax_side, pair)
    return pair


def _called(reference: str, what: str) -> Any:
    with errors_of(reference):
        return load_function(reference, what=what)()


def _side(reference: str, what: str, elements: Sequence[str]) -> tuple[Any, ...]:
    side = _called(reference, what)
    if not isinstance(side, (tuple, list)) or not 2 <= len(side) <= len(elements):
        forms = [f"({', '.join(elements[:count])})" for count in range(2, len(elements) + 1)]
        raise UserError(
            f"{reference} must return {', '.join(forms[:-1])} or {forms[-1]}, got {_words(side)}; return a tuple"
        )
    if not callable(side[1]):
        raise UserError(
            f"{reference}: the second element must be the loss, a function of the {elements[0]} and a batch; "
            f"got {_words(side[1])}"
        )
    return tuple(side)


def _require_torch(reference: str, side: tuple[Any, ...]) -> None:
    model, optimizer = side[0], side[2] if len(side) > 2 else None
    if not isinstance(model, torch.nn.Module):
        swapped = "; name torch's side first and JAX's second" if isinstance(model, Mapping) else ""
        raise UserError(f"{reference}: the first element must be a torch.nn.Module, got {_words(model)}{swapped}")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UserError(
            f"{reference}: {', '.join(lazy)} have no shape before the first call; call the module once before it is "
            "returned"
        )
    if complex_names := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise UserError(
            f"{reference}: {', '.join(complex_names)} are complex, and their gradients conjugates in torch and "
            "JAX; give both sides the real and the imaginary part, torch's with torch.view_as_real"
        )
    if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer is None or callable(optimizer)):
        raise UserError(
            f"{reference}: the third element must be a function of the parameters that returns an optimizer, "
            f"got {_words(optimizer)}; return lambda parameters: torch.optim.AdamW(parameters)"
        )


def _require_jax(reference: str, side: tuple[Any, ...]) -> None:
    filled = (*side, None, None)
    params, optimizer, state = filled[0], filled[2], filled[3]
    if isinstance(params, torch.nn.Module):
        raise UserError(
            f"{reference}: the first element must be JAX's parameters, got {_words(params)}; "
            "name torch's side first and JAX's second"
        )
    _require_arrays(reference, params, "the parameters")
    _require_arrays(reference, state, "the state")
    if not jax.tree.leaves(params):
        raise UserError(f"{reference}: the parameters must be a tree of arrays, got {_words(params)} without any")
    if not (optimizer is None or (hasattr(optimizer, "init") and hasattr(optimizer, "update"))):
        raise UserError(
            f"{reference}: the third element must be an optax transformation, got {_words(optimizer)}; "
            "return optax.adamw(1e-3) or the like, and the state as the fourth element"
        )


def _require_arrays(reference: str, tree: Any, what: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise UserError(
                f"{reference}: {what} must be a tree of arrays, got {_words(leaf)} at "
                f"{jax.tree_util.keystr(path) or 'its root'}; make it an array with jnp.asarray"
            )


def _require_batches(reference: str, batches: Any) -> None:
    wanted = f"{reference} must return a list with one tuple of NumPy arrays for each step, such as [(x, y), (x, y)]"
    if not isinstance(batches, (list, tuple)) or not batches:
        raise UserError(f"{wanted}; got {_words(batches)}")
    for step, batch in enumerate(batches):
        if not isinstance(batch, tuple):
            raise UserError(f"{wanted}; element {step} is {_words(batch)}: put the arrays of a step into a tuple")
        for index, array in enumerate(batch):
            if not isinstance(array, np.ndarray):
                how = ": use .numpy()" if isinstance(array, torch.Tensor) else ": use np.asarray"
                raise UserError(f"{wanted}; array {index} of step {step} is {_words(array)}{how}")
            if array.dtype.kind not in _KINDS or array.dtype.itemsize > 8:
                raise UserError(
                    f"{wanted}; array {index} of step {step} has dtype {array.dtype}: use floating numbers, integers "
                    "or bool of NumPy, of at most 64 bits"
                )
            require_32_bits(array, f"{reference}: array {index} of step {step}")


def _require_names(reference: str, mapping: Any, model: torch.nn.Module) -> None:
    if not isinstance(mapping, Mapping) or not all(isinstance(text, str) for pair in mapping.items() for text in pair):
        raise UserError(
            f"{reference} must return a dictionary of patterns of torch's names to paths of JAX's, got "
            f"{_words(mapping)}; return {{}} if all names are the same"
        )
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    tied = tied_names(model)
    targets: dict[str, dict[str, str]] = {}
    for pattern, target in mapping.items():
        try:
            matches = [(name, match) for name in names if (match := re.fullmatch(pattern, name))]
            for name, match in matches:
                targets.setdefault(name, {})[match.expand(target)] = pattern
        except (re.error, IndexError) as error:
            raise UserError(f"{reference}: {pattern!r}: {target!r} is no pattern with its path: {error}") from error
        if shared := [name for name in tied if not matches and re.fullmatch(pattern, name)]:
            raise UserError(
                f"{reference}: {shared[0]} is the same parameter of torch as {tied[shared[0]]}, and is compared under "
                f"that name; remove the pattern {pattern!r}, and read one array in both places in JAX"
            )
        if not matches:
            raise UserError(
                f"{reference}: the pattern {pattern!r} matches none of torch's parameters, {', '.join(names)}; "
                "a pattern matches a whole name: correct or remove it"
            )
    for name, expanded in targets.items():
        if len(expanded) > 1:
            raise UserError(
                f"{reference}: {name} matches {' and '.join(map(repr, expanded.values()))}, which give different "
                f"paths, {' and '.join(expanded)}; let one pattern match"
            )


def _require_partners(reference: str, pair: Pair) -> None:
    """Require that no two parameters of torch are one of JAX, and no two parts of its state."""
    for paths, kind in ((pair.paths(), "a parameter"), (pair.state_paths(), "a part of the state")):
        named: dict[str, str] = {}
        for name, (path, _) in paths.items():
            if path in named:
                raise UserError(
                    f"{reference}: {named[path]} and {name} are both mapped to {path}; map each to {kind} of its own"
                )
            named[path] = name


def _require_torch_loss(reference: str, pair: Pair) -> None:
    model = pair.copied_model(torch.float32)  # a forward pass may change its buffers
    batch = in_torch(pair.batches[0], torch.float32)
    narrow = {str(weight.dtype) for weight in pair.model.parameters() if weight.dtype in (torch.bfloat16, torch.half)}
    hint = "; here the weights are float32 and float64: cast to the dtype of a weight, not to " if narrow else ""
    remedy = hint + " or ".join(sorted(narrow))
    with errors_of(f"{reference}: the loss", remedy), torch.random.fork_rng():
        loss = pair.torch_loss(model, *batch)
    if not isinstance(loss, torch.Tensor):
        raise UserError(f"{reference}: the loss must return a tensor without axes, got {_words(loss)}")
    _require_scalar(reference, tuple(loss.shape), str(loss.dtype).removeprefix("torch."), loss.is_floating_point())
    if not torch.isfinite(loss):
        raise UserError(
            f"{reference}: the loss of the first batch is {loss.item()} at torch's initial weights, and nothing can be "
            "compared with it; use weights and inputs with a finite loss"
        )


def _require_jax_loss(reference: str, pair: Pair) -> None:
    state = None if pair.jax_state is None else pair.converted_state(jnp.float32)
    with errors_of(f"{reference}: the loss"):
        loss, _ = jax.eval_shape(
            pair.jax_loss_and_state, pair.converted(), state, *in_jax(pair.batches[0], jnp.float32)
        )
    if not hasattr(loss, "shape"):
        how = (
            "; a loss that returns a state takes it too: make it the side's fourth element" if loss is not None else ""
        )
        raise UserError(f"{reference}: the loss must return an array without axes, got {_words(loss)}{how}")
    _require_scalar(reference, loss.shape, str(loss.dtype), jnp.issubdtype(loss.dtype, jnp.floating))


def _require_optimizers(torch_side: str, jax_side: str, pair: Pair) -> None:
    with errors_of(f"{torch_side}: the optimizer"):
        model = pair.copied_model(torch.float32)
        optimizer = pair.optimizer_of_torch(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{torch_side}: the third element must return an optimizer, got {_words(optimizer)}; return "
            "lambda parameters: torch.optim.AdamW(parameters)"
        )
    own = set(map(id, model.parameters()))
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError(
            f"{torch_side}: the optimizer has none of the parameters that its function is given, which are those of a "
            "copy of the module; use its argument"
        )
    asked = inspect.signature(type(optimizer).step).parameters.get("closure")
    if asked is not None and asked.default is inspect.Parameter.empty:
        raise UserError(
            f"{torch_side}: {type(optimizer).__name__} evaluates the loss itself, and steps on given gradients are "
            "compared; use an optimizer whose step() needs no closure"
        )
    with errors_of(f"{jax_side}: the optimizer"):
        params, optax = pair.converted(), pair.optimizer_of_jax()
        jax.eval_shape(lambda params: optax.update(params, optax.init(params), params), params)


def _require_scalar(reference: str, shape: Sequence[int], dtype: str, floating: bool) -> None:
    if tuple(shape) != ():
        raise UserError(
            f"{reference}: the loss must return one number, got shape {tuple(shape)}; take its mean or its sum over "
            "all axes"
        )
    if not floating:
        raise UserError(f"{reference}: the loss must be a floating number, got {dtype}; gradients need one")


def _words(value: Any) -> str:
    """A value in an error message: its type, and the size of a container."""
    kind = type(value).__module__.partition(".")[0]
    name = type(value).__name__ if kind in ("builtins", "__main__") else f"{kind}.{type(value).__name__}"
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"a {name} of {len(value)} elements" if value else f"an empty {name}"
    return name

"""What makes two functions agree: torch's first wrong operation is run again in other ways, until JAX computes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from jax_baseline.parity.location.matching import TIMES, Index
from jax_baseline.parity.location.operations import Call, Operation, array, arrays
from jax_baseline.parity.location.replay import changed_before, followed, other_rotation
from jax_baseline.parity.location.variants import Variants, other_operations

_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)
_SMOOTHING = (0.1, 0.2, 0.05, 0.01)
_SIZES = ("N", "C", "HxW")  # of native_group_norm, which reads as many numbers as they say
_LIMITS = ("min", "max", "min_val", "max_val")  # whole numbers among them are not axes
_PRODUCTS = ("mm", "addmm", "linear")


def likely_cause(
    of_torch: Operation | None,
    of_jax: Operation | None,
    ours: Sequence[Operation],
    theirs: Sequence[Operation],
    alone: Sequence[Operation],
) -> str:
    """Say what makes two functions agree; empty if nothing that is tried does.

    Only the operations of JAX whose result torch does not compute, ``alone``, are evidence for a change: one that
    undoes the operation gives its operand, which JAX computes in any case.
    """
    if of_torch is None or of_torch.call is None:
        return ""
    if "dropout" in of_torch.name or "bernoulli" in of_torch.name:
        return "dropout is active in torch; call eval()"
    index = Index(arrays(alone))
    constants = () if of_jax is None else of_jax.constants
    tried = (_other_variance, _other_padding, _smoothed, _transposed, _without_bias, other_operations)
    found: dict[str, str] = {}  # by what is changed: another value of the same argument is no other cause
    for change, value in (
        *_other_arguments(of_torch.call, constants),
        *(variant for variants in tried for variant in variants(of_torch.call)),
        *_with_constants(of_torch.call, constants),
    ):
        if index.meets(array(value), of_torch.stray[0]) and followed(of_torch, value, ours, index):
            found.setdefault(change.partition("=")[0], change)
    if not found:  # what is moved to another place is followed by other operations
        found = {
            change: change
            for change, value in _before_the_product(of_torch, ours)
            if index.meets(array(value), of_torch.stray[0])
        }
    if not found:
        changes = (*changed_before(of_torch, ours, index), *other_rotation(of_torch, ours, index))
        found = {change: change for change in changes}
    if found:
        return f"with {' or '.join(found.values())} in torch they agree"
    if _fixed_statistics(of_torch.call, alone):
        return "JAX normalises with fixed statistics (training=False), torch with those of the batch"
    if _smoothing_left_out(of_torch, ours, Index(arrays(theirs))):
        return "without label smoothing in torch they agree"
    if _left_out(of_torch, ours, index):
        return "JAX computes what follows without this operation: it is left out or elsewhere"
    return ""


def _other_arguments(call: Call, constants: Sequence[float]) -> Variants:
    """One argument changed: an epsilon, a choice by name, an axis, a flag, a number, groups, attention's scale."""
    for name, given in call.arguments().items():
        added = call.function._schema.name == "aten::add" and isinstance(given, float) and 0 < given <= max(_EPSILONS)
        for value in _others(name, given, call, constants):
            if (found := call.again(**{name: value})) is not None:
                if name == "training":
                    ours, theirs = ("the batch's", "the running") if value else ("the running", "the batch's")
                    yield f"training={value}, {ours} statistics instead of {theirs},", found
                else:
                    yield f"{'eps' if added else name}={value!r} instead of {given!r}", found


def _others(name: str, given: Any, call: Call, constants: Sequence[float]) -> Sequence[Any]:
    if isinstance(given, bool):
        return [not given]
    if isinstance(given, str):
        return [other for other in ("none", "tanh") if other != given]
    if isinstance(given, float) or (name in _LIMITS and given is not None):
        related = (1 / given if given else 0.0, -given, given**2, math.inf)
        return [other for other in (*constants, *_EPSILONS, *related) if other != given]
    if name == "group":
        channels = call.arguments()["C"]
        return [other for other in range(1, channels + 1) if channels % other == 0 and other != given]
    if name == "scale" and given is None and "query" in call.arguments():
        heads, _, size = call.arguments()["query"].shape[-3:]
        return [1.0, 1 / size, size**-0.25, (heads * size) ** -0.5]
    if isinstance(given, int) and name not in _SIZES:
        return [other for other in range(-2, 4) if other != given]
    if isinstance(given, list) and given and isinstance(given[0], int) and len(set(given)) == 1:
        return [[other] * len(given) for other in range(-2, 4) if other != given[0]]
    return []


def _other_variance(call: Call) -> Variants:
    """A norm with the variance over n − 1: √((n−1)/n) times the norm with (n−1)/n times its epsilon."""
    asked = call.arguments()
    if "weight" not in asked or "eps" not in asked:
        return
    if call.function._schema.name == "aten::native_group_norm":
        count, channels = asked["C"] // asked["group"] * asked["HxW"], asked["C"]
    elif call.function._schema.name == "aten::native_layer_norm":
        count, channels = math.prod(asked["normalized_shape"]), asked["normalized_shape"]
    elif call.function._schema.name == "aten::native_batch_norm" and asked["training"]:
        channels = asked["input"].shape[1]
        count = asked["input"].numel() // channels
    else:
        return
    if count < 2:
        return
    share = (count - 1) / count
    weight = asked["input"].new_ones(channels) if asked["weight"] is None else asked["weight"]
    found = call.again(weight=weight * share**0.5, eps=asked["eps"] * share)
    if found is not None:
        yield "the variance over n − 1 instead of n", found


def _other_padding(call: Call) -> Variants:
    """A convolution padded as JAX and TensorFlow do for ``SAME``, which may be more after than before."""
    if call.function._schema.name != "aten::convolution" or call.arguments()["transposed"]:
        return
    asked = call.arguments()
    kernel, sizes = asked["weight"].shape[2:], asked["input"].shape[2:]
    pairs = []
    for size, width, stride, dilation in zip(sizes, kernel, asked["stride"], asked["dilation"], strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        pairs.append((total // 2, total - total // 2))
    padded = pad(asked["input"], [side for pair in reversed(pairs) for side in pair])
    found = call.again(input=padded, padding=[0] * len(pairs))
    if found is not None:
        sides = ", ".join(f"{before} and {after}" for before, after in pairs)
        yield f"SAME padding, {sides} before and after, instead of {asked['padding']}", found


def _transposed(call: Call) -> Variants:
    """A square operand transposed, which no check of shapes finds."""
    for name, given in call.arguments().items():
        if isinstance(given, torch.Tensor) and given.ndim > 1 and given.shape[-1] == given.shape[-2]:
            found = call.again(**{name: given.mT})
            if found is not None:
                yield f"{name} transposed", found


def _without_bias(call: Call) -> Variants:
    added = "self" if call.function._schema.name == "aten::addmm" else "bias"
    given = call.arguments().get(added)
    if isinstance(given, torch.Tensor):
        found = call.again(**{added: torch.zeros_like(given)})
        if found is not None:
            yield "no bias", found


def _smoothed(call: Call) -> Variants:
    if call.function._schema.name != "aten::nll_loss_forward":
        return
    asked = call.arguments()
    plain = call.again()
    if plain is None or asked["weight"] is not None or asked["reduction"] != 1:
        return
    known = asked["self"][asked["target"] != asked["ignore_index"]]
    for share in _SMOOTHING:
        yield f"label smoothing of {share}", (1 - share) * plain - share * known.mean()


def _fixed_statistics(call: Call, alone: Sequence[Operation]) -> bool:
    """Whether JAX computes a · x + b by channel, with a mean that is not the one of a normalised batch.

    The last such array counts: what leads to a normalised batch need not be centred.
    """
    asked = call.arguments()
    if call.function._schema.name != "aten::native_batch_norm" or not asked["training"]:
        return False
    x = array(asked["input"])
    rows = _by_channel(x)
    centred = rows - rows.mean(1, keepdims=True)
    bias = np.zeros(len(rows)) if asked["bias"] is None else array(asked["bias"])
    weight = np.ones(len(rows)) if asked["weight"] is None else array(asked["weight"])
    fixed = False
    for value, stray in arrays(alone):
        orders = itertools.permutations(range(value.ndim)) if value.size == x.size and value.ndim == x.ndim else ()
        for turned in (value.transpose(order) for order in orders):
            if turned.shape != x.shape:
                continue
            y = _by_channel(turned)
            slope, mean = (centred * y).sum(1) / (centred**2).sum(1), y.mean(1)
            left = y - mean[:, None] - slope[:, None] * centred
            allowed = max(TIMES * stray, 1e-12 * float(np.linalg.norm(y)))
            if np.linalg.norm(left) > allowed:
                continue
            unnormalised = np.allclose(slope, weight) and np.allclose(mean - slope * rows.mean(1), bias)
            fixed = not np.allclose(mean, bias, atol=1e-5) and not unnormalised
    return fixed


def _by_channel(x: NDArray) -> NDArray:
    return np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)


def _smoothing_left_out(operation: Operation, ours: Sequence[Operation], index: Index) -> bool:
    """Whether JAX computes the cross-entropy that torch smooths, and not the sum over classes that it adds."""
    if not any(ours[number].name == "_log_softmax" for number in operation.operands):
        return False
    losses = (one for one in ours if one.name == "nll_loss_forward" and one is not operation)
    return any(one.place == operation.place and index.meets(one.values[0], one.stray[0]) for one in losses)


def _with_constants(call: Call, constants: Sequence[float]) -> Variants:
    """A number of JAX's first wrong operation added to, or multiplied with, an operand of torch's."""
    for position in call.sources:
        operand = call.leaves[position]
        for number in constants:
            for said, changed in (("added to", operand + number), ("multiplied with", operand * number)):
                if (found := call.again({position: changed})) is not None:
                    yield f"{number:g} {said} the operand", found


def _before_the_product(operation: Operation, ours: Sequence[Operation]) -> Variants:
    """A gate that multiplies the operand of a matrix product instead of its result."""
    call = operation.call
    if call is None or operation.name not in ("mul", "mul_") or len(call.sources) != 2:
        return
    positions = list(call.sources)
    for own, other in (positions, positions[::-1]):
        product = _product_behind(call.sources[other], ours)
        gate = call.leaves[own]
        for leaf in () if product is None else product.leaves:
            if isinstance(leaf, torch.Tensor) and leaf.shape == gate.shape:
                yield "the multiplication before the matrix product", gate * leaf


def _product_behind(number: int, ours: Sequence[Operation]) -> Call | None:
    """The matrix product that a result is a part of."""
    while ours[number].name not in _PRODUCTS:
        call = ours[number].call
        if call is None or len(call.sources) != 1:
            return None
        (number,) = call.sources.values()
    return ours[number].call


def _left_out(operation: Operation, ours: Sequence[Operation], index: Index) -> bool:
    """Whether what follows an operation is computed in JAX from an operand of the operation instead."""
    assert operation.call is not None
    start = next(number for number, one in enumerate(ours) if one is operation)
    for position in operation.call.sources:
        operand = operation.call.leaves[position]
        if operand.numel() != operation.values[0].size:
            continue
        results = {start: operand.reshape(operation.values[0].shape)}
        for number in range(start + 1, len(ours)):
            call = ours[number].call
            changes = {} if call is None else {p: results[one] for p, one in call.sources.items() if one in results}
            if call is None or not changes or not ours[number].values:
                continue
            found = call.again(changes)
            if found is None:
                break
            if found.numel() == operand.numel() and torch.equal(*(one.flatten().sort()[0] for one in (found, operand))):
                results[number] = found  # the same numbers in another order: no evidence
            elif index.meets(array(found), ours[number].stray[0]):
                return True
            else:
                break
    return False

"""What a port may compute instead of an operation of torch, declared by the kind of operation, with words for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from jax_baseline.parity.location.operations import Call

Variants = Iterator[tuple[str, torch.Tensor]]
_ATEN = torch.ops.aten
# What torch calls an interpolation → the operator that a resize with antialiasing, or with pixel centres, is.
_RESIZES = {
    "upsample_bilinear2d": ("_upsample_bilinear2d_aa", "antialias=True instead of False"),
    "_upsample_bilinear2d_aa": ("upsample_bilinear2d", "antialias=False instead of True"),
    "_upsample_bicubic2d_aa": ("upsample_bicubic2d", "antialias=False instead of True"),
    "upsample_bicubic2d": ("_upsample_bicubic2d_aa", "antialias=True instead of False"),
    "upsample_nearest1d": ("_upsample_nearest_exact1d", "mode='nearest-exact' instead of 'nearest'"),
    "upsample_nearest2d": ("_upsample_nearest_exact2d", "mode='nearest-exact' instead of 'nearest'"),
    "_upsample_nearest_exact2d": ("upsample_nearest2d", "mode='nearest' instead of 'nearest-exact'"),
}
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "x · sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "softplus": functional.softplus,
    "hardtanh": functional.hardtanh,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
}
_HIDES = -1e3  # what is added to a score below hides it
HIDDEN = -1e9  # a finite number where a mask hides; others act alike
DIVISIONS = ("div", "floor_divide", "remainder", "fmod")
MASKINGS = ("masked_fill", "masked_fill_", "where", "add")
LOSSES = ("nll_loss_forward", "nll_loss2d_forward")
_NORMS = ("native_group_norm", "native_layer_norm", "native_batch_norm")
_EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)
_SMALLEST = torch.finfo(torch.float64).eps
_SMOOTHING = (0.1, 0.2, 0.05, 0.01)
_REDUCTIONS = ("none", "mean", "sum")
# Sizes of native_group_norm, which reads as many numbers as they say; and the ignored target: other numbers do alike.
_NOT_CHANGED = ("N", "C", "HxW", "ignore_index")
# Operators of torch's own use that check their whole numbers. Others, such as a norm of weights, read beyond memory.
_CHECKED = ("_softmax", "_log_softmax")
_LEFT_OUT = ("bias", "weight", "pos_weight")
_LIMITS = ("min", "max", "min_val", "max_val")  # whole numbers among them are not axes


def variants(call: Call, constants: Sequence[float]) -> Variants:
    """What a port may compute instead of an operation of torch, with the words for it.

    The ``constants`` are the numbers of JAX's first operation that torch does not compute.
    """
    yield from _other_arguments(call, constants)
    yield from _transposed(call)
    yield from _without_a_parameter(call)
    yield from other_operations(call)
    yield from _with_constants(call, constants)


def other_operations(call: Call) -> Variants:
    """Other operations that people take for one of torch, by its kind."""
    name = "_scaled_dot_product" if call.name.startswith("_scaled_dot_product") else call.name
    for kind in _KINDS.get(name, ()):
        yield from kind(call)


def _other_arguments(call: Call, constants: Sequence[float]) -> Variants:
    """One argument changed: an epsilon, a choice by name, an axis, a flag, a number, groups, attention's scale."""
    for name, given in call.arguments().items():
        added = call.name in ("add", "add_") and isinstance(given, float) and 0 < given <= max(_EPSILONS)
        for value in _others(name, given, call, constants):
            if (result := call.again(**{name: value})) is not None:
                if name == "training":
                    ours, theirs = ("the batch's", "the running") if value else ("the running", "the batch's")
                    yield f"training={value}, {ours} statistics instead of {theirs},", result
                elif name == "reduction":
                    yield f"reduction={_REDUCTIONS[value]!r} instead of {_REDUCTIONS[given]!r}", result
                else:
                    its = ", the ε of float64 that torch takes for eps=None," if given == _SMALLEST else ""
                    yield f"{'eps' if added else name}={value!r} instead of {given!r}{its}", result


def _others(name: str, given: Any, call: Call, constants: Sequence[float]) -> Sequence[Any]:
    if isinstance(given, bool):
        # torch crashes if a batch norm is to use running statistics that it does not have.
        crashes = name == "training" and call.arguments().get("running_mean", "") is None
        return [] if crashes else [not given]
    if isinstance(given, str):
        return [other for other in ("none", "tanh") if other != given]
    if isinstance(given, float) or (name in _LIMITS and given is not None):
        related = (1 / given if given else 0.0, -given, given * given, 1.0, math.inf)
        return [other for other in (*constants, *_EPSILONS, *related) if other != given]
    if name == "group":
        channels = call.arguments()["C"]
        return [other for other in range(1, channels + 1) if channels % other == 0 and other != given]
    if name == "scale" and given is None and "query" in call.arguments():
        heads, _, size = call.arguments()["query"].shape[-3:]
        return [1.0, 1 / size, size**-0.25, (heads * size) ** -0.5]
    if name == "correction":
        return [other for other in (0, 1) if other != (1 if given is None else given)]
    if name == "reduction":
        return [other for other in range(len(_REDUCTIONS)) if other != given]
    if isinstance(given, int) and name not in _NOT_CHANGED and (call.name[0] != "_" or call.name in _CHECKED):
        return [other for other in range(-2, 4) if other != given]
    if isinstance(given, list) and given and isinstance(given[0], int) and len(set(given)) == 1:
        return [[other] * len(given) for other in range(-2, 4) if other != given[0]]
    return []


def _transposed(call: Call) -> Variants:
    """A square operand transposed, which no check of shapes finds."""
    for name, given in call.arguments().items():
        if isinstance(given, torch.Tensor) and given.ndim > 1 and given.shape[-1] == given.shape[-2]:
            result = call.again(**{name: given.mT})
            if result is not None:
                yield f"{name} transposed", result


def _without_a_parameter(call: Call) -> Variants:
    given = call.arguments()
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and (name in _LEFT_OUT or (name, call.name) == ("self", "addmm")):
            result = call.again(**{name: torch.zeros_like(tensor) if name == "self" else None})
            if result is not None:
                yield f"no {'bias' if name == 'self' else name}", result


def _with_constants(call: Call, constants: Sequence[float]) -> Variants:
    """An operand of torch's with a number of JAX's first wrong operation added, multiplied with it or divided by it."""
    for position in call.sources:
        operand = call.leaves[position]
        for number in constants:
            changes = {
                "{:g} added to the operand": operand + number,
                "{:g} multiplied with the operand": operand * number,
            }
            if number:
                changes["the operand divided by {:g}"] = operand / number
            for words, changed in changes.items():
                if (result := call.again({position: changed})) is not None:
                    yield words.format(number), result


def _other_variance(call: Call) -> Variants:
    """A norm with the variance over n − 1: √((n−1)/n) times the norm with (n−1)/n times its epsilon."""
    asked = call.arguments()
    if call.name == "native_group_norm":
        count, channels = asked["C"] // asked["group"] * asked["HxW"], asked["C"]
    elif call.name == "native_layer_norm":
        count, channels = math.prod(asked["normalized_shape"]), asked["normalized_shape"]
    elif asked["training"]:
        channels = asked["input"].shape[1]
        count = asked["input"].numel() // channels
    else:
        return
    if count < 2:
        return
    share = (count - 1) / count
    weight = asked["input"].new_ones(channels) if asked["weight"] is None else asked["weight"]
    result = call.again(weight=weight * share**0.5, eps=asked["eps"] * share)
    if result is not None:
        yield "the variance over n − 1 instead of n", result


def _other_padding(call: Call) -> Variants:
    """A convolution padded as JAX and TensorFlow do for ``SAME``, which may be more after than before."""
    asked = call.arguments()
    if asked["transposed"]:
        return
    kernel, sizes = asked["weight"].shape[2:], asked["input"].shape[2:]
    pairs = []
    for size, width, stride, dilation in zip(sizes, kernel, asked["stride"], asked["dilation"], strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        pairs.append((total // 2, total - total // 2))
    padded = functional.pad(asked["input"], [side for pair in reversed(pairs) for side in pair])
    result = call.again(input=padded, padding=[0] * len(pairs))
    if result is not None:
        sides = ", ".join(f"{before} and {after}" for before, after in pairs)
        yield f"SAME padding, {sides} before and after, instead of {asked['padding']}", result


def _smoothed(call: Call) -> Variants:
    asked = call.arguments()
    plain = call.again()
    if plain is None or asked["weight"] is not None or asked["reduction"] != 1:
        return
    known = asked["self"][asked["target"] != asked["ignore_index"]]
    for share in _SMOOTHING:
        yield f"label smoothing of {share}", (1 - share) * plain - share * known.mean()


def _other_means(call: Call) -> Variants:
    """A mean that counts other targets: ignored ones too, or each as one in spite of its weight."""
    asked = call.arguments()
    total = call.again(reduction=2) if asked["reduction"] == 1 else None
    if total is None:
        return
    known = asked["target"] != asked["ignore_index"]
    if asked["weight"] is not None:
        yield "the sum divided by the number of targets instead of their weights'", total / known.sum()
    if not known.all():
        yield "the sum divided by the number of all targets, ignored ones too,", total / known.numel()
        every = call.again(ignore_index=-1) if int(asked["target"].min()) >= 0 else None
        if every is not None:
            yield "no target ignored", every


def _other_kernels(call: Call) -> Variants:
    """The kernel flipped along its axes, or with inputs and outputs exchanged: both kinds of convolution are common."""
    weight = call.arguments()["weight"]
    axes = list(range(2, weight.ndim))
    square = weight.shape[0] == weight.shape[1] and call.arguments()["groups"] == 1
    for flipped, exchanged in product((False, True), (False, True) if square else (False,)):
        changed = weight.flip(axes) if flipped else weight
        changed = changed.transpose(0, 1) if exchanged else changed
        words = [
            *(["the kernel flipped along its spatial axes"] if flipped else []),
            *(["the kernel's inputs and outputs exchanged"] if exchanged else []),
        ]
        if words and not torch.equal(changed, weight) and (result := call.again(weight=changed)) is not None:
            yield " and ".join(words), result


def _other_activations(call: Call) -> Variants:
    for other, function in _ACTIVATIONS.items():
        if not other.startswith(call.name):  # an argument of gelu chooses its approximation
            yield f"{other} instead of {call.name}", function(next(iter(call.arguments().values())))


def _other_resize(call: Call) -> Variants:
    name = call.name
    other, words = _RESIZES[name]
    given = call.arguments()
    overload = getattr(getattr(_ATEN, other), call.function._overloadname or "default")
    taken = {argument.name: given[argument.name] for argument in overload._schema.arguments if argument.name in given}
    result = overload(**taken)
    before, after = given["input" if "input" in given else "self"].shape[-2:], result.shape[-2:]
    if "bicubic" in name and all(old <= new for old, new in zip(before, after, strict=True)):
        # Nothing is averaged when an image grows: what differs is the cubic itself.
        words = "the cubic of coefficient −0.5, weights at the edge normalised, instead of −0.75"
        words = words if name == "upsample_bicubic2d" else "the cubic of coefficient −0.75 instead of −0.5"
    yield words, result


def _other_masks(mask: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Other meanings of a mask that is added to the scores."""
    if mask is None or not mask.is_floating_point():
        return
    yield "no mask", None
    hides = mask == -math.inf
    zeros, hidden = torch.zeros_like(mask), torch.full_like(mask, -math.inf)
    if bool(((mask == 0) | hides).all()):
        yield "the mask inverted", torch.where(hides, zeros, hidden)
        yield "the mask added as 1 and 0 instead of hiding what is False", (~hides).to(mask.dtype)
        yield "a finite number instead of −inf where the mask hides", torch.where(hides, zeros + HIDDEN, mask)
    elif bool(((mask == 0) | (mask == 1)).all()):
        yield "a mask that hides what is 0 instead of adding 0 and 1", torch.where(mask == 0, hidden, zeros)
        yield "a mask that hides what is 1 instead of adding 0 and 1", torch.where(mask == 1, hidden, zeros)
    elif bool((mask <= 0).all()):
        yield "−inf where the mask hides", torch.where(mask < _HIDES, hidden, mask)


def _other_attention(call: Call) -> Variants:
    for words, mask in _other_masks(call.arguments().get("attn_mask")):
        if (changed := call.again(attn_mask=mask)) is not None:
            yield words, changed
    yield from _causal_from_the_end(call)


def _causal_from_the_end(call: Call) -> Variants:
    given = call.arguments()
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    if given.get("is_causal") and queries != keys:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=given["query"].device).tril(keys - queries)
        scores = given["query"].new_zeros(queries, keys).masked_fill(~seen, -math.inf)
        if (result := call.again(is_causal=False, attn_mask=scores)) is not None:
            yield "the causal mask aligned to the last key instead of the first", result


def _other_maskings(call: Call) -> Variants:
    """A mask by hand, with another number where it hides, inverted or left out."""
    name, given = call.name, call.arguments()
    if name == "add":
        for own, other in (("self", "other"), ("other", "self")):
            if isinstance(given[own], torch.Tensor) and isinstance(given[other], torch.Tensor) and given["alpha"] == 1:
                for words, mask in _other_masks(given[own]):
                    if mask is not None:
                        yield words, given[other] + mask
                    elif bool(((given[own] == 0) | (given[own] < _HIDES)).all()):  # not a residual or a bias
                        yield words, given[other]
        return
    if name == "where":
        mask, scores, number = given["condition"], given["self"], given["other"]
        mask, number = ~mask, number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
    else:
        mask, scores, number = given["mask"], given["self"], given["value"]
    if not isinstance(number, (int, float)) or not isinstance(scores, torch.Tensor) or number > _HIDES:
        return
    yield "no mask", scores
    yield "the mask inverted", scores.masked_fill(~mask, number)
    if number == -math.inf:
        yield "a finite number instead of −inf where the mask hides", scores.masked_fill(mask, HIDDEN)
    else:
        yield f"−inf instead of {number:g} where the mask hides", scores.masked_fill(mask, -math.inf)
    yield "the mask added as 1 and 0 instead of hiding what is False", scores + (~mask).to(scores.dtype)


def _other_divisions(call: Call) -> Variants:
    """A division of whole numbers rounded to zero instead of down, or down instead of to zero."""
    name, given = call.name, call.arguments()
    dividend, divisor, mode = given["self"], given["other"], given.get("rounding_mode")
    down, to_zero = "rounded down (floor)", "rounded to zero (trunc)"
    if name == "floor_divide" or (name == "div" and mode == "floor"):
        yield f"the quotient {to_zero} instead of down (floor)", torch.div(dividend, divisor, rounding_mode="trunc")
    elif name == "div" and mode == "trunc":
        yield f"the quotient {down} instead of to zero (trunc)", torch.div(dividend, divisor, rounding_mode="floor")
    elif name == "remainder":
        yield f"the remainder of a quotient {to_zero} instead of down (floor)", torch.fmod(dividend, divisor)
    elif name == "fmod":
        yield f"the remainder of a quotient {down} instead of to zero (trunc)", torch.remainder(dividend, divisor)


# By the operator: what is tried in its place besides other arguments.
_KINDS: Mapping[str, Sequence[Callable[[Call], Variants]]] = {
    **dict.fromkeys(_NORMS, (_other_variance,)),
    **dict.fromkeys(_RESIZES, (_other_resize,)),
    **dict.fromkeys(_ACTIVATIONS, (_other_activations,)),
    **dict.fromkeys(DIVISIONS, (_other_divisions,)),
    **dict.fromkeys(MASKINGS, (_other_maskings,)),
    "convolution": (_other_padding, _other_kernels),
    "nll_loss_forward": (_smoothed, _other_means),
    "nll_loss2d_forward": (_other_means,),
    "_scaled_dot_product": (_other_attention,),
}

"""Other operations that people take for one of torch: what a port may compute instead, with the words for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product

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
HIDDEN = -1e9  # a finite number where a mask hides; others act alike
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod")


def other_operations(call: Call) -> Variants:
    """What a port may compute instead of an operation of torch."""
    name = call.function._schema.name.removeprefix("aten::")
    if name == "convolution":
        yield from _other_kernels(call)
    if name in _RESIZES:
        yield from _other_resize(call, name)
    if name in _ACTIVATIONS:
        for other, function in _ACTIVATIONS.items():
            if not other.startswith(name):  # an argument of gelu chooses its approximation
                yield f"{other} instead of {name}", function(next(iter(call.arguments().values())))
    if name.startswith("_scaled_dot_product"):
        for words, mask in _other_masks(call.arguments().get("attn_mask")):
            if (found := call.again(attn_mask=mask)) is not None:
                yield words, found
        yield from _causal_from_the_end(call)
    if name in _DIVISIONS:
        yield from other_divisions(call)
    if name in ("masked_fill", "masked_fill_", "where", "add"):
        yield from other_maskings(call)


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
        if words and not torch.equal(changed, weight) and (found := call.again(weight=changed)) is not None:
            yield " and ".join(words), found


def _other_resize(call: Call, name: str) -> Variants:
    other, words = _RESIZES[name]
    given = call.arguments()
    overload = getattr(getattr(_ATEN, other), call.function._overloadname or "default")
    taken = {one.name: given[one.name] for one in overload._schema.arguments if one.name in given}
    found = overload(**taken)
    before, after = given["input" if "input" in given else "self"].shape[-2:], found.shape[-2:]
    if "bicubic" in name and all(old <= new for old, new in zip(before, after, strict=True)):
        # Nothing is averaged when an image grows: what differs is the cubic itself.
        words = "the cubic of coefficient −0.5, weights at the edge normalised, instead of −0.75"
        words = words if name == "upsample_bicubic2d" else "the cubic of coefficient −0.75 instead of −0.5"
    yield words, found


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
        yield "−inf where the mask hides", torch.where(mask < -1e3, hidden, mask)


def _causal_from_the_end(call: Call) -> Variants:
    given = call.arguments()
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    if given.get("is_causal") and queries != keys:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=given["query"].device).tril(keys - queries)
        scores = given["query"].new_zeros(queries, keys).masked_fill(~seen, -math.inf)
        if (found := call.again(is_causal=False, attn_mask=scores)) is not None:
            yield "the causal mask aligned to the last key instead of the first", found


def other_maskings(call: Call) -> Variants:
    """A mask by hand, with another number where it hides, inverted or left out."""
    name = call.function._schema.name.removeprefix("aten::")
    given = call.arguments()
    if name == "add":
        for own, other in (("self", "other"), ("other", "self")):
            if isinstance(given[own], torch.Tensor) and isinstance(given[other], torch.Tensor) and given["alpha"] == 1:
                for words, mask in _other_masks(given[own]):
                    yield words, given[other] if mask is None else given[other] + mask
        return
    if name == "where":
        mask, scores, number = given["condition"], given["self"], given["other"]
        mask, number = ~mask, number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
    else:
        mask, scores, number = given["mask"], given["self"], given["value"]
    if not isinstance(number, (int, float)) or not isinstance(scores, torch.Tensor) or number > -1e3:
        return
    yield "no mask", scores
    yield "the mask inverted", scores.masked_fill(~mask, number)
    if number == -math.inf:
        yield "a finite number instead of −inf where the mask hides", scores.masked_fill(mask, HIDDEN)
    else:
        yield f"−inf instead of {number:g} where the mask hides", scores.masked_fill(mask, -math.inf)
    yield "the mask added as 1 and 0 instead of hiding what is False", scores + (~mask).to(scores.dtype)


def other_divisions(call: Call) -> Variants:
    """A division of whole numbers rounded to zero instead of down, or down instead of to zero."""
    name = call.function._schema.name.removeprefix("aten::")
    given = call.arguments()
    one, other, mode = given["self"], given["other"], given.get("rounding_mode")
    down, to_zero = "rounded down (floor)", "rounded to zero (trunc)"
    if name == "floor_divide" or (name == "div" and mode == "floor"):
        yield f"the quotient {to_zero} instead of down (floor)", torch.div(one, other, rounding_mode="trunc")
    elif name == "div" and mode == "trunc":
        yield f"the quotient {down} instead of to zero (trunc)", torch.div(one, other, rounding_mode="floor")
    elif name == "remainder":
        yield f"the remainder of a quotient {to_zero} instead of down (floor)", torch.fmod(one, other)
    elif name == "fmod":
        yield f"the remainder of a quotient {down} instead of to zero (trunc)", torch.remainder(one, other)

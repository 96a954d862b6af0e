"""Shapes that depend on the values of tensors."""

from __future__ import annotations

import ast

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_bench.catalogue.cause import Advice, Repro, Theme
from compile_bench.catalogue.conditions import of_calls, of_constructs, of_slices, of_values
from compile_bench.catalogue.use import UsedAs

theme = Theme("Shapes that depend on values")
SHAPE = r"Dynamic shape operator|data-dependent out"
_VECTOR = (torch.tensor([0.3, -0.6, 0.1, 0.9]),)


@theme.cause(
    "boolean-mask",
    "a tensor that is indexed by a mask",
    pattern=SHAPE,
    code=r"\w\[[^\]]*[<>=]",
    why="The number of elements that the mask keeps depends on values.",
    advice="Use torch.where(mask, x, 0).sum(), which keeps the shape.",
    when=of_constructs.reduced(ast.Subscript),
)
def _mask() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x[x > 0].sum()

    def fixed(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0).sum()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "dynamic-shape-captured",
    "a shape that depends on values, and that the program needs",
    pattern=SHAPE,
    settings={"capture_dynamic_output_shape_ops": True},
    why="Dynamo can carry such a size as an unbacked symbol.",
    advice="Set torch._dynamo.config.capture_dynamic_output_shape_ops = True.",
    when=of_values.only(UsedAs.REDUCED, UsedAs.ARITHMETIC, UsedAs.RETURNED),
)
def _captured() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x[x > 0].sum()

    return Repro(broken, broken, [_VECTOR])


@theme.cause(
    "nonzero",
    "nonzero(), argwhere()",
    pattern=SHAPE,
    code=r"\b(nonzero|argwhere)\(",
    why="The number of rows of the result depends on values.",
    advice="Use the mask: its sum is the count.",
    when=of_values.only(UsedAs.LENGTH, of=("nonzero", "argwhere")),
)
def _nonzero() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * len(torch.nonzero(x > 0))

    def fixed(x: Tensor) -> Tensor:
        return x * (x > 0).sum()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "masked-select",
    "masked_select()",
    pattern=SHAPE,
    code=r"masked_select\(",
    why="The length of the result depends on values.",
    advice="Sum torch.where(mask, x, 0). For a mean, divide by the mask's sum.",
    when=of_constructs.reduced(of=("masked_select",), by=("sum", "mean")),
)
def _masked_select() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.masked_select(x > 0).mean()

    def fixed(x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0).sum() / (x > 0).sum()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "unique",
    "torch.unique()",
    pattern=SHAPE,
    code=r"\bunique\(",
    why="The number of distinct values depends on values.",
    advice="Sort and count where neighbours differ.",
    when=of_values.only(UsedAs.LENGTH, of=("unique",)),
)
def _unique() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * torch.unique(x).shape[0]

    def fixed(x: Tensor) -> Tensor:
        ordered = x.sort().values
        return x * (1 + (ordered[1:] != ordered[:-1]).sum())

    return Repro(broken, fixed, [(torch.tensor([1, 2, 2, 3]),)])


@theme.cause(
    "unique-consecutive",
    "torch.unique_consecutive()",
    pattern=SHAPE,
    code=r"unique_consecutive\(",
    why="The number of runs of equal values depends on values.",
    advice="Count where neighbours differ.",
    when=of_values.only(UsedAs.LENGTH, of=("unique_consecutive",)),
)
def _unique_consecutive() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * torch.unique_consecutive(x).shape[0]

    def fixed(x: Tensor) -> Tensor:
        return x * (1 + (x[1:] != x[:-1]).sum())

    return Repro(broken, fixed, [(torch.tensor([1, 2, 2, 3]),)])


@theme.cause(
    "repeat-interleave",
    "repeat_interleave() by a tensor",
    pattern=SHAPE,
    code=r"repeat_interleave\(",
    why="The result is as long as the sum of the repeats.",
    advice="Pass output_size, if the sum of the repeats is known before the call.",
    when=of_calls.has_keyword("repeat_interleave", "output_size", given=False),
)
def _repeat() -> Repro:
    def broken(x: Tensor, repeats: Tensor) -> Tensor:
        return torch.repeat_interleave(x, repeats)

    def fixed(x: Tensor, repeats: Tensor) -> Tensor:
        return torch.repeat_interleave(x, repeats, output_size=6)

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor([1, 2, 1, 2]))])


@theme.cause(
    "one-hot",
    "one_hot() without a number of classes",
    pattern=SHAPE,
    code=r"one_hot\(",
    why="Without num_classes the width is one more than the largest value.",
    advice="Pass num_classes.",
    when=of_constructs.NO_CLASSES_GIVEN,
)
def _one_hot() -> Repro:
    def broken(labels: Tensor) -> Tensor:
        return F.one_hot(labels) * 2

    def fixed(labels: Tensor) -> Tensor:
        return F.one_hot(labels, num_classes=4) * 2

    return Repro(broken, fixed, [(torch.tensor([0, 3, 1]),)])


@theme.cause(
    "bincount",
    "torch.bincount()",
    pattern=SHAPE,
    code=r"bincount\(",
    why="The length of the result depends on the largest value, even with minlength.",
    advice="Use scatter_add on zeros of that length, if no value reaches minlength.",
    when=of_calls.has_keyword("bincount", "minlength") & of_calls.has_keyword("bincount", "weights", given=False),
)
def _bincount() -> Repro:
    def broken(labels: Tensor) -> Tensor:
        return torch.bincount(labels, minlength=4) * 2

    def fixed(labels: Tensor) -> Tensor:
        return labels.new_zeros(4).scatter_add(0, labels, torch.ones_like(labels)) * 2

    return Repro(broken, fixed, [(torch.tensor([0, 3, 1, 1]),)])


@theme.cause(
    "slice-by-value",
    "a slice with a length from a tensor",
    pattern=r"Tensor\.item\(\)|Data dependent operator",
    code=r"\w\[[^\]]*:[^\]]*(\]|int\(|item\()|\[[^\]]*(int\(|item\()[^\]]*:",
    why="The length of the result depends on a value.",
    advice="Use a mask of the positions below the length.",
    when=of_slices.MASKABLE_SLICE,
    others=(
        Advice(
            "Write with index_copy: tensor = tensor.index_copy(dim, start + torch.arange(length), values); "
            "index_copy_ where no gradient needs the old values.",
            of_slices.WRITTEN_SLICE,
        ),
        Advice("Read with tensor.index_select(dim, start + torch.arange(length)).", of_slices.READ_SLICE),
    ),
)
def _slice() -> Repro:
    def broken(x: Tensor, length: Tensor) -> Tensor:
        return x[: int(length)].sum()

    def fixed(x: Tensor, length: Tensor) -> Tensor:
        return (x * (torch.arange(len(x)) < length)).sum()

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))])


@theme.cause(
    "length-by-value",
    "arange() or zeros() with a length from a tensor",
    pattern=r"Tensor\.item\(\)|Data dependent operator",
    code=r"\b(arange|zeros|ones|full|empty)\(",
    why="The length of the result depends on a value.",
    advice="Allocate the largest length once, and mask the rest.",
    when=of_constructs.reduced(of=("arange", "zeros", "ones", "full", "empty")),
)
def _length() -> Repro:
    def broken(x: Tensor, length: Tensor) -> Tensor:
        return torch.arange(int(length)).sum() * x

    def fixed(x: Tensor, length: Tensor) -> Tensor:
        positions = torch.arange(8)
        return torch.where(positions < length, positions, 0).sum() * x

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(3))])


@theme.cause(
    "topk-by-value",
    "topk() with k from a tensor",
    pattern=r"Tensor\.item\(\)|Data dependent operator",
    code=r"topk\(",
    why="k is the length of the result, and here it is a value.",
    advice="Pass k as an int.",
    when=of_constructs.PASSED_K,
)
def _topk() -> Repro:
    def broken(x: Tensor, k: Tensor) -> Tensor:
        return x.topk(k.item()).values.sum()  # type: ignore[arg-type]

    def fixed(x: Tensor, k: Tensor) -> Tensor:
        ordered = x.sort(descending=True).values
        return torch.where(torch.arange(len(x)) < k, ordered, 0).sum()

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))])

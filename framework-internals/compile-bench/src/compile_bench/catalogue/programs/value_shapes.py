"""Shapes that depend on the values of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_bench.catalogue.programs import Repro, broken, program

_VECTOR = (torch.tensor([0.3, -0.6, 0.1, 0.9]),)


@broken("boolean-mask", fixed=lambda x: torch.where(x > 0, x, 0).sum(), calls=[_VECTOR])
def _mask(x: Tensor) -> Tensor:
    return x[x > 0].sum()


@broken("dynamic-shape-captured", calls=[_VECTOR])
def _captured(x: Tensor) -> Tensor:
    return x[x > 0].sum()


@broken("nonzero", fixed=lambda x: x * (x > 0).sum(), calls=[_VECTOR])
def _nonzero(x: Tensor) -> Tensor:
    return x * len(torch.nonzero(x > 0))


@broken("masked-select", fixed=lambda x: torch.where(x > 0, x, 0).sum() / (x > 0).sum(), calls=[_VECTOR])
def _masked_select(x: Tensor) -> Tensor:
    return x.masked_select(x > 0).mean()


@program("unique")
def _unique() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * torch.unique(x).shape[0]

    def fixed(x: Tensor) -> Tensor:
        ordered = x.sort().values
        return x * (1 + (ordered[1:] != ordered[:-1]).sum())

    return Repro(broken, fixed, [(torch.tensor([1, 2, 2, 3]),)])


@program("unique-consecutive")
def _unique_consecutive() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * torch.unique_consecutive(x).shape[0]

    def fixed(x: Tensor) -> Tensor:
        return x * (1 + (x[1:] != x[:-1]).sum())

    return Repro(broken, fixed, [(torch.tensor([1, 2, 2, 3]),)])


@program("repeat-interleave")
def _repeat() -> Repro:
    def broken(x: Tensor, repeats: Tensor) -> Tensor:
        return torch.repeat_interleave(x, repeats)

    def fixed(x: Tensor, repeats: Tensor) -> Tensor:
        return torch.repeat_interleave(x, repeats, output_size=6)

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor([1, 2, 1, 2]))])


@program("one-hot")
def _one_hot() -> Repro:
    def broken(labels: Tensor) -> Tensor:
        return F.one_hot(labels) * 2

    def fixed(labels: Tensor) -> Tensor:
        return F.one_hot(labels, num_classes=4) * 2

    return Repro(broken, fixed, [(torch.tensor([0, 3, 1]),)])


@program("bincount")
def _bincount() -> Repro:
    def broken(labels: Tensor) -> Tensor:
        return torch.bincount(labels, minlength=4) * 2

    def fixed(labels: Tensor) -> Tensor:
        return labels.new_zeros(4).scatter_add(0, labels, torch.ones_like(labels)) * 2

    return Repro(broken, fixed, [(torch.tensor([0, 3, 1, 1]),)])


@program("slice-by-value")
def _slice() -> Repro:
    def broken(x: Tensor, length: Tensor) -> Tensor:
        return x[: int(length)].sum()

    def fixed(x: Tensor, length: Tensor) -> Tensor:
        return (x * (torch.arange(len(x)) < length)).sum()

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))])


@program("length-by-value")
def _length() -> Repro:
    def broken(x: Tensor, length: Tensor) -> Tensor:
        return torch.arange(int(length)).sum() * x

    def fixed(x: Tensor, length: Tensor) -> Tensor:
        positions = torch.arange(8)
        return torch.where(positions < length, positions, 0).sum() * x

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(3))])


@program("topk-by-value")
def _topk() -> Repro:
    def broken(x: Tensor, k: Tensor) -> Tensor:
        return x.topk(k.item()).values.sum()  # type: ignore[arg-type]

    def fixed(x: Tensor, k: Tensor) -> Tensor:
        ordered = x.sort(descending=True).values
        return torch.where(torch.arange(len(x)) < k, ordered, 0).sum()

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))])

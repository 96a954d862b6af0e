"""Python that needs the value of a tensor: branches, loops, numbers, keys."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_bench.catalogue.programs import Repro, broken, program

_VECTOR = (torch.tensor([0.3, 0.6, 0.1, 0.9]),)


@program("branch-on-value")
def _branch() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x * 0.5
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        x = torch.where(x.mean() > 0, x * 0.5, x)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR, (-_VECTOR[0],)])


@program("branch-on-value-cond")
def _branch_cond() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return (x @ x).relu()
        return (x @ x).sin()

    def fixed(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x @ x).relu(), lambda x: (x @ x).sin(), (x,))

    return Repro(broken, fixed, [(torch.eye(4),), (-torch.eye(4),)])


@program("choice-by-value")
def _choice() -> Repro:
    def broken(x: Tensor) -> Tensor:
        scale = 2.0 if x.norm() > 1 else 0.5
        return x * scale

    def fixed(x: Tensor) -> Tensor:
        return x * torch.where(x.norm() > 1, 2.0, 0.5)

    return Repro(broken, fixed, [_VECTOR, (_VECTOR[0] * 0.1,)])


@broken("and-of-values", fixed=lambda x: x * torch.logical_and(x[0] > 0, x[1] > 0), calls=[_VECTOR])
def _and(x: Tensor) -> Tensor:
    both = x[0] > 0 and x[1] > 0
    return x * both


@broken("any-of-values", fixed=lambda x: x * (x > 0).any(), calls=[_VECTOR])
def _any(x: Tensor) -> Tensor:
    return x * any(x > 0)


@program("chained-comparison")
def _chained() -> Repro:
    def broken(x: Tensor) -> Tensor:
        inside = 0 < x.sum() < 3
        return x * inside

    def fixed(x: Tensor) -> Tensor:
        total = x.sum()
        return x * ((total > 0) & (total < 3))

    return Repro(broken, fixed, [_VECTOR])


@broken("filtered-by-value", fixed=lambda x: torch.where(x > 0.2, x, 0).sum(), calls=[_VECTOR])
def _filtered(x: Tensor) -> Tensor:
    return torch.stack([value for value in x if value > 0.2]).sum()


@program("loop-until-value")
def _loop() -> Repro:
    def broken(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x * 0.5
        return x

    def fixed(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.where(x.norm() > 1, x * 0.5, x)
        return x

    return Repro(broken, fixed, [(torch.full((4,), 8.0),)])


@program("raise-on-value")
def _raise() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        torch._assert_async(~torch.isnan(x).any(), "not a number")
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@program("warn-on-value")
def _warn() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.abs().max() > 10:
            warnings.warn("large", stacklevel=2)
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.abs().max() > 10:
            warnings.warn("large", stacklevel=2)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@program("branch-on-item")
def _branch_on_item() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.max().item() > 0.5:
            x = x * 0.5
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        x = torch.where(x.max() > 0.5, x * 0.5, x)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@broken("compared-as-whole", fixed=lambda x: x * (x == x.clone()).all(), calls=[_VECTOR])
def _equal(x: Tensor) -> Tensor:
    return x * torch.equal(x, x.clone())


@broken("item", fixed=lambda x: x / x.abs().max().detach(), calls=[_VECTOR])
def _item(x: Tensor) -> Tensor:
    return x / x.abs().max().item()


@broken("item-captured", calls=[_VECTOR])
def _item_captured(x: Tensor) -> Tensor:
    return x * (x.sum().item() + 1.0)


@program("item-in-text")
def _text() -> Repro:
    def broken(x: Tensor) -> tuple[Tensor, str]:
        return x.cos(), f"{x.sum().item():.1f}"

    def fixed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos(), x.sum()

    return Repro(lambda x: broken(x)[0], lambda x: fixed(x)[0], [_VECTOR])


@broken("text-of-tensor", fixed=lambda x: x * True, calls=[_VECTOR])
def _str(x: Tensor) -> Tensor:
    return x * (len(str(x)) > 0)


@program("key-from-value")
def _key() -> Repro:
    scales = {0: 1.0, 1: 2.0}
    table = torch.tensor([1.0, 2.0])

    def broken(x: Tensor, index: Tensor) -> Tensor:
        return x * scales[int(index)]

    return Repro(broken, lambda x, index: x * table[index], [(*_VECTOR, torch.tensor(1))])


@program("list-indexed-by-tensor")
def _list() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return [x.sin(), x.cos(), x, -x][x.argmax()]

    def fixed(x: Tensor) -> Tensor:
        return torch.stack([x.sin(), x.cos(), x, -x]).index_select(0, x.argmax().view(1))[0]

    return Repro(broken, fixed, [_VECTOR])


@broken("match-on-value", fixed=lambda x: torch.where(x.argmax() == 3, x + 1, x - 1), calls=[_VECTOR])
def _match(x: Tensor) -> Tensor:
    match int(x.argmax()):
        case 3:
            return x + 1
        case _:
            return x - 1


@program("range-of-tensor")
def _range() -> Repro:
    def broken(x: Tensor, rounds: Tensor) -> Tensor:
        for _ in range(rounds):
            x = x.sin()
        return x

    def fixed(x: Tensor, rounds: int) -> Tensor:
        for _ in range(rounds):
            x = x.sin()
        return x

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))], [(*_VECTOR, 2)])


@broken("math-of-tensor", fixed=lambda x: x * x.sum().sqrt(), calls=[_VECTOR])
def _math(x: Tensor) -> Tensor:
    return x * math.sqrt(x.sum())


@program("sorted-by-value")
def _sorted() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return sorted([x[:2], x[2:]], key=lambda part: part.sum())[0] * 1.0

    def fixed(x: Tensor) -> Tensor:
        parts = torch.stack([x[:2], x[2:]])
        return parts.index_select(0, parts.sum(1).argmin().view(1))[0]

    return Repro(broken, fixed, [_VECTOR])


@broken("list-of-values", fixed=lambda x: x * x.max(), calls=[_VECTOR])
def _tolist(x: Tensor) -> Tensor:
    return x * max(x.tolist())


@program("sizes-from-tensor")
def _sizes() -> Repro:
    def broken(x: Tensor, sizes: Tensor) -> Tensor:
        return torch.cat([part.relu() for part in x.split(sizes.tolist())])

    def fixed(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return torch.cat([part.relu() for part in x.split(sizes)])

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor([1, 3]))], [(*_VECTOR, (1, 3))])


@broken("tensor-from-values", fixed=lambda x: torch.stack([x.min(), x.max()]), calls=[_VECTOR])
def _from_values(x: Tensor) -> Tensor:
    return torch.tensor([x.min().item(), x.max().item()])


@broken("numpy-value", fixed=lambda x: x * torch.linalg.vector_norm(x), calls=[_VECTOR])
def _numpy(x: Tensor) -> Tensor:
    return x * float(np.linalg.norm(x.numpy()))


@program("clip-and-check")
def _clip() -> Repro:
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)

    def broken(x: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@broken("layer-dropped", fixed=lambda x: x + (torch.rand([]) < 0.5) * x.sin(), calls=[_VECTOR] * 4)
def _layerdrop(x: Tensor) -> Tensor:
    if torch.rand([]) < 0.5:
        x = x + x.sin()
    return x


@program("experts-looped")
def _experts() -> Repro:
    class Experts(nn.Module):
        def __init__(self, dense: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dense = dense
            self.gate = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.gate(x).argmax(-1)
            if self.dense:
                every = torch.stack([expert(x) for expert in self.experts], 1)
                return (F.one_hot(chosen, 3).unsqueeze(-1) * every).sum(1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(-1)
                if rows.numel() > 0:
                    out[rows] = expert(x[rows])
            return out

    torch.manual_seed(1)
    return Repro(Experts(dense=False), Experts(dense=True), [(torch.randn(16, 8),)])

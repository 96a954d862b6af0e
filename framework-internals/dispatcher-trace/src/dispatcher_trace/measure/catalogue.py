"""Public callables of torch, of every kind, with small inputs. The tracer must trace each without an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One callable and its inputs.

    Attributes:
        name: Public name.
        family: unary, binary, reduction, view, in-place, indexing, linalg, conv, norm, attention, loss, optimizer, RNG,
            factory.
        function: Takes the inputs, and returns a tensor, several tensors, or None.
        shapes: Shapes of the inputs, which are seeded normal numbers.
    """

    name: str
    family: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]

    def inputs(self, device: str) -> list[Tensor]:
        """New inputs with the same values every time."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(device) for shape in self.shapes]


def _optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        parameter = nn.Parameter(x.detach().clone())
        parameter.grad = torch.ones_like(parameter)
        make([parameter]).step()
        return parameter.detach()

    return step


def _indices(x: Tensor) -> Tensor:
    return torch.tensor([2, 0], device=x.device)


def _targets(x: Tensor) -> Tensor:
    return torch.tensor([1, 0, 2, 1], device=x.device)


_S: Shape = (4, 6)
_SQUARE: Shape = (4, 4)
_IMAGE: Shape = (2, 3, 8, 8)
_QKV: tuple[Shape, ...] = ((1, 2, 5, 8),) * 3


CATALOGUE: tuple[Entry, ...] = (
    Entry("torch.exp", "unary", torch.exp, (_S,)),
    Entry("torch.sin", "unary", torch.sin, (_S,)),
    Entry("torch.sigmoid", "unary", torch.sigmoid, (_S,)),
    Entry("torch.clamp", "unary", lambda x: torch.clamp(x, -1, 1), (_S,)),
    Entry("F.relu", "unary", F.relu, (_S,)),
    Entry("F.gelu", "unary", F.gelu, (_S,)),
    Entry("F.silu", "unary", F.silu, (_S,)),
    Entry("torch.add", "binary", torch.add, (_S, (6,))),
    Entry("torch.mul", "binary", lambda x: x * 1.5, (_S,)),
    Entry("torch.div", "binary", lambda x, y: x / (y.abs() + 1), (_S, _S)),
    Entry("torch.where", "binary", lambda x, y: torch.where(x > 0, x, y), (_S, _S)),
    Entry("torch.maximum", "binary", torch.maximum, (_S, _S)),
    Entry("torch.pow", "binary", lambda x: x**2, (_S,)),
    Entry("torch.lerp", "binary", lambda x, y: torch.lerp(x, y, 0.25), (_S, _S)),
    Entry("torch.sum", "reduction", torch.sum, (_S,)),
    Entry("torch.mean", "reduction", lambda x: torch.mean(x, -1), (_S,)),
    Entry("torch.amax", "reduction", lambda x: torch.amax(x, 0), (_S,)),
    Entry("torch.var", "reduction", torch.var, (_S,)),
    Entry("torch.cumsum", "reduction", lambda x: torch.cumsum(x, 0), (_S,)),
    Entry("torch.logsumexp", "reduction", lambda x: torch.logsumexp(x, -1), (_S,)),
    Entry("torch.argmax", "reduction", lambda x: torch.argmax(x, -1), (_S,)),
    Entry("torch.softmax", "reduction", lambda x: torch.softmax(x, -1), (_S,)),
    Entry("Tensor.view", "view", lambda x: x.view(6, 4) + 1, (_S,)),
    Entry("torch.transpose", "view", lambda x: torch.transpose(x, 0, 1) * 2, (_S,)),
    Entry("Tensor.expand", "view", lambda x: x.expand(3, 4) * 2, ((4,),)),
    Entry("torch.split", "view", lambda x: torch.split(x, 3, -1)[1] + 1, (_S,)),
    Entry("torch.reshape", "view", lambda x: x.t().reshape(-1), (_S,)),
    Entry("Tensor.contiguous", "view", lambda x: x.t().contiguous(), (_S,)),
    Entry("Tensor.detach", "view", lambda x: x.detach() + 1, (_S,)),
    Entry("Tensor.add_", "in-place", lambda x, y: x.clone().add_(y), (_S, _S)),
    Entry("Tensor.mul_", "in-place", lambda x: x.clone().mul_(2.0), (_S,)),
    Entry("Tensor.zero_", "in-place", lambda x: x.clone().zero_(), (_S,)),
    Entry("Tensor.__setitem__", "in-place", lambda x, y: _set_row(x.clone(), y), (_S, (6,))),
    Entry("torch._foreach_add", "in-place", lambda x, y: torch._foreach_add([x, y], 1.0), (_S, _S)),
    Entry("torch.index_select", "indexing", lambda x: torch.index_select(x, 0, _indices(x)), (_S,)),
    Entry("Tensor.__getitem__", "indexing", lambda x: x[:, _indices(x)], (_S,)),
    Entry("torch.gather", "indexing", lambda x: torch.gather(x, 1, _targets(x)[:, None]), (_S,)),
    Entry("torch.masked_select", "indexing", lambda x: torch.masked_select(x, x > 0), (_S,)),
    Entry("F.embedding", "indexing", lambda x: F.embedding(_indices(x), x), (_S,)),
    Entry("torch.cat", "indexing", lambda x, y: torch.cat([x, y], 0), (_S, _S)),
    Entry("torch.topk", "indexing", lambda x: torch.topk(x, 2)[0], (_S,)),
    Entry("torch.mm", "linalg", torch.mm, (_S, (6, 3))),
    Entry("torch.matmul", "linalg", torch.matmul, ((2, 4, 6), (6, 3))),
    Entry("torch.bmm", "linalg", torch.bmm, ((2, 4, 6), (2, 6, 3))),
    Entry("torch.einsum", "linalg", lambda x, y: torch.einsum("ij,jk->ik", x, y), (_S, (6, 3))),
    Entry("F.linear", "linalg", F.linear, (_S, (5, 6), (5,))),
    Entry("torch.linalg.solve", "linalg", lambda x, y: torch.linalg.solve(x, y), (_SQUARE, (4, 2))),
    Entry("torch.linalg.norm", "linalg", torch.linalg.norm, (_S,)),
    Entry("F.conv2d", "conv", F.conv2d, (_IMAGE, (4, 3, 3, 3), (4,))),
    Entry("F.conv1d", "conv", F.conv1d, ((2, 3, 10), (4, 3, 3))),
    Entry("F.max_pool2d", "conv", lambda x: F.max_pool2d(x, 2), (_IMAGE,)),
    Entry("F.interpolate", "conv", lambda x: F.interpolate(x, scale_factor=2.0), (_IMAGE,)),
    Entry("F.layer_norm", "norm", lambda x, w: F.layer_norm(x, (6,), w), (_S, (6,))),
    Entry("F.rms_norm", "norm", lambda x, w: F.rms_norm(x, (6,), w), (_S, (6,))),
    Entry("F.batch_norm", "norm", lambda x: F.batch_norm(x, None, None, training=True), (_IMAGE,)),
    Entry("F.group_norm", "norm", lambda x: F.group_norm(x, 2), ((2, 4, 5, 5),)),
    Entry("F.scaled_dot_product_attention", "attention", F.scaled_dot_product_attention, _QKV),
    Entry(
        "F.scaled_dot_product_attention causal",
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _QKV,
    ),
    Entry("F.cross_entropy", "loss", lambda x: F.cross_entropy(x, _targets(x)), (_S,)),
    Entry("F.mse_loss", "loss", F.mse_loss, (_S, _S)),
    Entry(
        "F.binary_cross_entropy_with_logits",
        "loss",
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        (_S,),
    ),
    Entry("torch.optim.SGD", "optimizer", _optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)), (_S,)),
    Entry("torch.optim.AdamW", "optimizer", _optimizer(lambda p: torch.optim.AdamW(p)), (_S,)),
    Entry("torch.randn", "RNG", lambda x: x + torch.randn(4, 6, device=x.device), (_S,)),
    Entry("torch.bernoulli", "RNG", lambda x: torch.bernoulli(x.sigmoid()), (_S,)),
    Entry("F.dropout", "RNG", lambda x: F.dropout(x, 0.5), (_S,)),
    Entry("torch.randperm", "RNG", lambda x: torch.randperm(6, device=x.device), (_S,)),
    Entry("torch.zeros_like", "factory", torch.zeros_like, (_S,)),
    Entry("torch.arange", "factory", lambda x: x + torch.arange(6, device=x.device), (_S,)),
    Entry("torch.full", "factory", lambda x: x * torch.full((6,), 2.0, device=x.device), (_S,)),
    Entry("torch.eye", "factory", lambda x: x @ torch.eye(6, device=x.device), (_S,)),
    Entry("torch.tensor", "factory", lambda x: x + torch.tensor([1.0], device=x.device), (_S,)),
)


def _set_row(x: Tensor, row: Tensor) -> Tensor:
    x[1] = row
    return x

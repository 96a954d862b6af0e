"""Adds labels to the torch baseline, the same labels that its JAX port has from ``jax.named_scope``.

``torch.fx.traceback.annotate`` adds a label to the nodes of the graph that torch.compile captures. The labels wrap the
model from outside, so the source of the model has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.traceback import annotate

from torch_baseline.config import Precision
from torch_baseline.model import GPT, Block, cross_entropy
from torch_baseline.train import autocast

LABEL = "region"  # key of the label in a node's custom metadata


def labelled(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Return a function whose operations have a label in a captured graph.

    The label has scopes from the outermost to the innermost: ``block0/mlp``.
    """

    def wrapped(*arguments: Any, **options: Any) -> Any:
        with annotate({LABEL: label}):
            return function(*arguments, **options)

    return wrapped


def labelled_loss(model: GPT, dtype: Precision, device_type: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Label a model and its loss like :mod:`jax_baseline.gpt.model`.

    The model is modified: its parts are wrapped, and a tied head becomes a module. The result, a function (tokens_BT,
    targets_BT) → mean cross-entropy, equals ``model(tokens_BT, targets_BT)``.
    """
    _label(model.embedding, "embedding")
    for index, block in enumerate(model.blocks):
        _label_block(block, f"block{index}")
    _label(model.norm, "head/norm")
    parts: Any = model  # mypy: the head is declared as a linear layer or None
    parts.head = model.head or _TiedHead(model.embedding)
    _label(parts.head, "head")

    @partial(labelled, label="loss")
    def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with autocast(dtype, device_type):
            return loss_of(model(tokens_BT), targets_BT)

    return loss


class _TiedHead(nn.Module):
    """Computes the logits from the embedding table, as a module that can be labelled."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.linear(x_BTC, self.embedding.weight)


def _label_block(block: nn.Module, name: str) -> None:
    assert isinstance(block, Block)
    _label(block.attention, f"{name}/attention")
    _label(block.attention_norm, f"{name}/attention/norm")
    _label(block.mlp, f"{name}/mlp")
    _label(block.mlp_norm, f"{name}/mlp/norm")
    block.attention.attend = labelled(block.attention.attend, f"{name}/attention/core")
    block.mlp.activate = labelled(block.mlp.activate, f"{name}/mlp/activation")

    # The two residual sums, each with the label of its branch. Block.forward leaves the second one to the next block.
    def attend(x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        return x_BTC + block.attention(block.attention_norm(x_BTC.to(cos_TD.dtype)), cos_TD, sin_TD)

    def feed_forward(x_BTC: Tensor, cos_TD: Tensor) -> Tensor:
        return x_BTC + block.mlp(block.mlp_norm(x_BTC.to(cos_TD.dtype)))

    attend, feed_forward = labelled(attend, f"{name}/attention"), labelled(feed_forward, f"{name}/mlp")
    parts: Any = block  # mypy: a method is replaced
    parts.forward = lambda x_BTC, _, cos_TD, sin_TD: (feed_forward(attend(x_BTC, cos_TD, sin_TD), cos_TD), None)


def _label(module: nn.Module, label: str) -> None:
    module.forward = labelled(module.forward, label)

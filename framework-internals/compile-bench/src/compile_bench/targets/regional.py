"""Repeated blocks of a model, and how they are compiled: one by one, or as one region of the whole."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import nn

from benchkit import UserError
from compile_bench.targets.case import Case

Signature = tuple[type[nn.Module], tuple[tuple[str, torch.Size], ...]]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest family of equal blocks: same class, same shapes of parameters, neighbours in one container.

    Returns:
        At least two modules, none inside another; empty where the model repeats nothing that holds parameters.
    """
    families: dict[tuple[str, Signature], list[nn.Module]] = defaultdict(list)
    for name, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for block in container:
                shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
                if shapes:
                    families[name, (type(block), shapes)].append(block)
    repeated = [blocks for blocks in families.values() if len(blocks) > 1]
    return max(repeated, key=_parameters, default=[])


def _parameters(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def compile_case(model: nn.Module, case: Case) -> nn.Module:
    """``torch.compile`` as a case says: the whole model, or its repeated blocks.

    Args:
        model: changed in place where the scope is its blocks; where they are nested, their class is, for good.
        case: mode, dynamic and scope are used.

    Returns:
        What is to be called instead of ``model``.

    Raises:
        UserError: for blocks of a model that repeats none.
    """
    options: dict[str, Any] = {"mode": None if case.mode == "default" else case.mode, "dynamic": case.dynamic}
    if case.scope == "whole":
        return cast(nn.Module, torch.compile(model, **options))
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(f"{case.target} has no repeated blocks in a ModuleList or Sequential: compile it as a whole")
    if case.scope == "blocks":
        for block in blocks:
            block.compile(**options)
        return model
    # On the class: a marked forward set on each instance is taken for the same region with the same weights, and every
    # block computes with the first one's (torch 2.13, without a word).
    kind = type(blocks[0])
    kind.forward = torch.compiler.nested_compile_region(kind.forward)
    return cast(nn.Module, torch.compile(model, **options))

"""Finds repeated blocks of a model, and compiles a model by scope: as a whole, block by block, or nested."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import nn

from benchkit import UserError
from compile_bench.targets.case import Case

Signature = tuple[type[nn.Module], tuple[tuple[str, torch.Size], ...]]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of equal blocks in one container, with the same class and the same shapes of parameters.

    Returns:
        At least two modules, none inside another; empty if the model repeats no module with parameters.
    """
    groups: dict[tuple[str, Signature], list[nn.Module]] = defaultdict(list)
    for name, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for block in container:
                shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
                if shapes:
                    groups[name, (type(block), shapes)].append(block)
    repeated = [blocks for blocks in groups.values() if len(blocks) > 1]

    def parameters(blocks: list[nn.Module]) -> int:
        return sum(parameter.numel() for block in blocks for parameter in block.parameters())

    return max(repeated, key=parameters, default=[])


def compile_case(model: nn.Module, case: Case) -> nn.Module:
    """Compile a model by the mode, the dynamic option and the scope of a case.

    Args:
        model: The model. With scope ``"blocks"`` its blocks change in place; with ``"nested"`` the class of its blocks
            changes for the rest of the process.
        case: The case.

    Returns:
        The module to call instead of ``model``.

    Raises:
        UserError: If the scope is not ``"whole"`` and the model has no repeated blocks.
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
    # This marks forward on the class. If each instance has a marked forward, torch 2.13 takes all of them for the same
    # region with the same weights: each block silently computes with the weights of the first one.
    kind = type(blocks[0])
    kind.forward = torch.compiler.nested_compile_region(kind.forward)
    return cast(nn.Module, torch.compile(model, **options))

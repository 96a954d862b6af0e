"""What this package takes from torch that is not public; tests/test_rmsnorm_operators.py fails where it has moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_under_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile call ``function`` while it traces, and take the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets this attribute, but imports torch._dynamo, and with it
    Triton: seconds that ``import rmsnorm_fused`` should not take.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def kept_graphs() -> AbstractContextManager[None]:
    """Have torch.compile make backward passes that can be run again and again on a graph that is kept.

    By default a compiled backward pass writes over what the forward pass saved, and refuses ``retain_graph``.
    """
    import torch._functorch.config as config

    return config.patch(donated_buffer=False)

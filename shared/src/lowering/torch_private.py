"""The private parts of torch that this package uses; tests/lowering/test_lowering.py fails if one moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.fx.traceback import annotate

__all__ = ["annotate", "constant_under_compile"]

P = ParamSpec("P")
R = TypeVar("R")


def constant_under_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Make torch.compile call ``function`` during tracing and treat the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets the same attribute, but imports torch._dynamo and Triton,
    which takes seconds; an import of a package of operators should not.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

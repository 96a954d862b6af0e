"""The private parts of torch that this package and its operators use.

tests/lowering/test_lowering.py and custom-ops' tests/test_linear.py fail if one moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.fx.traceback import annotate

__all__ = ["annotate", "constant_under_compile", "exporting", "onednn_multiplies"]

P = ParamSpec("P")
R = TypeVar("R")


def constant_under_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Make torch.compile call ``function`` during tracing and treat the result as a constant.

    The public ``torch.compiler.assume_constant_result`` sets the same attribute, but imports torch._dynamo and Triton,
    which takes seconds; an import of a package of operators should not.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_under_compile
def exporting() -> bool:
    """Whether a program is exported. Dynamo of torch 2.10 and 2.11 says so in every compilation (pytorch #176347)."""
    return torch.compiler.is_exporting()


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether torch passes matrix products of a 16-bit dtype to oneDNN on this processor.

    True where torch has no such question: its own products are then taken as they are.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    asked = getattr(torch.ops.mkldnn, name, None)
    return asked is None or (torch.backends.mkldnn.is_available() and bool(asked()))

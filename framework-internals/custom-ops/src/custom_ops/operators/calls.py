"""The registry of the operators as callables: ``calls.vector_add(a, b)``.

:func:`custom_ops.builds.loading.register_operators`, which the import of the package calls, fills it with functions
that load a build at their first call, and :func:`custom_ops.builds.loading.load` with those of the build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lowering

Call = Callable[..., Any]


class Calls:
    """An attribute for each operator of :func:`custom_ops.builds.loading.operators`.

    Attributes:
        ready: Whether the kernels can be used here; loads the build, which compiles it first if needed.
        load: Loads the build, or raises the error that says why it cannot.
        loaded: Whether the callables are those of a build.
    """

    vector_add: Call
    axpb: Call
    scale: Call
    bias_gelu: Call
    bias_gelu_backward: Call
    swiglu: Call
    swiglu_backward: Call
    geglu: Call
    geglu_backward: Call
    conv_bn_relu: Call
    cross_entropy: Call
    cross_entropy_gradient_: Call
    cross_entropy_block_sums_: Call
    cross_entropy_block_gradient_: Call
    general_cross_entropy: Call
    general_cross_entropy_gradient_: Call
    general_cross_entropy_block_sums_: Call
    general_cross_entropy_block_gradient_: Call
    linear_cross_entropy_in_blocks: Call
    linear_cross_entropy_in_blocks_backward: Call
    gradient_norm: Call
    adamw_: Call
    rotary: Call
    mm: Call
    flash_attention: Call
    flash_attention_backward: Call

    ready: Callable[[], bool]
    load: Callable[[], object]
    loaded = False

    def fill(self, operators: Mapping[str, Call], *, loaded: bool) -> None:
        """Replace the callables."""
        vars(self).update(operators, loaded=loaded)


calls = Calls()


def lower(
    operator: str,
    asked: lowering.Lowering | None,
    formula: Call,
    kernel: Call,
    *arguments: Any,
    sizes: Sequence[tuple[str, int]],
    default: lowering.Choice = "formula",
) -> Any:
    """Call the formula or the kernel of an operator of this package; see :func:`lowering.lower`."""
    return lowering.lower(
        operator,
        asked,
        formula,
        kernel,
        *arguments,
        sizes=sizes,
        available=calls.ready,
        source="custom_ops",
        default=default,
    )

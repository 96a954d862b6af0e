"""Sharding rules of the operators for ``torch.distributed.tensor``: rows may be sharded, columns may not."""

from __future__ import annotations

import functools
import sys
from typing import Any

from lowering.torch_private import constant_under_compile
from rmsnorm_fused.ops.operators import FAMILIES, operator


@constant_under_compile
def prepare() -> None:
    """Register the sharding rules if DTensor has been imported; importing it here would take a second."""
    if "torch.distributed.tensor" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def choices(x: Any, outputs: Any, inputs: Any) -> list[Any]:
        """All tensors replicated, or all rows sharded along the same dimension. ``outputs`` and ``inputs`` give the
        placement of each tensor: sharded with the rows, or the same everywhere.
        """
        ways = [Replicate(), *(Shard(dim) for dim in range(x.ndim - 1))]
        return [([f(way) for f in outputs], [f and f(way) for f in inputs]) for way in ways]

    def rows(way: Any) -> Any:
        return way

    def everywhere(_way: Any) -> Any:
        return Replicate()

    def summed(way: Any) -> Any:
        return way if way.is_replicate() else Partial()

    def if_given(spec: Any, what: Any) -> Any:
        return None if spec is None else what

    for family in FAMILIES:

        @register_sharding(operator(family, "forward").default)
        def _forward(x: Any, weight: Any, bias: Any, *_: Any) -> Any:
            parameters = (if_given(weight, everywhere), if_given(bias, everywhere))
            return choices(x, (rows, rows), (rows, *parameters, *(None,) * 4))

        @register_sharding(operator(family, "forward_add").default)
        def _forward_add(x: Any, _residual: Any, weight: Any, bias: Any, *_: Any) -> Any:
            parameters = (if_given(weight, everywhere), if_given(bias, everywhere))
            return choices(x, (rows, rows, rows), (rows, rows, *parameters, *(None,) * 4))

        @register_sharding(operator(family, "backward").default)
        def _backward(dy: Any, ds: Any, s: Any, weight: Any, _kept: Any, *options: Any) -> Any:
            *_, needs_dparameters, _deterministic = options
            of_residual = everywhere if dy.tensor_meta.dtype == s.tensor_meta.dtype else rows  # empty, or like s
            inputs = (rows, if_given(ds, rows), rows, if_given(weight, everywhere), rows, *(None,) * 5)
            return choices(dy, (rows, of_residual, summed if needs_dparameters else everywhere), inputs)

        @register_sharding(operator(family, "quantize").default)
        def _quantize(x: Any, residual: Any, weight: Any, scale: Any, *_: Any) -> Any:
            outputs = (rows, if_given(residual, rows) or everywhere, everywhere if scale is not None else rows)
            inputs = (
                rows,
                if_given(residual, rows),
                if_given(weight, everywhere),
                if_given(scale, everywhere),
                None,
                None,
                None,
                None,
            )
            return choices(x, outputs, inputs)

"""The causes, one module for each group. Importing this package registers all of them, and imports torch."""

from compile_bench.catalogue.causes import (
    constructs,
    library,
    output,
    recompiles,
    silent,
    tensors,
    value_shapes,
    values,
)

__all__ = ["constructs", "library", "output", "recompiles", "silent", "tensors", "value_shapes", "values"]

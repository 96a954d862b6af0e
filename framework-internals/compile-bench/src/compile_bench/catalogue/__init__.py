"""Causes of graph breaks, recompilations and silent eager execution: a minimal repro of each, with its fix.

The modules here hold the causes by family; importing this package registers them all, and imports torch.
:mod:`compile_bench.catalogue.examine` runs them, :mod:`compile_bench.catalogue.page` renders them.
"""

from __future__ import annotations

from compile_bench.catalogue import constructs, library, output, recompiles, silent, tensors, value_shapes, values
from compile_bench.catalogue.cause import CAUSES, Cause, Repro, match, match_limit, match_recompile

__all__ = [
    "CAUSES",
    "Cause",
    "Repro",
    "constructs",
    "library",
    "match",
    "match_limit",
    "match_recompile",
    "output",
    "recompiles",
    "silent",
    "tensors",
    "value_shapes",
    "values",
]

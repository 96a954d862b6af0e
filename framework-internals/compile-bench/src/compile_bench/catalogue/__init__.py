"""Causes of graph breaks, recompilations and silent eager execution: a minimal program for each, with a fix.

The names of this package register all causes when they are first used, which imports torch. Its modules about source
code (``syntax``, ``purity``, ``use``, ``conditions``) do not. :mod:`compile_bench.catalogue.examine` runs a cause, and
:mod:`compile_bench.catalogue.page` renders all of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_bench.catalogue.cause import CAUSES, Advised, Cause, Repro, advise, match, match_recompile

__all__ = ["CAUSES", "Advised", "Cause", "Repro", "advise", "match", "match_recompile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    import_module("compile_bench.catalogue.causes")
    return getattr(import_module("compile_bench.catalogue.cause"), name)

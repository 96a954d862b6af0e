"""Causes of graph breaks, recompilations and silent eager execution: a minimal program for each, with a fix.

Importing this package registers all causes, and imports torch. :mod:`compile_bench.catalogue.examine` runs a cause, and
:mod:`compile_bench.catalogue.page` renders all of them.
"""

from __future__ import annotations

from compile_bench.catalogue import causes
from compile_bench.catalogue.cause import CAUSES, Cause, Repro, match, match_limit, match_recompile

__all__ = ["CAUSES", "Cause", "Repro", "causes", "match", "match_limit", "match_recompile"]

"""Causes of graph breaks, recompilations and silent eager execution: a minimal program for each, with a fix.

The programs alone import torch. :mod:`compile_bench.catalogue.examine` runs a cause, and
:mod:`compile_bench.catalogue.page` renders all of them.
"""

from compile_bench.catalogue.cause import CAUSES, Advised, Cause, advise, match, match_recompile

__all__ = ["CAUSES", "Advised", "Cause", "advise", "match", "match_recompile"]

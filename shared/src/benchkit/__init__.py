"""Timing, limits, environment, results, reports and plots for every lens.

Neither torch nor jax is imported at module level, so that a tool which only renders a report stays light.
"""

from benchkit.errors import UserError
from benchkit.results import Quantity, Record, Results
from benchkit.timing import Comparison, Timing, compare, measure

__all__ = ["Comparison", "Quantity", "Record", "Results", "Timing", "UserError", "compare", "measure"]

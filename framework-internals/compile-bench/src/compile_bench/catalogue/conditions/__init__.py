"""When an advice may be followed: conditions on the use of what broke, or of what a guard checked.

A condition holds only where the source shows it. What the source does not show counts as not holding.
Nothing here imports torch.
"""

from compile_bench.catalogue.conditions import constructs, patterns, statements, values

__all__ = ["constructs", "patterns", "statements", "values"]

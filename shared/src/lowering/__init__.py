"""The two lowerings of an operator under torch.compile, its formula and its kernel, and the choice between them.

The **formula** is written in torch's operators: the compiler sees through it, differentiates it and fuses it with its
neighbours. The **kernel** is an operator that the compiler may not open. Which one makes a step faster depends on the
graph around the operator, so the choice is data: measured in the whole step (``compile-bench lowering``), kept in a
table by class of machines, operator, dtype, sizes and direction, and open (the formula) where nothing was measured.
"""

from lowering.choice import (
    LOWERINGS,
    Call,
    Lowering,
    added_table,
    check_lowering,
    choose,
    in_graph,
    load_table,
    lower,
    recorded_calls,
)
from lowering.table import Choice, Direction, Evidence, Row, describe, machine_class, read_table, write_table

__all__ = [
    "LOWERINGS",
    "Call",
    "Choice",
    "Direction",
    "Evidence",
    "Lowering",
    "Row",
    "added_table",
    "check_lowering",
    "choose",
    "describe",
    "in_graph",
    "load_table",
    "lower",
    "machine_class",
    "read_table",
    "recorded_calls",
    "write_table",
]

"""The two lowerings of an operator under torch.compile, its formula and its kernel, and the choice between them.

The **formula** is written in torch's operators: the compiler sees through it, differentiates it and fuses it with its
neighbours. The **kernel** is an operator that the compiler may not open. Which one makes a step faster depends on the
graph around the operator, so the choice is data: measured in the whole step (``compile-bench tune``), by operator,
dtype, sizes and direction, and open (the formula) where nothing was measured. What this machine measured lies in the
user's cache and comes before the committed table, which holds for classes of machines.
"""

from lowering.choice import (
    LOWERINGS,
    Call,
    Lowering,
    added_table,
    check_lowering,
    choose,
    describe,
    in_graph,
    keep_rows,
    load_table,
    lower,
    mode,
    recorded_calls,
    share_rows,
)
from lowering.table import (
    Choice,
    Direction,
    Evidence,
    Row,
    gain_elsewhere,
    machine_class,
    read_table,
    write_table,
)

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
    "gain_elsewhere",
    "in_graph",
    "keep_rows",
    "load_table",
    "lower",
    "machine_class",
    "mode",
    "read_table",
    "recorded_calls",
    "share_rows",
    "write_table",
]

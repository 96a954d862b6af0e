"""The rows that apply to an operator on this machine, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchkit import UserError
from lowering import table, tuned
from lowering.table import Direction, Row, Rule, machine_class, rows_of
from lowering.torch_private import constant_under_compile

COMMITTED_ORIGIN, TUNED_ORIGIN = "the committed table", "measured on this machine"

# Rows of rank 0 that all ranks of a process group take, by package of the kernels and device type.
_of_rank_0: dict[tuple[str, str], list[Row]] = {}


def rows_here(operator: str, source: str, device_type: str, added: str = "") -> list[tuple[str, Row]]:
    """The rows for an operator on this machine with their origin; the first origin of which one applies is taken.

    A table that was added by name comes first, then what this machine measured, then the committed table, which holds
    for a class of machines.
    """
    named = rows_of(Path(added), operator, device_type) if added else []
    own = [row for row in _own_rows(source, device_type) if row.operator == operator]
    return [
        *((added, row) for row in named),
        *((TUNED_ORIGIN, row) for row in own),
        *((COMMITTED_ORIGIN, row) for row in rows_of(table.COMMITTED, operator, device_type)),
    ]


@constant_under_compile
def rules(
    operator: str, source: str, device_type: str, dtype: torch.dtype, direction: Direction, added: str, revision: int
) -> tuple[Rule, ...]:
    """What the rows say about an operator here. torch.compile calls this while it traces.

    Args:
        operator: Name of the operator.
        source: See :func:`rows_here`.
        device_type: See :func:`rows_here`.
        dtype: Dtype of its first operand.
        direction: Whether a gradient is recorded.
        added: See :func:`rows_here`.
        revision: Changes with the rows of this machine, so that a compiled function is compiled again.
    """
    name = str(dtype).removeprefix("torch.")
    found = rows_here(operator, source, device_type, added)
    own = [(origin, row) for origin, row in found if row.direction == direction and row.dtype in ("", name)]
    return tuple(row.rule(other for of, other in own if of == origin) for origin, row in own)


def share(sources: Sequence[str], device_type: str) -> None:
    """Let all ranks of the default process group take the rows that rank 0 measured on its machine.

    Ranks that choose differently run different graphs, and a collective inside of one then waits for ever. So in a
    process group a machine's own rows count only after this call, which every rank makes.

    Raises:
        ValueError: If there is no process group.
    """
    if not _in_process_group():
        raise ValueError("share_rows: expected an initialised process group of several ranks, found none")
    rows = [[tuned.read(source, device_type) for source in sources]] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(rows)
    assert rows[0] is not None
    _of_rank_0.update({(source, device_type): own for source, own in zip(sources, rows[0], strict=True)})


def _own_rows(source: str, device_type: str) -> list[Row]:
    if (source, device_type) in _of_rank_0:
        return _of_rank_0[source, device_type]
    if _in_process_group():
        return []
    try:
        return tuned.read(source, device_type)
    except UserError:  # no cache of this user's can be written, so it has none
        return []


def _in_process_group() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def describe(sources: Mapping[str, str], device_type: str, added: str = "") -> str:
    """The rows that apply here and where they come from, as a table for a terminal.

    Args:
        sources: The import package with the kernel of each operator, by the operator's name.
        device_type: Device type of the tensors.
        added: Path of the table that was added.
    """
    from benchkit import numbers  # here, since only this page needs it: the package is imported with every operator
    from benchkit.markdown import markdown_table

    rows = [entry for name, source in sources.items() for entry in rows_here(name, source, device_type, added)]
    heading = f"lowering under torch.compile on {machine_class(device_type)}"
    if not rows:
        return f"{heading}: the formula (no measured row); compile-bench tune measures them here"
    cells = [
        (
            row.operator,
            row.dtype or "any",
            " × ".join(f"{size:,} {name}" for name, size in row.sizes.items()) or "any",
            row.direction,
            row.choice,
            f"{numbers.significant(row.evidence.speedup)}× "
            f"({numbers.significant(row.evidence.low)}–{numbers.significant(row.evidence.high)})",
            row.evidence.target,
            origin,
        )
        for origin, row in rows
    ]
    header = ["operator", "dtype", "measured at", "direction", "taken", "step with the kernel", "target", "from"]
    return f"{heading}; the formula where no row applies\n\n{markdown_table(header, cells, left=5)}"

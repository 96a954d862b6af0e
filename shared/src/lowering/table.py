"""The table of measured choices: rows, the file format, and the rows that apply on this machine.

A row says which lowering made a whole compiled step faster, for one class of machines, operator, dtype, direction and
range of sizes. ``compile-bench tune`` measures rows. The committed table is ``table.json`` beside this module;
:func:`lowering.load_table` adds another one, whose rows have priority; :mod:`lowering.tuned` has this machine's own.

A class of machines is ``sm_XY`` for a GPU of that compute capability, and such as ``cpu-avx512-amd-zen-5`` for a
processor: the vector instructions that torch's own kernels use on it, its vendor, by which MKL chooses the code of
PyTorch's matrix products, and its design, which decides how wide the units behind the instructions are. The number of
cores is part of a row's evidence and not of the class.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchkit import UserError
from benchkit.environment import processor
from benchkit.results import in_turn, write_text_atomically

Choice = Literal["formula", "kernel"]
"""What a row of the table says."""

Direction = Literal["training", "inference"]
"""Whether a call has a backward pass; each has rows of its own."""

COMMITTED = Path(__file__).with_name("table.json")

_VERSION = 1

# What a row means to a compiled call: the bounds of the first size, the other sizes (None: for all sizes), the choice.
Rule = tuple[int, int, tuple[int, ...] | None, Choice]


@dataclass(frozen=True)
class Evidence:
    """The measurement behind a row.

    Attributes:
        target: The model whose step was measured.
        speedup: How many times faster the step is with the kernel than without it: median of the paired rounds. Of
            kernels that were tried together, and only together, it is that of all of them.
        low: Lower end of its bootstrap interval.
        high: Upper end.
        control_low: Lower end of the interval of the unchanged step against itself in another process.
        control_high: Upper end.
        device: Name of the processor or GPU, and the number of threads.
        torch: Version of torch.
        commit: Commit of this repository.
        date: ISO date.
    """

    target: str
    speedup: float
    low: float
    high: float
    control_low: float
    control_high: float
    device: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True)
class Row:
    """One measured choice.

    Attributes:
        machine: Class of machines.
        operator: Name of the operator.
        dtype: Dtype of its first operand, such as ``float32``.
        direction: ``training`` (forward and backward) or ``inference``.
        sizes: Sizes of the measured call by name, such as ``{"rows": 512, "columns": 128}``. The row applies to calls
            whose first size is at least half and at most twice the measured one, and whose other sizes are equal; of
            several rows the nearest. Without sizes it applies to all.
        choice: The lowering that is taken.
        evidence: The measurement.
    """

    machine: str
    operator: str
    dtype: str
    direction: Direction
    sizes: Mapping[str, int]
    choice: Choice
    evidence: Evidence

    def rule(self, beside: Iterable[Row]) -> Rule:
        """The row as a compiled call compares it with its sizes.

        A call between the sizes of this row and of one ``beside`` it takes the nearer row, by their ratios.
        """
        if not self.sizes:
            return 0, 2**62, None, self.choice
        first, *others = self.sizes.values()
        low, high = (first + 1) // 2, 2 * first
        for other, *rest in (tuple(row.sizes.values()) for row in beside if row.sizes):
            if rest == others and other != first:
                middle = math.isqrt(first * other)
                low, high = (max(low, middle + 1), high) if other < first else (low, min(high, middle))
        return low, high, tuple(others), self.choice

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same call has in common with this row."""
        return self.machine, self.operator, self.dtype, self.direction, tuple(self.sizes.items())


def row_from(plain: Mapping[str, Any]) -> Row:
    """A row from the JSON of its fields.

    Raises:
        KeyError, TypeError, ValueError: If a field is missing, unknown, or has a value that no row has.
    """
    row = Row(**{**plain, "evidence": Evidence(**plain["evidence"])})
    if row.choice not in get_args(Choice) or row.direction not in get_args(Direction):
        raise ValueError(f"no row has the choice {row.choice!r} and the direction {row.direction!r}")
    if not isinstance(row.sizes, Mapping) or not all(type(size) is int and size >= 0 for size in row.sizes.values()):
        raise ValueError(f"sizes are whole numbers from 0 on by name, got {row.sizes}")
    figures = (row.evidence.speedup, row.evidence.low, row.evidence.high)
    if not all(isinstance(figure, (int, float)) for figure in figures):
        raise ValueError(f"a speedup and its interval are numbers, got {figures}")
    return row


def machine_class(device_type: str) -> str:
    """The class of this machine, as the table names it.

    Args:
        device_type: Device type of the tensors, such as ``"cpu"``.
    """
    if device_type == "cpu":
        vendor, capability = processor.vendor(), torch.backends.cpu.get_cpu_capability()
        return processor.machine_name("cpu", capability, vendor, processor.design(vendor, processor.family()))
    if device_type == "cuda":
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return device_type


def read_table(path: Path) -> list[Row]:
    """Read the rows of a table.

    Raises:
        UserError: If the file cannot be read or is no such table.
    """
    try:
        document = json.loads(path.read_text())
        version = document["version"]
        if version == _VERSION:
            return [row_from(row) for row in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: expected a table of lowerings that compile-bench tune wrote, got {error!r}; measure it again"
        ) from error
    raise UserError(f"{path}: expected version {_VERSION} of the table of lowerings, got {version}; measure it again")


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a table; they replace earlier rows of the same calls, and all others stay.

    Several processes may do so at once.
    """
    rows = list(rows)
    replaced = {row.key for row in rows}
    with in_turn(path):
        kept = [row for row in read_table(path) if row.key not in replaced] if path.exists() else []
        lines = ",\n".join(json.dumps(asdict(row)) for row in [*kept, *rows])
        write_text_atomically(path, f'{{"version": {_VERSION}, "rows": [\n{lines}\n]}}\n')


def rows_of(path: Path, operator: str, device_type: str) -> list[Row]:
    """The rows of a table for an operator on this class of machines, the newest first."""
    machine = machine_class(device_type)
    return [row for row in reversed(_rows(path, _written(path))) if row.machine == machine and row.operator == operator]


def gain_elsewhere(operator: str, device_type: str) -> float:
    """The largest gain of an operator's kernel that the committed table has for this kind of device, 1 for none.

    It is a hint of what is worth measuring first, and never a choice: other machines measured it.
    """
    kind = "sm_" if device_type == "cuda" else device_type
    committed = _rows(COMMITTED, _written(COMMITTED))
    rows = (row for row in committed if row.operator == operator and row.machine.startswith(kind))
    return max((row.evidence.speedup for row in rows), default=1.0)


@functools.cache
def _rows(path: Path, _written_at: int) -> tuple[Row, ...]:
    return tuple(read_table(path))


def _written(path: Path) -> int:
    """When a table was written, in nanoseconds; 0 for one that is not there."""
    return path.stat().st_mtime_ns if path.exists() else 0

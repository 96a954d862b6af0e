"""bias_gelu on tensors beyond a CPU's last-level cache, with results in memory that is in use.

The measurement has a process of its own, because malloc's settings belong to a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch

from benchkit import Record
from benchkit.processes import Job, Runner
from benchkit.results import Label
from benchkit.timing.freed_memory import keep_freed_memory
from benchkit.timing.plain_copies import plain_copy
from custom_ops.bench.cases import benchmark_cases
from custom_ops.bench.speed import name_of, timed

COPY = "copy"

PRELOAD = ("custom_ops.bench.attention",)  # one fork server for the measurements in child processes

_TENSORS_IN_USE = 10  # what malloc has at the start: as much as the operands and the results of torch's operators need
_LIMIT_SECONDS = 120.0


def speeds(tensor_bytes: int, dtypes: Sequence[torch.dtype], *, columns: int, seconds: float) -> Iterator[Record]:
    """Time bias_gelu forward and backward: records ``beyond the cache``.

    Yields:
        Labels ``op``, ``dtype``, ``count`` and ``form`` (:data:`~.cases.OURS`, ``torch`` or :data:`COPY`, which moves
        the same bytes); values ``time``, ``rate``, ``speedup`` over torch's operators, and ``share``, the speed over
        the copy's. All forms are timed in the same rounds: the bandwidth of a machine can double from one second to
        the next (NOTES.md, 2026-11-25), which a limit of another time would not show.
    """
    call = partial(measured, tensor_bytes, tuple(dtypes), columns, seconds)
    yield from Runner(_LIMIT_SECONDS).run(Job(call, "bias_gelu beyond the last-level cache", PRELOAD))


def measured(tensor_bytes: int, dtypes: Sequence[torch.dtype], columns: int, seconds: float) -> list[Record]:
    """The records; malloc keeps all memory of this process from then on."""
    if not keep_freed_memory():
        raise OSError("malloc refuses to keep freed memory; measure with glibc's malloc")
    torch.ones(_TENSORS_IN_USE * tensor_bytes, dtype=torch.uint8)  # written, and freed at once
    records = []
    for case in (benchmark_cases()[op] for op in ("bias_gelu", "bias_gelu_backward")):
        for dtype in dtypes:
            count = tensor_bytes // dtype.itemsize
            operands = case.operands(count, columns, dtype, "cpu")
            reads: Literal[1, 2] = 1 if case.limit == "1 read 1 write" else 2
            forms = {**case.forms, COPY: plain_copy("cpu", [operands], reads=reads)}
            timings = timed(
                case, forms, "cpu", count, dtype, columns=columns, seconds=seconds, over="torch", share_of=COPY
            )
            labels: dict[str, Label] = {"op": case.op, "dtype": name_of(dtype), "count": count}
            records += [Record("beyond the cache", {**labels, "form": form}, values) for form, _, values in timings]
    return records

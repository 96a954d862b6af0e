"""Measurements beside PyTorch with both limited to AVX2, as on the many machines without AVX-512.

The limit is ``ATEN_CPU_CAPABILITY``, which torch and this package read once a process, so the measurement has its own.
oneDNN, whose products PyTorch takes in bfloat16, does not obey it (``ONEDNN_VERBOSE=1`` prints its choice) and has a
limit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchkit import Record
from benchkit.processes import Job, Runner
from benchkit.results import Absence
from custom_ops.bench.beyond_cache import PRELOAD

_SUFFIX = " by AVX2"
RECORD, LINEAR = f"attention{_SUFFIX}", f"linear{_SUFFIX}"
LIMITED, UNLIMITED = "AVX2", "any"  # label ``onednn``: the instructions that oneDNN may use
_LIMIT_SECONDS = 180.0


def limited(
    speeds: Callable[[], Iterable[Record | Absence]], what: str, *, onednn_too: bool = False
) -> Iterator[Record | Absence]:
    """Time something on a CPU as ``speeds`` does, in a process limited to AVX2; ``what`` names it for an error.

    Yields:
        The records of ``speeds`` (:data:`RECORD`, :data:`LINEAR`), with a label ``onednn`` more: :data:`LIMITED` or
        :data:`UNLIMITED`.
    """
    environment = {"ATEN_CPU_CAPABILITY": "avx2"} | ({"ONEDNN_MAX_CPU_ISA": "AVX2"} if onednn_too else {})
    job = Job(partial(measured, speeds), f"{what}{_SUFFIX}", PRELOAD, environment=environment)
    for record in Runner(_LIMIT_SECONDS).run(job):
        if isinstance(record, Record):
            record = replace(record, labels={**record.labels, "onednn": LIMITED if onednn_too else UNLIMITED})
        yield record


def measured(speeds: Callable[[], Iterable[Record | Absence]]) -> list[Record | Absence]:
    """The records, in a process that torch has limited to AVX2.

    Raises:
        RuntimeError: If it has not.
    """
    if (capability := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise RuntimeError(f"expected torch limited to AVX2 by ATEN_CPU_CAPABILITY, got {capability}")
    return [replace(item, name=item.name + _SUFFIX) if isinstance(item, Record) else item for item in speeds()]

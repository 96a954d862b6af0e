"""Attention beside PyTorch's with both limited to AVX2, as on the many machines without AVX-512.

The limit is ``ATEN_CPU_CAPABILITY``, which torch and this package read once a process, so the measurement has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchkit import Record
from benchkit.processes import Job, Runner
from custom_ops.bench import attention
from custom_ops.bench.beyond_cache import PRELOAD

RECORD = "attention by AVX2"
_LIMIT_SECONDS = 180.0


def speeds(
    lengths: Sequence[int],
    head_sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    tokens: int,
    width: int,
    seconds: float,
) -> Iterator[Record]:
    """Time attention on a CPU: records :data:`RECORD`, otherwise those of :func:`custom_ops.bench.attention.speeds`.

    Args:
        lengths: Tokens per sequence.
        head_sizes: Elements of a head.
        dtypes: Dtypes of the tensors.
        tokens: Tokens of a batch.
        width: heads × head size.
        seconds: Sampling time for each shape and direction.
    """
    call = partial(
        measured, tuple(lengths), tuple(head_sizes), tuple(dtypes), tokens=tokens, width=width, seconds=seconds
    )
    job = Job(call, "attention by AVX2", PRELOAD, environment={"ATEN_CPU_CAPABILITY": "avx2"})
    yield from Runner(_LIMIT_SECONDS).run(job)


def measured(
    lengths: Sequence[int],
    head_sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    *,
    tokens: int,
    width: int,
    seconds: float,
) -> list[Record]:
    """The records, in a process that torch has limited to AVX2.

    Raises:
        RuntimeError: If it has not.
    """
    if (capability := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise RuntimeError(f"expected torch limited to AVX2 by ATEN_CPU_CAPABILITY, got {capability}")
    found = attention.speeds("cpu", lengths, head_sizes, dtypes, tokens=tokens, width=width, seconds=seconds)
    return [replace(record, name=RECORD) for record in found]

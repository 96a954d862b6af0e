"""The memory of attention on a CPU, whose allocator keeps no statistics: the growth of a process of its own."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial

import torch

from benchkit import Quantity, Record
from benchkit.processes import Job, Runner
from custom_ops.bench.attention import FUSED_TORCH, Shape, fused, ours
from custom_ops.bench.beyond_cache import PRELOAD
from custom_ops.bench.cases import OURS

FORMS = (OURS, FUSED_TORCH)
_WARM_LENGTH = 64  # starts the threads and loads the libraries, whose memory is not attention's
_LIMIT_SECONDS = 60.0


def peak(form: str, length: int, *, head_size: int, width: int) -> Iterator[Record]:
    """Measure attention in float32 without a mask, in one of :data:`FORMS`: a record ``attention resident memory``.

    Yields:
        Labels ``length`` and ``form``; values ``operand`` (bytes of q), ``forward`` and ``peak``: by how much the
        process's largest resident set (``ru_maxrss``) grew over the forward pass, and over both passes, without q, k, v
        and the output's gradient.
    """
    shape = Shape(1, max(width // head_size, 1), length, head_size, causal=False)
    job = Job(partial(growth, form, shape), f"attention's memory ({form}, {length} tokens)", PRELOAD)
    forward, peak = Runner(_LIMIT_SECONDS).run(job)
    values = {"operand": width * length * torch.float32.itemsize, "forward": forward, "peak": peak}
    yield Record(
        "attention resident memory",
        {"form": form, "length": length},
        {name: Quantity(size, "B") for name, size in values.items()},
    )


def growth(form: str, shape: Shape) -> tuple[int, int]:
    """Bytes by which a forward pass, and a forward and a backward pass, raise this process's largest resident set."""
    _pass(form, Shape(1, shape.heads, _WARM_LENGTH, shape.head_size, causal=False))
    return _pass(form, shape)


def _pass(form: str, shape: Shape) -> tuple[int, int]:
    *operands, grad = shape.operands(torch.float32, "cpu", number=4)
    torchs = next(iter(fused([x[:, :, :_WARM_LENGTH] for x in operands], causal=False).values()))
    attend = partial(ours, causal=False) if form == OURS else torchs
    leaves = [x.requires_grad_() for x in operands]
    before = _largest()
    out = attend(*leaves)
    forward = _largest() - before
    torch.autograd.grad(out, leaves, grad)
    return forward, _largest() - before


def _largest() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB

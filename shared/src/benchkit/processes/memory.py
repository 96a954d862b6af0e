"""The memory that a measurement may take: what is free, whether it fits, and which of its sizes do.

A measurement states what it needs, or its first run shows it. What is free is asked for each time, since other
programs, and the processes of a run that are still alive, take their part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from benchkit.device import Device
from benchkit.errors import UserError
from benchkit.processes.resources import available_memory

# Bytes of the device that a run leaves to other programs, in this process and in those that it starts.
LEFT_TO_OTHERS = "BENCHKIT_MEMORY_LEFT"

# A size that a measurement can have.
Size = TypeVar("Size")


class DoesNotFit(UserError):
    """A measurement needs more memory than is free."""


def free(device: Device) -> int:
    """Return the bytes that this process, or one that it starts, can take now.

    On a CPU it is the least of what the machine, control groups and limits leave. On a GPU it is what the driver has
    and what torch keeps unused, and at most what ``torch.cuda.set_per_process_memory_fraction`` leaves this process.

    Raises:
        UserError: If the environment names no number of bytes to leave to others.
    """
    available = available_memory() if device == "cpu" else _free_on_gpu()
    left = os.environ.get(LEFT_TO_OTHERS, "0")
    if not left.isdecimal():
        raise UserError(f"{LEFT_TO_OTHERS}: expected a number of bytes, got {left!r}")
    return max(0, available - int(left))


def _free_on_gpu() -> int:
    import torch

    available, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    unused = reserved - torch.cuda.memory_allocated()
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total)
    return min(available, allowed - reserved) + unused


def require(needs: float, device: Device) -> None:
    """Raise where a measurement does not fit.

    Raises:
        DoesNotFit: If fewer are free.
    """
    if needs > (available := free(device)):
        raise DoesNotFit(lack(needs, available))


def lack(needs: float, available: float) -> str:
    """Say that memory does not suffice, as a clause: ``it needs 34.0 GiB, 16.0 GiB are free``."""
    return f"it needs {gib(needs)}, {gib(available)} are free"


def gib(size: float) -> str:
    """A size of memory as people know it, with three digits."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**27 else f"{size / 2**20:.3g} MiB"


def largest_that_fits(sizes: Iterable[Size], needs: Callable[[Size], float], available: float) -> Size:
    """Return the first size whose needs are met; the last where none fits, whose measurement then says what it lacks.

    Args:
        sizes: Sizes, the wanted one first; at least one.
        needs: Bytes that a measurement of a size takes at most.
        available: Bytes that are free.
    """
    size = None
    for size in sizes:
        if needs(size) <= available:
            break
    assert size is not None
    return size


def halved(size: int, least: int = 1) -> Iterable[int]:
    """Yield a size, its half, and so on, down to the least."""
    while size > least:
        yield size
        size = max(size // 2, least)
    yield size

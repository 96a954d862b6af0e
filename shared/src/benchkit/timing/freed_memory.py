"""Freed memory on a CPU that stays in the process, for the next result."""

from __future__ import annotations

import ctypes

# (option, value) of glibc's malloc.h: M_MMAP_MAX and M_TRIM_THRESHOLD. No block is mapped on its own or given back.
_OPTIONS = ((-4, 0), (-1, -1))


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory for as long as the process lives, as PyTorch's allocator does on a GPU.

    By default, malloc maps a result of more than 32 MiB anew at each call, and returns pages when too many are free at
    the end of the heap. Linux then clears them page by page, which takes longer than a memory-bound operator.

    Returns:
        False for another malloc, which has no such settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) for option, value in _OPTIONS)

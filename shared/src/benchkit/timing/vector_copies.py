"""Copies on a CPU by the widest vectors, with streaming or ordinary stores.

An ordinary store first reads the line that it writes into the cache (write-allocate), so that a copy of N bytes moves
3 N over the bus. A streaming store does not: the same copy moves 2 N, and what it wrote is in no cache afterwards.
PyTorch has no operator with streaming stores, and its 16-bit sum of two tensors takes longer than their memory traffic,
so the machine's C compiler makes these; it takes less than a second.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

# The exclusive or costs nothing beside the memory and is right for the bits of every dtype. The widest vectors: with 16
# bytes a store the copy was no faster than with ordinary stores, with 64 bytes 1.4 times (EPYC, 2 cores, 2026-11-24).
_SOURCE = """
#include <immintrin.h>
#include <stddef.h>

#if defined(__AVX512F__)
typedef __m512i vector;
#define LOAD _mm512_load_si512
#define STREAM _mm512_stream_si512
#define XOR _mm512_xor_si512
#elif defined(__AVX2__)
typedef __m256i vector;
#define LOAD _mm256_load_si256
#define STREAM _mm256_stream_si256
#define XOR _mm256_xor_si256
#else
typedef __m128i vector;
#define LOAD _mm_load_si128
#define STREAM _mm_stream_si128
#define XOR _mm_xor_si128
#endif

#define STORE(to, value) (*(to) = (value))

#define FUNCTIONS(name, WRITE)                                                                          \\
  void copy_##name(const vector *x, vector *out, size_t bytes, int threads) {                           \\
    _Pragma("omp parallel for schedule(static) num_threads(threads)")                                   \\
    for (size_t i = 0; i < bytes / sizeof(vector); ++i) WRITE(out + i, LOAD(x + i));                    \\
  }                                                                                                     \\
  void combine_##name(const vector *x, const vector *y, vector *out, size_t bytes, int threads) {       \\
    _Pragma("omp parallel for schedule(static) num_threads(threads)")                                   \\
    for (size_t i = 0; i < bytes / sizeof(vector); ++i) WRITE(out + i, XOR(LOAD(x + i), LOAD(y + i)));  \\
  }
FUNCTIONS(streaming, STREAM)
FUNCTIONS(ordinary, STORE)
"""
_LINE = 64  # bytes


Stores = Literal["streaming", "ordinary"]


class VectorCopies(NamedTuple):
    """A copy, and the combination of two tensors, on as many threads as torch uses for an operator.

    Both take contiguous tensors of one size on the CPU, whose bytes are a multiple of 64, and return the last, ``out``.

    Attributes:
        copy: Called as ``copy(x, out)``: one read and one write.
        combine: Called as ``combine(x, y, out)``: the exclusive or of the bits, two reads and one write.
    """

    copy: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]


def vector_copies(stores: Stores) -> VectorCopies | None:
    """The functions with one kind of stores; None without a C compiler with OpenMP, or on a CPU that is not x86-64."""
    if (library := _compiled()) is None:
        return None
    return VectorCopies(*(partial(_run, library[f"{name}_{stores}"]) for name in VectorCopies._fields))


def _run(function: Callable[..., None], *tensors: torch.Tensor) -> torch.Tensor:
    import torch

    size = tensors[0].nbytes
    if size % _LINE or any(tensor.data_ptr() % _LINE for tensor in tensors):
        raise ValueError(f"expected aligned tensors of a multiple of {_LINE} bytes, got {size} bytes")
    function(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), ctypes.c_size_t(size), torch.get_num_threads()
    )
    return tensors[-1]


@cache
def _compiled() -> ctypes.CDLL | None:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "copies.c"), Path(folder, "copies.so")
        source.write_text(_SOURCE)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [*compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError):
            return None

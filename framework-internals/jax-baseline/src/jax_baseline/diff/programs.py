"""A compiled function in the form that both compilers share: a list of kernel launches and the tensors they write.

:mod:`jax_baseline.diff.xla.program` and :mod:`jax_baseline.diff.inductor.program` produce this form, and
:mod:`jax_baseline.diff.region_diff` compares two of them without knowledge of the compilers. The module holds plain
data and imports neither jax nor torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

Scopes = tuple[str, ...]

_SIGNED_SUMS = 256


@dataclass(frozen=True)
class Tensor:
    """A tensor that a kernel writes to memory."""

    name: str
    dtype: str  # NumPy's name of the dtype: ``float32``, ``bfloat16``, ``int32``
    shape: tuple[int, ...]
    bytes: int
    # Sums that do not depend on the order of the elements, see :func:`jax_baseline.diff.alignment.same_values`. None if
    # they were not computed.
    moments: tuple[float, ...] | None = None
    # Signed sums that do depend on the order, see :func:`sketch`. None if they were not computed.
    sketch: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Rounding:
    """Results of a function without and with rounding noise, from :func:`jax_baseline.diff.runs.measure`."""

    # In the dtype of the inputs: the results without noise, then those of each run with noise.
    native: tuple[tuple[Tensor, ...], ...] = ()
    wide: tuple[tuple[Tensor, ...], ...] = ()  # the same in float64. Empty if that was not run
    # The same in float64 on other inputs, by what they are.
    others: Mapping[str, tuple[tuple[Tensor, ...], ...]] = field(default_factory=dict)
    missing: str = ""  # what the function raised in float64; empty if it ran
    # The results of a second run in float64 without noise, which differ only if the function is random.
    repeated: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel launch or library call."""

    name: str
    kind: str  # the compiler's name for the kind of kernel. For a library call, the library's name
    # matmul, attention, reduction, element-wise, data movement, gather/scatter, collective or library call.
    category: str
    ops: Mapping[str, int]
    phase: str
    label: Scopes  # scopes of the operation that does most of the work
    labels: tuple[Scopes, ...]  # scopes of all operations inside
    location: str
    calls: int  # number of launches in one run of the program. It is above 1 inside a loop
    bytes_read: int
    bytes_written: int
    flops: int | None  # floating-point operations in one run of the program. None if they are not counted
    seconds: float | None  # time in one run of the program. None if it was not measured
    source: str
    writes: tuple[Tensor, ...]
    # The part of the model that it is assigned to: the label that both programs have, with numbered blocks merged.
    # Empty if it is not assigned.
    part: Scopes = ()
    parts: tuple[Scopes, ...] = ()  # the parts of all operations inside
    by: str = "nothing"  # ``label``, ``value`` or ``nothing``: how the part was found

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Program:
    """A compiled function."""

    compiler: str
    launches: tuple[KernelLaunch, ...]
    seconds: float | None  # median time of one run. None if it was not measured
    compile_seconds: float
    # The results of the function, reduced to moments and sketches. They show whether two programs compute the same.
    values: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = ()
    rounding: Rounding = field(default_factory=Rounding)
    precision: str = "highest"  # the framework's name of the precision in which float32 matrices are multiplied

    def with_values(self, moments: Mapping[str, Sequence[float] | None]) -> Program:
        """Return the same program with the moments of its tensors.

        A tensor without an entry has none.
        """

        def with_moments(tensor: Tensor) -> Tensor:
            sums = moments.get(tensor.name)
            return replace(tensor, moments=None if sums is None else tuple(sums))

        launches = (replace(launch, writes=tuple(map(with_moments, launch.writes))) for launch in self.launches)
        return replace(self, launches=tuple(launches))

    @property
    def has_values(self) -> bool:
        """Whether any tensor has moments."""
        return any(tensor.moments for launch in self.launches for tensor in launch.writes)


def sketch(array: NDArray) -> tuple[float, ...]:
    """Return Σ|x|², 256 sums Σ ±x, each over a share of the elements, and a hash of where which are not finite.

    Signs and shares are random, and the same for all arrays of one size. The sum of (Σ ±(x − y))² over the shares then
    has the mean Σ (x − y)² and a standard deviation of at most √(2/256), 9 %, of it (Thorup and Zhang, "Tabulation
    based 4-universal hashing with applications to second moment estimation", 2004). Two processes can thus estimate the
    distance of two arrays, element by element, from their sketches. The sketch depends on the order of the elements.
    Complex numbers count as their real and imaginary parts. What is not finite is in the hash alone, which is 0 if all
    are finite; where none is, the sums are not finite either.
    """
    flat = np.ascontiguousarray(array).ravel()
    parts = (flat.real, flat.imag) if np.iscomplexobj(flat) else (flat,)
    wide = np.concatenate([part.astype(np.float64) for part in parts])
    finite, places = np.isfinite(wide), 0
    if not finite.all() and finite.any():
        places = zlib.crc32((np.isnan(wide) + 2 * np.isposinf(wide) + 3 * np.isneginf(wide)).astype(np.int8).tobytes())
        wide = np.where(finite, wide, 0)
    generator = np.random.Generator(np.random.PCG64(0))
    positive = generator.integers(0, 2, wide.size, dtype=np.bool_)
    few = wide.size <= _SIGNED_SUMS  # each element is then a share, and the distance is exact
    shares = np.arange(wide.size) if few else generator.integers(0, _SIGNED_SUMS, wide.size, dtype=np.uint8)
    with np.errstate(all="ignore"):  # infinities that cancel give NaN, which the comparison reports
        sums = np.bincount(shares, np.where(positive, wide, -wide), _SIGNED_SUMS)
        return (float(np.square(wide).sum()), *sums.tolist(), float(places))


def short_location(file: str, line: int | str) -> str:
    """Return a source line without the folders of this machine: ``gpt/model.py:77``."""
    return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"

"""What any compiler makes of a function, in one form: a sequence of kernels, and the tensors they leave in memory.

Both compilers are read into this form (:mod:`jax_baseline.diff.xla_program`,
:mod:`jax_baseline.diff.inductor_program`), and :mod:`jax_baseline.diff.region_diff` compares two of them without
knowing which made which. Plain data: neither jax nor torch is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

Scopes = tuple[str, ...]

_SIGNED_SUMS = 256


@dataclass(frozen=True)
class Tensor:
    """A tensor that a kernel leaves in memory.

    Attributes:
        name: of the buffer or instruction.
        dtype: ``float32``, ``bfloat16``, ``int32``, …
        shape: sizes.
        bytes: it takes.
        moments: sums that no permutation changes (see :func:`jax_baseline.diff.alignment.same_values`); None if not
            taken.
        sketch: of a result that the other side lays out alike, see :func:`sketch`; None if not taken.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    moments: tuple[float, ...] | None = None
    sketch: tuple[float, ...] | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Step:
    """One kernel, or one call of a library, in the order in which the program runs them.

    Attributes:
        name: unique in the program.
        kind: what the compiler calls it; a library call by the library's name.
        category: product, attention, reduction, element-wise, data movement, gather/scatter, collective, library call.
        ops: operations inside by name, most frequent first.
        phase: forward, backward or other.
        label: scopes of the operation that does most of its work.
        labels: of all operations inside.
        place: line of the user's source, ``model.py:77``; empty if unknown.
        calls: how often it runs.
        bytes_read: in one run of the program.
        bytes_written: likewise.
        flops: likewise; None where the compiler's side does not count them.
        seconds: likewise; None if not measured.
        source: what the compiler wrote.
        writes: tensors it leaves in memory.
    """

    name: str
    kind: str
    category: str
    ops: Mapping[str, int]
    phase: str
    label: Scopes
    labels: tuple[Scopes, ...]
    place: str
    calls: int
    bytes_read: int
    bytes_written: int
    flops: int | None
    seconds: float | None
    source: str
    writes: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Program:
    """A compiled function.

    Attributes:
        compiler: ``XLA`` or ``Inductor``.
        steps: its kernels, in order.
        seconds: one run of the whole takes, median; None if not measured.
        compile_seconds: the compiler took.
        values: what the function returned, reduced to moments, so that two sides can be seen to compute the same.
        notes: what could not be observed, and why.
    """

    compiler: str
    steps: tuple[Step, ...]
    seconds: float | None
    compile_seconds: float
    values: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return asdict(self)

    def with_values(self, moments: Mapping[str, Sequence[float] | None]) -> Program:
        """The same with the moments of tensors, by their names."""

        def take(tensor: Tensor) -> Tensor:
            found = moments.get(tensor.name)
            return replace(tensor, moments=None if found is None else tuple(found))

        steps = (replace(step, writes=tuple(take(tensor) for tensor in step.writes)) for step in self.steps)
        return replace(self, steps=tuple(steps))

    @property
    def has_values(self) -> bool:
        """Whether the moments of its tensors were taken."""
        return any(tensor.moments for step in self.steps for tensor in step.writes)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Program:
        """The inverse of :meth:`as_plain`, after a passage through JSON."""
        return cls(
            plain["compiler"],
            tuple(_step(step) for step in plain["steps"]),
            plain["seconds"],
            plain["compile_seconds"],
            tuple(_tensor(value) for value in plain["values"]),
            tuple(plain["notes"]),
        )


def sketch(array: NDArray) -> tuple[float, ...]:
    """Return Σ|x|² and 256 sums Σ ±x, each over a share of the elements; signs and shares are drawn once for each size.

    With random signs the sum of (Σ ±(x − y))² over the shares has the mean Σ (x − y)², and with random shares its
    standard deviation is at most √(2/256), 9 %, of that (Thorup and Zhang, "Tabulation based 4-universal hashing with
    applications to second moment estimation", 2004): from the sketches of two arrays, made in two processes, follows
    how far apart they are element by element. Any other order of the elements is another array.

    Args:
        array: of numbers or booleans, complex ones as their real and imaginary parts.
    """
    flat = np.ascontiguousarray(array).ravel()
    parts = (flat.real, flat.imag) if np.iscomplexobj(flat) else (flat,)
    wide = np.concatenate([part.astype(np.float64) for part in parts])
    generator = np.random.Generator(np.random.PCG64(0))
    positive = generator.integers(0, 2, wide.size, dtype=np.bool_)
    few = wide.size <= _SIGNED_SUMS  # each then is its own share, and the distance exact
    shares = np.arange(wide.size) if few else generator.integers(0, _SIGNED_SUMS, wide.size, dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # of infinities that cancel: not a number, which tells enough
        sums = np.bincount(shares, np.where(positive, wide, -wide), _SIGNED_SUMS)
        return (float(np.square(wide).sum()), *sums.tolist())


def star_blocks(scopes: Sequence[str]) -> Scopes:
    """Take numbered scopes together: ("block3", "mlp") → ("block*", "mlp")."""
    return tuple(re.sub(r"^([A-Za-z_.]*[A-Za-z_.])\d+$", r"\1*", scope) for scope in scopes)


def short_place(file: str, line: int | str) -> str:
    """A line of source without the folders of this machine: ``gpt/model.py:77``."""
    return f"{'/'.join(PurePath(file).parts[-2:])}:{line}"


def _tensor(plain: Mapping[str, Any]) -> Tensor:
    sums = {key: None if plain[key] is None else tuple(plain[key]) for key in ("moments", "sketch")}
    return Tensor(**{**plain, "shape": tuple(plain["shape"]), **sums})


def _step(plain: Mapping[str, Any]) -> Step:
    return Step(
        **{
            **plain,
            "label": tuple(plain["label"]),
            "labels": tuple(tuple(label) for label in plain["labels"]),
            "writes": tuple(_tensor(tensor) for tensor in plain["writes"]),
        }
    )

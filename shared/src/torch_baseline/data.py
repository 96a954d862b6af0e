"""The training text as bytes, and the order of its batches.

Everything is NumPy, so that a training loop in another framework sees the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchkit import UserError

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]

TRAIN_FRACTION = 0.9

# First 16 hexadecimal digits of the SHA-256 of the built-in text, by CPython version. Every patch release has its own
# version of the documentation in pydoc_data.
PINNED_TEXT = {
    "3.11.2": "fb4334883057993f",
    "3.11.7": "71f2ff5d99bdc1f9",
    "3.12.1": "3ae592730a57a414",
    "3.13.0": "f62af24000df7356",
}


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, split into a training part and a validation part.

    Attributes:
        name: Where the text comes from, for logs and metadata.
        train: The first 90 % of the bytes.
        validation: The other bytes.
        sha256: SHA-256 of the whole text, hexadecimal.
        note: One line if :data:`PINNED_TEXT` does not list the built-in text, whose results then compare with few
            others; empty otherwise.
    """

    name: str
    train: Bytes
    validation: Bytes
    sha256: str
    note: str = ""


def load_corpus(path: Path | None = None) -> Corpus:
    """Read a file, or the English documentation that is part of every CPython (``pydoc_data.topics``).

    Args:
        path: Any file, read as bytes; None for the built-in text, whose topics are joined in sorted order.

    Returns:
        The corpus. An unknown built-in text is accepted, and ``note`` says so.

    Raises:
        UserError: If the file cannot be read or is empty.
    """
    if path is None:
        version = platform.python_version()
        raw = _builtin_text()
        digest = hashlib.sha256(raw).hexdigest()
        note = _pin_note(version, digest)
        return _split(f"pydoc_data.topics of Python {version}", raw, digest, note)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the data file {path}: {error.strerror}") from error
    if not raw:
        raise UserError(f"the data file {path} is empty; training needs text")
    return _split(path.name, raw, hashlib.sha256(raw).hexdigest())


def require_length(corpus: Corpus, block_size: int) -> None:
    """Check that both parts of a corpus are long enough for a sequence and its target.

    Raises:
        UserError: If one is too short; the message says which size is enough.
    """
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest < block_size + 1:
        total = len(corpus.train) + len(corpus.validation)
        needed = next(size for size in itertools.count(block_size) if size - _cut(size) > block_size)
        raise UserError(
            f"{corpus.name} is too short: {total} bytes, but sequences of {block_size} need at least {needed} "
            f"(a tenth is for validation); use a longer text"
        )


def batch(data: Bytes, seed: int, step: int, batch_size: int, block_size: int) -> tuple[Tokens, Tokens]:
    """Draw the batch of one step, as a pure function of the arguments.

    The counter-based generator Philox starts at (seed, step), so the batch of a step does not depend on earlier ones.

    Args:
        data: At least ``block_size + 1`` bytes.
        seed: Seed of the run.
        step: The step, counted from 0.
        batch_size: Number of sequences.
        block_size: Tokens per sequence.

    Returns:
        Inputs and targets, both (batch_size, block_size). The targets are the inputs shifted by one byte.

    Raises:
        ValueError: If the data is too short.
    """
    if len(data) < block_size + 1:
        raise ValueError(f"a sequence of {block_size} and its target need {block_size + 1} bytes, got {len(data)}")
    # Drawing advances the lowest of the counter's four 64-bit words. The step is in the second word, so that the
    # numbers of different steps never overlap.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=step << 64))
    starts = generator.integers(0, len(data) - block_size, size=batch_size)
    return _windows(data, starts, block_size)


def validation_batches(data: Bytes, batch_size: int, block_size: int, limit: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Cut data into consecutive sequences without overlap, always in the same way.

    Every batch is full, because a compiled model would recompile for a smaller last one. Sequences that do not fill a
    batch are dropped. Data too short for one batch give one batch of evenly spaced sequences that overlap.

    Args:
        data: At least ``block_size + 1`` bytes.
        batch_size: Sequences per batch.
        block_size: Tokens per sequence.
        limit: Largest number of batches.

    Yields:
        Inputs and targets, see :func:`batch`.
    """
    starts = np.arange(0, len(data) - block_size, block_size)
    if len(starts) < batch_size:
        starts = np.linspace(0, len(data) - block_size - 1, batch_size).astype(np.int64)
    for index in range(min(limit, len(starts) // batch_size)):
        yield _windows(data, starts[index * batch_size : (index + 1) * batch_size], block_size)


def unigram_entropy_bits(data: Bytes) -> float:
    """Return the entropy of the byte frequencies, Σ −p log₂ p, in bits per byte.

    No predictor that ignores context has a lower loss on this data. A model with a lower loss has learned from context.
    """
    counts = np.bincount(data, minlength=256)
    p = counts[counts > 0] / len(data)
    return float((p * -np.log2(p)).sum()) + 0.0  # -0.0 of one repeated byte


def _builtin_text() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _pin_note(version: str, digest: str) -> str:
    expected = PINNED_TEXT.get(version)
    if expected is None:
        return f"the hash of the text of Python {version} is not listed; it is {digest[:16]}…"
    if not digest.startswith(expected):
        return f"the text of Python {version} should have the hash {expected}…, this one has {digest[:16]}…"
    return ""


def _split(name: str, raw: bytes, digest: str, note: str = "") -> Corpus:
    everything = np.frombuffer(raw, dtype=np.uint8)
    cut = _cut(len(everything))
    return Corpus(name, everything[:cut], everything[cut:], digest, note)


def _cut(size: int) -> int:
    """The bytes of a text of this size that are trained on."""
    return int(size * TRAIN_FRACTION)


def _windows(data: Bytes, starts: NDArray[np.int64], block_size: int) -> tuple[Tokens, Tokens]:
    tokens = data[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]

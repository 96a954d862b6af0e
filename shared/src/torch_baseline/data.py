"""Bytes to learn from, and the order they are learned in.

Everything here is NumPy, so that a loop in another framework sees the same bytes in the same order.
"""

from __future__ import annotations

import hashlib
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

# First 16 hexadecimal digits of the SHA-256 of the built-in text, by CPython version: the documentation that
# pydoc_data carries is regenerated for every patch release.
PINNED_TEXT = {
    "3.11.2": "fb4334883057993f",
    "3.11.7": "71f2ff5d99bdc1f9",
    "3.12.1": "3ae592730a57a414",
    "3.13.0": "f62af24000df7356",
}


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, split into what is trained on and what is held out.

    Attributes:
        name: where it comes from, for logs and metadata.
        train: the first 90 % of the bytes.
        validation: the rest.
        sha256: of the whole, hexadecimal.
        note: one line if the built-in text is not one whose hash is written down in :data:`PINNED_TEXT`, so that
            results from it are comparable with few others; empty otherwise.
    """

    name: str
    train: Bytes
    validation: Bytes
    sha256: str
    note: str = ""


def load_corpus(path: Path | None = None) -> Corpus:
    """Read a file, or the English reference text that every CPython carries (``pydoc_data.topics``).

    Args:
        path: any file, read as bytes; None for the built-in text, topics joined in sorted order.

    Returns:
        The corpus. A built-in text that is not known is accepted, and its ``note`` says so.

    Raises:
        UserError: if the file cannot be read or is empty.
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
    """Check that both parts of a corpus hold a sequence and its target.

    Raises:
        UserError: if not, with the size that would do.
    """
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest < block_size + 1:
        total = len(corpus.train) + len(corpus.validation)
        needed = int((block_size + 2) / (1 - TRAIN_FRACTION)) + 1
        raise UserError(
            f"{corpus.name} is too short: {total} bytes, but sequences of {block_size} need at least {needed} "
            f"(a tenth is held out); use a longer text or a smaller block size"
        )


def batch(data: Bytes, seed: int, step: int, batch_size: int, block_size: int) -> tuple[Tokens, Tokens]:
    """Draw the batch of one step: a pure function of its arguments.

    The counter-based generator Philox starts at (seed, step), so any step's batch can be had without the ones before.

    Args:
        data: bytes, at least ``block_size + 1`` of them.
        seed: of the run.
        step: counted from 0.
        batch_size: sequences.
        block_size: tokens of a sequence.

    Returns:
        Inputs and targets, both (batch_size, block_size); the targets are the inputs moved on by one byte.

    Raises:
        ValueError: if the data is too short.
    """
    if len(data) < block_size + 1:
        raise ValueError(f"a sequence of {block_size} and its target need {block_size + 1} bytes, got {len(data)}")
    # Drawing advances the lowest of the counter's four 64-bit words: the step in the second keeps steps apart.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=step << 64))
    starts = generator.integers(0, len(data) - block_size, size=batch_size)
    return _windows(data, starts, block_size)


def validation_batches(data: Bytes, batch_size: int, block_size: int, limit: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Cut data into consecutive sequences without overlap, the same every time.

    Every batch is full (a compiled model would recompile for a smaller last one): sequences that do not fill a batch
    are left out. Data too short for one batch gives one, of evenly spaced sequences that overlap.

    Args:
        data: bytes, at least ``block_size + 1`` of them.
        batch_size: sequences of a batch.
        block_size: tokens of a sequence.
        limit: the most batches.

    Yields:
        Inputs and targets as from :func:`batch`.
    """
    starts = np.arange(0, len(data) - block_size, block_size)
    if len(starts) < batch_size:
        starts = np.linspace(0, len(data) - block_size - 1, batch_size).astype(np.int64)
    for index in range(min(limit, len(starts) // batch_size)):
        yield _windows(data, starts[index * batch_size : (index + 1) * batch_size], block_size)


def unigram_entropy_bits(data: Bytes) -> float:
    """Return the entropy of the byte frequencies, Σ −p log₂ p, in bits per byte.

    No predictor that ignores context does better on this data; a model that is below has learned something about order.
    """
    counts = np.bincount(data, minlength=256)
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log2(p)).sum())


def _builtin_text() -> bytes:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def _pin_note(version: str, digest: str) -> str:
    expected = PINNED_TEXT.get(version)
    if expected is None:
        return f"the text of Python {version} has no hash written down; it is {digest[:16]}…"
    if not digest.startswith(expected):
        return f"the text of Python {version} is known as {expected}…, this one is {digest[:16]}…"
    return ""


def _split(name: str, raw: bytes, digest: str, note: str = "") -> Corpus:
    everything = np.frombuffer(raw, dtype=np.uint8)
    cut = int(len(everything) * TRAIN_FRACTION)
    return Corpus(name, everything[:cut], everything[cut:], digest, note)


def _windows(data: Bytes, starts: NDArray[np.int64], block_size: int) -> tuple[Tokens, Tokens]:
    tokens = data[starts[:, None] + np.arange(block_size + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]

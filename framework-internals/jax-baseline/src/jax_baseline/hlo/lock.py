"""A fusion lock records the fusions of a program in a file, so that a test fails when they change.

The lock has the number of kernels for each region, phase, kind and list of operations. Names, layouts, tile sizes and
order may change. The shapes that the kernels write are recorded to show them: other shapes alone are no drift.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax_baseline.hlo.kernels import join_ops, kernels
from jax_baseline.hlo.summary import region_of, star_blocks
from jax_baseline.hlo.text import parse

FORMAT = 2  # format 1 counted the functions of reductions as operations

Signature = tuple[str, str, str, str]  # region, phase, kind, operations


@dataclass(frozen=True)
class Lock:
    """The fusions of a program."""

    subject: str  # description of the program
    versions: Mapping[str, str]  # versions of the compiler: ``{"jax": "0.10.2", "backend": "cpu"}``
    kernels: Mapping[Signature, int]  # number of kernels by signature
    donated: int  # number of arguments whose memory an output reuses
    # What the kernels of a signature write, each different shape once. A lock of an older version has none.
    shapes: Mapping[Signature, tuple[str, ...]] = field(default_factory=dict)

    def dump(self) -> str:
        """Return the text of the file, with one line for each signature so that diffs are readable."""
        rows = [
            json.dumps([*signature, count, *self.shapes.get(signature, ())], ensure_ascii=False)
            for signature, count in sorted(self.kernels.items())
        ]
        head = {"format": FORMAT, "subject": self.subject, "versions": dict(self.versions), "donated": self.donated}
        lines = ",\n  ".join(rows)
        return json.dumps(head, ensure_ascii=False)[:-1] + f',\n "kernels": [\n  {lines}\n ]}}\n'


@dataclass(frozen=True)
class Drift:
    """The difference between the lock in a file and that of a program. It is false if there is none."""

    then: Lock
    now: Lock

    def __bool__(self) -> bool:
        return self.then.kernels != self.now.kernels or self.then.donated != self.now.donated

    @property
    def removed(self) -> Counter[Signature]:
        """Number of kernels that the program has fewer of than the lock."""
        return Counter(self.then.kernels) - Counter(self.now.kernels)

    @property
    def added(self) -> Counter[Signature]:
        """Number of kernels that the program has more of than the lock."""
        return Counter(self.now.kernels) - Counter(self.then.kernels)

    def reshaped(self) -> list[str]:
        """Return one line for each signature that is in both and whose kernels write other shapes."""
        then, now = self.then.shapes, self.now.shapes
        return [
            f"{region or '(no scope)'}, {phase}: {kind} [{ops}] writes {', '.join(now[signature])}, "
            f"in the lock {', '.join(then[signature])}"
            for signature in sorted(then.keys() & now.keys())
            if then[signature] != now[signature]
            for region, phase, kind, ops in [signature]
        ]

    def lines(self) -> list[str]:
        """Return one line for each difference, in the order of the regions."""
        differences = []
        for sign, signatures, lock in (("−", self.removed, self.then), ("+", self.added, self.now)):
            for (region, phase, kind, ops), count in sorted(signatures.items()):
                shapes = lock.shapes.get((region, phase, kind, ops))
                written = f" → {', '.join(shapes)}" if shapes else ""
                differences.append((region, phase, f"{sign} {count} × {kind} [{ops}]{written}"))
        differences.sort(key=lambda item: item[:2])
        lines = [f"{region or '(no scope)'}, {phase}: {text}" for region, phase, text in differences]
        if self.then.donated != self.now.donated:
            lines.append(f"donated arguments: {self.then.donated} in the lock, {self.now.donated} now")
        for name in sorted(self.then.versions.keys() | self.now.versions.keys()):
            then, now = (lock.versions.get(name, "none") for lock in (self.then, self.now))
            if then != now:
                lines.append(f"{name}: {then} in the lock, {now} now")
        return lines


def make_lock(text: str, *, subject: str, versions: Mapping[str, str]) -> Lock:
    """Create the lock of an optimised module.

    Raises:
        ValueError: If the text is not an HLO module.
    """
    module = parse(text)
    signatures: Counter[Signature] = Counter()
    shapes: dict[Signature, dict[str, None]] = {}
    for kernel in kernels(module):
        signature = (
            region_of(star_blocks(kernel.label.scopes)),
            kernel.phase,
            kernel.description,
            join_ops(dict(sorted(kernel.ops.items()))),
        )
        signatures[signature] += 1
        shapes.setdefault(signature, {}).update(dict.fromkeys(str(shape) for _, shape in kernel.writes))
    written = {signature: tuple(sorted(different)) for signature, different in shapes.items()}
    return Lock(subject, dict(versions), dict(signatures), len(module.donated), written)


def read_lock(text: str) -> Lock:
    """Read the text of a lock file.

    Raises:
        ValueError: If it is not a lock file, or has another format.
    """
    try:
        plain: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a fusion lock (JSON), got {text[:40]!r}… ({error})") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        given = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        raise ValueError(
            f"expected a fusion lock of format {FORMAT}, got {given!r}; write a new one with jax-baseline lock"
        )
    try:
        kernels_ = {(row[0], row[1], row[2], row[3]): row[4] for row in plain["kernels"]}
        shapes = {(row[0], row[1], row[2], row[3]): tuple(map(str, row[5:])) for row in plain["kernels"] if row[5:]}
        return Lock(plain["subject"], plain["versions"], kernels_, plain["donated"], shapes)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"expected a whole fusion lock ({error!r}); write a new one with jax-baseline lock") from error

"""A fusion lock: what a program was fused into, kept in a file, so that a change of it fails a test.

What is kept is what a reader of a fusion would call the same: region, phase, kind and the operations inside, and how
many such kernels there are. Names, layouts, tile sizes and order may change.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_baseline.hlo.kernels import kernels
from jax_baseline.hlo.summary import part_of_model
from jax_baseline.hlo.text import parse

FORMAT = 2  # 1 listed the functions of reductions among the operations

Signature = tuple[str, str, str, str]  # region, phase, kind, operations


@dataclass(frozen=True)
class Lock:
    """A program's fusions.

    Attributes:
        subject: what was compiled, in words.
        versions: of what compiled it: ``{"jax": "0.10.2", "backend": "cpu"}``.
        kernels: how many there are of each signature.
        donated: arguments whose memory an output takes over.
    """

    subject: str
    versions: Mapping[str, str]
    kernels: Mapping[Signature, int]
    donated: int

    def dump(self) -> str:
        """The text of the file, one line a signature, so that a diff of two locks can be read."""
        rows = [
            json.dumps([*signature, count], ensure_ascii=False) for signature, count in sorted(self.kernels.items())
        ]
        head = {"format": FORMAT, "subject": self.subject, "versions": dict(self.versions), "donated": self.donated}
        lines = ",\n  ".join(rows)
        return json.dumps(head, ensure_ascii=False)[:-1] + f',\n "kernels": [\n  {lines}\n ]}}\n'


@dataclass(frozen=True)
class Drift:
    """How a program differs from its lock.

    Attributes:
        gone: signatures of the lock that are fewer now, and by how many.
        new: signatures that are more now.
        kernels: (in the lock, now).
        donated: (in the lock, now).
        versions: what compiled it then and now, where they differ: name to (then, now).
    """

    gone: Mapping[Signature, int]
    new: Mapping[Signature, int]
    kernels: tuple[int, int]
    donated: tuple[int, int]
    versions: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.gone or self.new or self.donated[0] != self.donated[1])

    def lines(self) -> list[str]:
        """The differences in words, one a line, region by region."""
        found = []
        for sign, signatures in (("−", self.gone), ("+", self.new)):
            for (region, phase, kind, ops), count in sorted(signatures.items()):
                found.append((region, phase, f"{sign} {count} × {kind} [{ops}]"))
        found.sort(key=lambda item: item[:2])
        lines = [f"{region or '(no scope)'}, {phase}: {text}" for region, phase, text in found]
        if self.donated[0] != self.donated[1]:
            lines.append(f"donated arguments: {self.donated[0]} in the lock, {self.donated[1]} now")
        lines += [f"{name}: {then} made the lock, this is {now}" for name, (then, now) in self.versions.items()]
        return lines


def make_lock(text: str, *, subject: str, versions: Mapping[str, str]) -> Lock:
    """Take the lock of an optimised module.

    Args:
        text: of the module.
        subject: what it is, in words.
        versions: of what compiled it.

    Raises:
        ValueError: if the text is no HLO module.
    """
    module = parse(text)
    signatures: Counter[Signature] = Counter(
        (
            part_of_model(kernel.label.scopes),
            kernel.phase,
            kernel.description,
            " ".join(op if count == 1 else f"{op}×{count}" for op, count in sorted(kernel.ops.items())),
        )
        for kernel in kernels(module)
    )
    return Lock(subject, dict(versions), dict(signatures), len(module.donated))


def read_lock(text: str) -> Lock:
    """Read the text of a lock file.

    Raises:
        ValueError: if it is not one, or of another format.
    """
    try:
        plain: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected a fusion lock (JSON), got {text[:40]!r}… ({error})") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        found = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
        raise ValueError(
            f"expected a fusion lock of format {FORMAT}, got {found!r}; make it anew with jax-baseline lock"
        )
    try:
        kernels_ = {(row[0], row[1], row[2], row[3]): row[4] for row in plain["kernels"]}
        return Lock(plain["subject"], plain["versions"], kernels_, plain["donated"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a whole fusion lock ({error!r}); make it anew with jax-baseline lock") from error


def compare_locks(then: Lock, now: Lock) -> Drift:
    """Hold a program's lock of now against the one in a file; the result is false where nothing drifted."""
    before, after = Counter(then.kernels), Counter(now.kernels)
    return Drift(
        dict(before - after),
        dict(after - before),
        (before.total(), after.total()),
        (then.donated, now.donated),
        {
            name: (then.versions.get(name, "nothing"), now.versions.get(name, "nothing"))
            for name in sorted(then.versions.keys() | now.versions.keys())
            if then.versions.get(name) != now.versions.get(name)
        },
    )

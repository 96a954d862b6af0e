"""A table of targets with two bounds: what a kernel must reach, and what it aims at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchkit import numbers

HEADER = ("what", "must", "aim", "reached", "must reached?")


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        what: What is measured.
        must: The least value to reach.
        aim: The value to aim at.
        kind: ``"share"`` of a limit, or ``"times"`` as fast.
    """

    what: str
    must: float
    aim: float
    kind: Literal["share", "times"]

    def show(self, value: float) -> str:
        """A value of this kind as text."""
        return numbers.percent(value, 0) if self.kind == "share" else numbers.with_unit(value, "×")


@dataclass(frozen=True)
class Reached:
    """What a run reached of a target.

    Attributes:
        target: The target.
        value: The worst value of the run.
        where: The case with that value; empty if there is only one.
        why: A sentence about that case, for a target that is missed.
        accurate: Whether the results are as accurate as the target asks; if not, the target is missed.
    """

    target: Target
    value: float
    where: str
    why: str
    accurate: bool = True

    @property
    def missed(self) -> bool:
        """Whether the run misses the least value, in the digits that the table shows."""
        return not self.accurate or not self._reaches(self.target.must)

    def row(self) -> tuple[str, ...]:
        """The cells under :data:`HEADER`."""
        target = self.target
        met = "**no**" if self.missed else "yes, and the aim" if self._reaches(target.aim) else "yes"
        text = target.show(self.value) + (f" ({self.where})" if self.where else "")
        return target.what, target.show(target.must), target.show(target.aim), text, met

    def _reaches(self, bound: float) -> bool:
        return round(self.value, 2 if self.target.kind == "share" else 3) >= bound


def rows(found: Iterable[Reached]) -> list[tuple[str, ...]]:
    """The table's rows under :data:`HEADER`."""
    return [reached.row() for reached in found]


def reasons(found: Iterable[Reached]) -> list[str]:
    """One sentence for each target that is missed."""
    return [f"{reached.target.what}: {reached.why}" for reached in found if reached.missed]

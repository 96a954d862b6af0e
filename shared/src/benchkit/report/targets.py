"""Targets: what an implementation must reach, what it aims at, and what a run reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchkit import numbers
from benchkit.report.tables import Cell, Column, Table


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        what: What is measured.
        must: The value to reach.
        aim: The value to aim at; None for a target without one.
        kind: ``"share"`` of a limit and ``"times"`` as fast are to be at least so much, ``"seconds"`` at most.
        digits: Decimals of a share in percent. A value counts as reached by the digits that the table shows.
    """

    what: str
    must: float
    aim: float | None = None
    kind: Literal["share", "times", "seconds"] = "share"
    digits: int = 0

    def show(self, value: float) -> str:
        """A value of this kind as text."""
        if self.kind == "share":
            return numbers.percent(value, self.digits)
        return numbers.with_unit(value, "×" if self.kind == "times" else "s")

    def met_by(self, value: float, bound: float) -> bool:
        """Whether a value reaches a bound."""
        if self.kind == "seconds":
            return value <= bound
        return round(value, 2 + self.digits if self.kind == "share" else 3) >= bound


@dataclass(frozen=True)
class Reached:
    """What a run reached of a target.

    Attributes:
        target: The target.
        value: The worst value of the run; None if it was not measured.
        where: The case with that value; empty if there is only one.
        why: A sentence about that case, shown for a target that is missed.
        accurate: Whether the results are as accurate as the target asks; if not, the target is missed.
        peer: What the best other implementation reaches, as text; None if none was measured.
    """

    target: Target
    value: float | None
    where: str = ""
    why: str = ""
    accurate: bool = True
    peer: str | None = None

    @property
    def missed(self) -> bool:
        """Whether the run misses what the target demands."""
        return self.value is not None and not (self.accurate and self.target.met_by(self.value, self.target.must))

    @property
    def shown(self) -> Cell:
        """The value and where it was found."""
        if self.value is None:
            return None
        return self.target.show(self.value) + (f" ({self.where})" if self.where else "")

    @property
    def verdict(self) -> str:
        """Whether the target is met."""
        target = self.target
        if self.value is None:
            return "not measured"
        if self.missed:
            return "**no**" if self.accurate else "**no**, the error is larger"
        return "yes, and the aim" if target.aim is not None and target.met_by(self.value, target.aim) else "yes"


@dataclass(frozen=True)
class Targets:
    """A table of targets, with a sentence below for each that is missed.

    Attributes:
        reached: What the run reached of each target.
        beyond: Why a share can be above 100 %, see :class:`~benchkit.report.tables.Table`.
    """

    reached: Sequence[Reached]
    beyond: str = ""

    def __bool__(self) -> bool:
        return bool(self.reached)

    def table(self) -> Table[Reached]:
        """The table."""
        return Table(
            self.reached,
            [
                Column("what", lambda line: line.target.what),
                Column(
                    "must",
                    lambda line: "≤ " * (line.target.kind == "seconds") + line.target.show(line.target.must),
                    keep=True,
                ),
                Column("aim", _aim, optional=True),
                Column("reached", lambda line: line.shown),
                Column("must reached?", lambda line: line.verdict, keep=True),
                Column("best other implementation", lambda line: line.peer, optional=True),
            ],
            beyond=self.beyond,
        )

    def reasons(self) -> list[str]:
        """A sentence for each target that is missed and has a reason."""
        return [f"{line.target.what}: {line.why}" for line in self.reached if line.missed and line.why]


def _aim(line: Reached) -> str | None:
    return None if line.target.aim is None else line.target.show(line.target.aim)

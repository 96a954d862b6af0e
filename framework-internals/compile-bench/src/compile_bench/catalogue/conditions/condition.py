"""What a condition is. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compile_bench.catalogue.use import Use


@dataclass(frozen=True)
class Condition:
    """When an advice may be followed.

    Attributes:
        text: The condition as a clause that follows "where".
        holds: Whether the condition holds for a use.
    """

    text: str
    holds: Callable[[Use], bool]

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.text}, and {other.text}", lambda use: self.holds(use) and other.holds(use))
